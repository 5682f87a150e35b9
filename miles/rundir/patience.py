"""Reading what must be there from a file system that may fail for a moment.

What is damaged stays damaged, and what is gone stays gone: both are looked at a second time, with files opened anew, and then believed. Every other error
of the operating system (EIO, ESTALE, EMFILE, ...) says nothing about the bytes: the read is tried a few times more, and then it is the step that fails, not the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from miles.core import MilesError, StructureError

PAUSES_S = (0.5, 2.0, 8.0)
T = TypeVar("T")


class UnreadableNow(MilesError):
    """A file cannot be read now, for a reason that says nothing about what it holds (exit code 1: the step is started again)."""


def patiently(read: Callable[[], T], what: str) -> T:
    """What `read`, which opens its files itself, returns. Raises FileNotFoundError or StructureError when it does so twice, a pause apart; UnreadableNow when
    another OSError is left after PAUSES_S. `what`: for the message."""
    believed = 0
    for pause in (*PAUSES_S, None):
        try:
            return read()
        except (FileNotFoundError, StructureError):
            believed += 1
            if believed == 2 or pause is None:
                raise
        except OSError as e:
            if pause is None:
                raise UnreadableNow(f"{what} cannot be read: {e}", f"an answer of the file system within {sum(PAUSES_S):.0f} s",
                                    "the step is started again; look at the mount of the run directory on this node, and at the limit of open files (ulimit -n)") from e
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")
