"""Atomic publish: write under a temporary name, fsync, rename, fsync the directory.

The one way in which Miles makes a file or folder appear. A reader sees the old state or the new one, never a part. `os.rename` is
atomic on POSIX, Lustre and NFS within one directory tree; temporary names carry host and pid, so two writers never share one, and start
with a dot, so that listings skip what a killed writer left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from pathlib import Path

import numpy as np

from miles.core import EnvironmentFault

Buffer = bytes | memoryview | np.ndarray
_MOST_PIECES = 1024  # of one system call (IOV_MAX)
_HOST = socket.gethostname().split(".")[0]


def temp_path(final: Path) -> Path:
    """A temporary sibling of `final` that no other process uses."""
    return final.with_name(f".{final.name}.{_HOST}.{os.getpid()}.tmp")


def write_durably(fd: int, *pieces: Buffer) -> None:
    """Write all of them one after the other at the file's position, and fsync. They are not joined before: that costs more than writing them."""
    left = [view for piece in pieces if (view := memoryview(piece).cast("B"))]
    while left:
        written = os.writev(fd, left[:_MOST_PIECES])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    os.fsync(fd)


def publish_bytes(final: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Make `final` appear with exactly `data`, durably. Raises EnvironmentFault when the file system is full or read-only."""
    tmp = temp_path(final)
    with explain_os_errors(final):
        try:
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            try:
                write_durably(fd, data)
            finally:
                os.close(fd)
            os.rename(tmp, final)
        except BaseException:
            tmp.unlink(missing_ok=True)
            raise
        fsync_dir(final.parent)


def publish_file(tmp: Path, final: Path) -> None:
    """fsync a file already written under `temp_path(final)` and rename it into place."""
    with explain_os_errors(final):
        fd = os.open(tmp, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(tmp, final)
        fsync_dir(final.parent)


def publish_dir(tmp: Path, final: Path) -> None:
    """fsync every file below `tmp`, rename it to `final`, fsync the parent. `final` must not exist."""
    with explain_os_errors(final):
        for root, _, files in os.walk(tmp):
            for name in files:
                fd = os.open(os.path.join(root, name), os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            fsync_dir(Path(root))
        os.rename(tmp, final)
        fsync_dir(final.parent)


def remove_unfinished(folder: Path, stem: str = "") -> list[str]:
    """Remove what killed writers were publishing in `folder` (temporary names that begin with `stem`): half a checkpoint is as large as a whole one.
    Only for the one living writer of these names, whose predecessors are fenced. Returns the names removed."""
    found = sorted(folder.glob(f".{stem}*.tmp"))
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # its fenced writer may still be adding to it: the next start removes the rest
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in found]


def remove_tree(path: Path) -> None:
    """Remove a published folder: first out of the readers' sight by one rename, then its contents."""
    doomed = temp_path(path)
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def explain_os_errors(path: Path):
    """Turn the file-system errors that a user can do something about into an EnvironmentFault that says what."""
    try:
        yield
    except OSError as e:
        advice = {
            errno.ENOSPC: "free space on that file system (or move run.root), then `miles-submit resume` the run: nothing published is lost",
            errno.EDQUOT: "the quota is used up: free space, then `miles-submit resume` the run: nothing published is lost",
            errno.EROFS: "the file system is read-only: remount it or move run.root",
            errno.EACCES: "make the folder writable for the user of the job",
        }.get(e.errno)
        if advice is None:
            raise
        raise EnvironmentFault(f"cannot write {path}: {e.strerror}", "a writable file system with free space", advice) from e
