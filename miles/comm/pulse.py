"""Signs of life of a rank: a number that rises for as long as its main thread runs Python. Its parent watches it (miles.cluster.rank).

What counts is that the main thread comes back to the interpreter. A process that is stopped does not; nor does one that waits for a driver or a file system
that never answers, or for the interpreter lock that a thread keeps while it does. One that computes, compiles, loads, or polls for others does, many times a
second, wherever in the program it is, so that no loop has to say it lives. Alternatives: a thread that writes the number itself lives on beside a main thread that
hangs; calls in the loops miss what lies between them, such as a checkpoint that is loaded for an hour; a real signal breaks off system calls of libraries.
"""

from __future__ import annotations

import _thread
import itertools
import os
import signal
import threading
import time

BEAT_S = 2.0
_BEAT = signal.SIGRTMAX  # never sent: a number of which Python runs the handler when it is told to


def show_life(fd: int) -> None:
    """Write a new number to the file `fd` (8 bytes, not on disk) every BEAT_S, from now on, by the main thread, which calls this."""
    os.set_inheritable(fd, False)
    numbers = itertools.count(1)
    signal.signal(_BEAT, lambda *_: os.pwrite(fd, next(numbers).to_bytes(8, "little"), 0))

    def ask() -> None:
        while True:
            _thread.interrupt_main(_BEAT)  # no signal: the handler runs between two lines of Python
            time.sleep(BEAT_S)

    threading.Thread(target=ask, name="pulse", daemon=True).start()
