"""What the process gives back to the system of memory that it has freed."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def give_back(size: int) -> bool:
    """From now on, give memory of at least `size` bytes back when it is freed. Otherwise glibc learns to keep up to 32 MiB of each for the next that asks:
    beside a snapshot of the weights it then holds as much as half of it again. Returns False, and does nothing, where malloc is another (it has its own ways)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, size) == 1
