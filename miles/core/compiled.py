"""`compiled`: how Miles compiles a loop with numba. Not imported by `miles.core` itself: numba takes its time.

Compiled code is kept in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache; miles/numba), never beside the sources: an installation may
be read-only for its users, or shared. Where that folder cannot be written, each process compiles again (seconds).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numba


def compiled(function: Callable, **options) -> Callable:
    """`numba.njit` without the GIL, cached outside the source tree or not at all. `options` are numba's."""
    before = numba.config.CACHE_DIR
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles" / "numba"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK) or folder.stat().st_uid != os.getuid():  # a cache is code: only one's own
            raise PermissionError(folder)
        numba.config.CACHE_DIR = str(folder)  # read once, when the function is wrapped
        return numba.njit(nogil=True, cache=True, **options)(function)
    except (OSError, RuntimeError):  # RuntimeError: there is no home, or numba found the folder not writable
        return numba.njit(nogil=True, **options)(function)
    finally:
        numba.config.CACHE_DIR = before
