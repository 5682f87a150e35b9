"""Append-only journals: one file per writer and epoch, one record per line, each with its own checksum.

A line is `<xxh32 hex of the JSON> <JSON>\n`. A torn last line (kill -9, full disk) fails its checksum or lacks its newline and is not
believed; whatever stands before it is. A writer that failed once appends no more, so a torn line is always the last: one that whole lines
follow is damage, and damage is an error. Writers never share a file, so no lock is needed on Lustre or NFS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from miles.core import EnvironmentFault
from miles.rundir.publish import explain_os_errors, fsync_dir, write_durably


T = TypeVar("T")


def encode(record: Any) -> bytes:
    """The line of a record: a dict or a msgspec.Struct."""
    body = msgspec.json.encode(record)
    return f"{xxhash.xxh32_hexdigest(body)} ".encode() + body + b"\n"


def decode(line: bytes, kind: type[T] = dict[str, Any]) -> T | None:
    """The record of one complete line, or None when it is torn."""
    check, sep, body = line.rstrip(b"\n").partition(b" ")
    if not sep or xxhash.xxh32_hexdigest(body).encode() != check:
        return None
    return msgspec.json.decode(body, type=kind)


class JournalWriter:
    """Appends records durably: when `append` returns, the record survives kill -9 and power loss."""

    _failed = False

    def __init__(self, path: Path):
        self.path = path
        with explain_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            except FileExistsError:
                raise EnvironmentFault(f"journal {path} exists already", "one journal per writer and epoch",
                                       "start the role through the supervisor, which gives each start its own epoch") from None
            fsync_dir(path.parent)

    def append(self, *records: dict[str, Any]) -> None:
        """Raises EnvironmentFault: the file system does not take it, now or at an earlier append. Some of the records may be there then, each whole."""
        if self._failed:
            raise EnvironmentFault(f"journal {self.path} could not be written before", "no append after a torn one: readers stop there",
                                   "restart the role, which begins a journal of its own")
        data = b"".join(encode(r) for r in records)
        self._failed = True  # until all of it is durable
        with explain_os_errors(self.path):
            write_durably(self._fd, data)
        self._failed = False

    def reader(self) -> JournalReader:
        """What is in it, read from its beginning without opening it again."""
        return JournalReader(self.path, self._fd)

    def close(self) -> None:
        os.close(self._fd)


class JournalReader:
    """Follows one journal file: each `poll` returns the complete records that were added since the last.

    It opens the file each time, because an NFS client shows what others have appended to a file when it is opened; `fd` is for the process that appends.
    """

    def __init__(self, path: Path, fd: int | None = None):
        self.path, self._fd, self._offset = path, fd, 0

    def poll(self) -> list[dict[str, Any]]:
        try:
            if self._fd is None:
                with open(self.path, "rb") as f:
                    f.seek(self._offset)
                    data = f.read()
            else:
                data = os.pread(self._fd, os.fstat(self._fd).st_size - self._offset, self._offset)
        except FileNotFoundError:
            return []
        out, lines = [], data.split(b"\n")[:-1]  # what stands behind the last newline is torn, or still being written
        for n, line in enumerate(lines):
            record = decode(line)
            if record is None:
                if any(decode(later) is not None for later in lines[n + 1 :]):
                    raise EnvironmentFault(f"{self.path}: the line at byte {self._offset} does not match its checksum, and whole lines follow it",
                                           "only the last line may be torn", "check the file system; restore the file, or start a new run from the last checkpoint")
                break
            out.append(record)
            self._offset += len(line) + 1
        return out


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    yield from JournalReader(path).poll()
