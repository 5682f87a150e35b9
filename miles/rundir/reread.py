"""Reading what must be there from a file system that now and then fails for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TIMES, PAUSE_S = 3, 2.0


def patiently(read: Callable[[], T]) -> T:
    """What `read` returns, tried TIMES times with PAUSE_S in between where it raises an OSError: a read that fails (EIO, ESTALE, a mount that comes back) says
    nothing about the bytes. Raises the last one; FileNotFoundError at once, because that is an answer."""
    for _ in range(TIMES - 1):
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError as e:
            print(f"{e}: read again in {PAUSE_S:g} s", flush=True)
            time.sleep(PAUSE_S)
    return read()
