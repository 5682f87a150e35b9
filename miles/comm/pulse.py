"""Signs of life of a rank: a number that rises for as long as its main thread runs Python. Its parent watches it (miles.cluster.rank).

What counts is that the main thread comes back to the interpreter. A process that is stopped does not; nor does one that waits for a driver or a file system
that never answers, or for the interpreter lock that a thread keeps while it does. One that computes, compiles, loads, or polls for others does, many times a
second, wherever in the program it is, so that no loop has to say it lives. Alternatives: a thread that writes the number itself lives on beside a main thread that
hangs; calls in the loops miss what lies between them, such as a checkpoint that is loaded for an hour; a real signal breaks off system calls of libraries.

The main thread looks at the threads that write and read beside it (miles.core.at_work) as often: it would wait for one that hangs for ever, and live. Then it ends the process.
"""

from __future__ import annotations

import _thread
import itertools
import os
import signal
import sys
import threading
import time
import traceback

from miles.core.at_work import signs

BEAT_S = 2.0
_BEAT = signal.SIGRTMAX  # never sent: a number of which Python runs the handler when it is told to


def show_life(fd: int, limit_s: float) -> None:
    """Write a new number to the file `fd` (8 bytes, not on disk) every BEAT_S, from now on, by the main thread, which calls this; and end the process, status 1,
    when a thread that is at work has used no processor time for `limit_s`."""
    os.set_inheritable(fd, False)
    numbers, threads = itertools.count(1), Threads()

    def beat(*_) -> None:
        os.pwrite(fd, next(numbers).to_bytes(8, "little"), 0)
        if (hung := threads.look(signs(), limit_s / BEAT_S)) is not None:
            leave(*hung, limit_s)

    signal.signal(_BEAT, beat)

    def ask() -> None:
        while True:
            _thread.interrupt_main(_BEAT)  # no signal: the handler runs between two lines of Python
            time.sleep(BEAT_S)

    threading.Thread(target=ask, name="pulse", daemon=True).start()


class Threads:
    """How often in a row each thread that is at work was found silent. Looks are counted, not seconds: a process that was suspended has not looked."""

    def __init__(self):
        self._silent: dict[int, tuple[bytes, int]] = {}  # thread -> its sign, and how often that has been found again

    def look(self, found: dict[int, tuple[str, bytes]], limit: float) -> tuple[int, str] | None:
        """found: what each thread is at, and its sign (`signs`). One that was silent `limit` times, with what it is at."""
        before = self._silent
        self._silent = {thread: (sign, before[thread][1] + 1 if before.get(thread, ("",))[0] == sign else 0) for thread, (_, sign) in found.items()}
        return next(((thread, found[thread][0]) for thread, (_, times) in self._silent.items() if times >= limit), None)


def leave(thread: int, what: str, limit_s: float) -> None:
    """End the process, and say where the thread hangs. What it has not finished is not there, as after kill -9."""
    where = "".join(traceback.format_stack(sys._current_frames().get(thread)))
    print(f"a thread hangs: {what}. It has used no processor time for cluster.frozen_s ({limit_s:g} s): this rank ends, and its step starts again. Check the file system. "
          f"It is in\n{where}", file=sys.stderr, flush=True)
    os._exit(1)
