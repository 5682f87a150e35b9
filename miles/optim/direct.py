"""Blocks of whole pages to and from a file, past the page cache where the file system can do that.

O_DIRECT takes offsets, lengths and addresses that are multiples of a page. A transfer may end early for all that (a signal, a full disk, a file system
that moves less at once), also within a page: then it goes on at the beginning of that page, since no other offset is allowed. Digests are xxh3-128.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from miles.core import EnvironmentFault
from miles.optim.layout import PAGE

AGAIN = "start the run again: it goes on from the last checkpoint; if it happens again, the disk is failing: set trainer.optimizer.state_dir to another"
RESERVED = 1 << 30  # bytes at a time: a file system that cannot reserve writes them, and in between the main thread shows that it lives (miles.comm.pulse)
TRIES = 3  # transfers in a row that do not finish one page, after which the disk is given up


def buffer_of(size: int) -> mmap.mmap:
    """Memory for blocks: page-aligned, this process's own, and of huge pages where there are some, since a transfer pins each page of it."""
    buffer = mmap.mmap(-1, max(size, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def reserve(path: Path, size: int, need: str, do: str) -> None:
    """A new file of `size` bytes in place of what has this name. Raises EnvironmentFault, which says what is needed and what to `do`: the disk has no space."""
    path.unlink(missing_ok=True)
    with path.open("wb") as f, explained(path):
        try:
            for at in range(0, size, RESERVED):
                os.posix_fallocate(f.fileno(), at, min(RESERVED, size - at))
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            raise EnvironmentFault(f"{path}: no space for {size / 1e9:.3g} GB, {shutil.disk_usage(path.parent).free / 1e9:.3g} GB are free", need, do) from e


def open_file(path: Path) -> int:
    """Past the page cache where the file system can do that: the state is read once a step, and is larger than memory."""
    with explained(path):
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            return os.open(path, os.O_RDWR)
        try:
            os.preadv(fd, [buffer_of(PAGE)], 0)
        except OSError:
            os.close(fd)
            return os.open(path, os.O_RDWR)
        return fd


def read_block(fd: int, path: Path, view: memoryview, offset: int) -> None:
    """Fill `view`, whole pages, from `offset`, a multiple of a page. Raises EnvironmentFault: the file ends before, or the disk does not deliver."""
    _transfer(os.preadv, "read", fd, path, view, offset)


def write_block(fd: int, path: Path, view: memoryview, offset: int) -> None:
    """The same the other way. Raises EnvironmentFault: the disk takes no more."""
    _transfer(os.pwritev, "write", fd, path, view, offset)


def read_digested(fd: int, path: Path, view: memoryview, offset: int) -> str:
    """`read_block`. Returns the digest of what was read."""
    read_block(fd, path, view, offset)
    return xxhash.xxh3_128_hexdigest(view)


def write_digested(fd: int, path: Path, view: memoryview, offset: int) -> str:
    """`write_block`. Returns the digest of what was written."""
    digest = xxhash.xxh3_128_hexdigest(view)
    write_block(fd, path, view, offset)
    return digest


def _transfer(call: Callable[[int, list[memoryview], int], int], what: str, fd: int, path: Path, view: memoryview, offset: int) -> None:
    done, tries = 0, 0
    with explained(path):
        while done < len(view):
            moved = call(fd, [view[done:]], offset + done)
            if done + moved == len(view):
                return
            pages = moved // PAGE * PAGE
            done, tries = done + pages, 0 if pages else tries + 1
            if tries == TRIES:
                size = os.fstat(fd).st_size
                if what == "read" and size < offset + len(view):
                    raise EnvironmentFault(f"{path} ends at byte {size}, within a block that begins at {offset}", f"{len(view)} bytes from there on", AGAIN)
                raise EnvironmentFault(f"a {what} of {len(view) - done} bytes at {offset + done} of {path} moved {moved} bytes, {TRIES} times in a row",
                                       "at least one page of 4096 bytes each time", AGAIN)


@contextlib.contextmanager
def explained(path: Path):
    """Turns an OSError of `path` into an EnvironmentFault."""
    try:
        yield
    except OSError as e:
        raise EnvironmentFault(f"{path}, state of the trainer: {e.strerror}", "a local disk that works and has space",
                               "free space or set trainer.optimizer.state_dir to another disk, then start the run again: "
                               "it goes on from the last checkpoint") from e
