"""Append-only journals: one file per writer and epoch, one record per line, each with its own checksum.

A line is `<xxh32 hex of the JSON> <JSON>\n`. A torn last line (kill -9, full disk) fails its checksum or lacks its newline and is not
believed; whatever stands before it is. Writers never share a file, so no lock is needed on Lustre or NFS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from miles.core import EnvironmentFault
from miles.rundir.publish import explain_os_errors, fsync_dir


def encode(record: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(record)
    return f"{xxhash.xxh32_hexdigest(body)} ".encode() + body + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of one complete line, or None when it is torn."""
    check, sep, body = line.rstrip(b"\n").partition(b" ")
    if not sep or xxhash.xxh32_hexdigest(body).encode() != check:
        return None
    return msgspec.json.decode(body)


class JournalWriter:
    """Appends records durably: when `append` returns, the record survives kill -9 and power loss."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            raise EnvironmentFault(f"journal {path} exists already", "one journal per writer and epoch",
                                   "start the role through the supervisor, which gives each start its own epoch") from None
        fsync_dir(path.parent)

    def append(self, *records: dict[str, Any]) -> None:
        data = b"".join(encode(r) for r in records)
        with explain_os_errors(self.path):
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class JournalReader:
    """Follows one journal file: each `poll` returns the complete records that were added since the last."""

    def __init__(self, path: Path):
        self.path, self._offset = path, 0

    def poll(self) -> list[dict[str, Any]]:
        try:
            with open(self.path, "rb") as f:
                f.seek(self._offset)
                data = f.read()
        except FileNotFoundError:
            return []
        out = []
        for line in data.splitlines(keepends=True):
            record = decode(line) if line.endswith(b"\n") else None
            if record is None:
                break  # torn: either still being written, or the writer died here
            out.append(record)
            self._offset += len(line)
        return out


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    yield from JournalReader(path).poll()
