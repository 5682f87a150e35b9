"""What threads beside the main one are at, so that one that hangs is noticed (miles.comm.pulse).

A thread that waits for a mount that never answers is waited for by a main thread that lives. So whoever lets a thread do what may hang says it here. Its sign of
life is the processor time that it has used: a thread that writes, compresses or hashes uses some, whatever the size of its pieces and however slow the disk is;
one that hangs in a call uses none.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple


class Work(NamedTuple):
    what: str
    number: int  # of all that was ever begun
    clock: int  # of the thread's processor time


_now: dict[int, Work] = {}  # thread -> what it is at
_numbers = itertools.count()


@contextlib.contextmanager
def at_work(what: str) -> Iterator[None]:
    """This thread does `what`, until the block ends. One who waits in it for other threads counts as hanging when these take longer than a rank may be silent."""
    thread = threading.get_ident()
    outer = _now.get(thread)
    _now[thread] = Work(what, next(_numbers), time.pthread_getcpuclockid(thread))
    try:
        yield
    finally:
        if outer is None:
            del _now[thread]
        else:
            _now[thread] = outer


def signs() -> dict[int, tuple[str, bytes]]:
    """thread -> what it is at, and a sign of life that changes with what it is at and when it has used the processor."""
    found = {}
    for thread, work in list(_now.items()):
        with contextlib.suppress(OSError):  # it has ended
            found[thread] = work.what, f"{work.number} {time.clock_gettime_ns(work.clock)}".encode()
    return found
