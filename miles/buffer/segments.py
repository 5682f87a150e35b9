"""Segment files: what one process has finished, appended by it: samples (`parts/`) by the rank that made them, sealed groups (`groups/`) by the leader.

    parts/e000002.node7.4711.0000.seg            epoch, host, process and number of the segment
    parts/p0001.e000002.node7.4711.0000.seg      of a pool (miles.rundir.pooldir): its number and its epoch

A sample is written once, where it was made, by one write and one fsync; groups refer to it. So a group costs the file system a handful of
operations, however many samples it has, and no process copies the bytes of others. A segment belongs to one writer, so no append is shared. It ends
at a limit of bytes, or where a write failed: nothing is appended after bytes that may be torn.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from miles.buffer.frames import Header, Place, read_header
from miles.rundir.publish import Buffer, explain_os_errors, fsync_dir, write_durably

_NAME = re.compile(r"(p(?P<pool>\d+)\.)?e(?P<epoch>\d+)\.(?P<writer>[^.]+\.\d+)\.(?P<number>\d+)\.seg")
_HOST = socket.gethostname().split(".")[0].replace(".", "-")


class Source(NamedTuple):
    """Processes that are fenced together: the rollout ranks of a pool (0: of the run's own job) in one epoch of it."""

    pool: int
    epoch: int


@dataclass(frozen=True, order=True)
class SegmentName:
    source: Source
    writer: str
    number: int

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """None: the file is no segment."""
        found = _NAME.fullmatch(name)
        return cls(Source(int(found["pool"] or 0), int(found["epoch"])), found["writer"], int(found["number"])) if found else None

    def __str__(self) -> str:
        pool = f"p{self.source.pool:04d}." if self.source.pool else ""
        return f"{pool}e{self.source.epoch:06d}.{self.writer}.{self.number:04d}.seg"


class Written(NamedTuple):
    """Where a frame, or a sealed group, begins."""

    segment: str  # file name
    offset: int


class SegmentWriter:
    """Appends records durably. Safe to call from several threads of a process."""

    def __init__(self, folder: Path, source: Source, limit: int, fence: Callable[[], None]):
        """`limit`: a segment of so many bytes takes no further record. `fence` is called before each new segment and raises when this epoch is over."""
        self._folder, self._source, self._limit, self._fence = folder, source, limit, fence
        self._lock, self._fd, self._size, self._number, self._name = threading.Lock(), -1, 0, 0, ""

    def append(self, record: Sequence[Buffer]) -> Written:
        """`record`: its pieces. When it returns, the record survives kill -9 and power loss. Raises EnvironmentFault (disk full, read-only): it is not there."""
        with self._lock, explain_os_errors(self._folder):
            if self._fd < 0 or self._size >= self._limit:
                self._open()
            fd, self._fd = self._fd, -1  # not used again unless all goes well
            try:
                write_durably(fd, *record)
            except BaseException:
                os.close(fd)
                raise
            written = Written(self._name, self._size)
            self._fd, self._size = fd, self._size + sum(memoryview(piece).nbytes for piece in record)
            return written

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open(self) -> None:
        self._fence()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        while True:  # a process of an earlier attempt on this host may have had our id
            name = str(SegmentName(self._source, f"{_HOST}.{os.getpid()}", self._number))
            self._number += 1
            try:
                fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
                break
            except FileExistsError:
                continue
        try:
            fsync_dir(self._folder)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._size, self._name = fd, 0, name


class SegmentReader:
    """Follows the segments of a folder: each `poll` gives the frames that were added since the last."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._offsets: dict[SegmentName, int] = {}

    def poll(self, sources: Collection[Source] | None = None) -> Iterator[tuple[Header, Place]]:
        """`sources`: look at segments of these alone. A segment that has a successor and was read to its end is not opened again."""
        names = segments(self._folder)
        last = {(n.source, n.writer): n.number for n in names}
        for name in names:
            open_end = name.number == last[name.source, name.writer]
            offset = self._offsets.get(name, 0)
            if offset < 0 or (sources is not None and name.source not in sources):
                continue
            try:
                for found in read_segment(self._folder, name, offset):
                    offset += found[1].size
                    yield found
            except FileNotFoundError:
                continue  # retired since it was listed
            self._offsets[name] = offset if open_end else -1


def read_segment(folder: Path, name: SegmentName, offset: int = 0) -> Iterator[tuple[Header, Place]]:
    """The frames of a segment from `offset` on, up to its end or to what is torn or damaged: what lies behind cannot be found."""
    fd = os.open(folder / str(name), os.O_RDONLY)
    try:
        end = os.fstat(fd).st_size
        while (found := read_header(fd, str(name), offset, end)) is not None:
            offset += found[1].size
            yield found
    finally:
        os.close(fd)


def segments(folder: Path) -> list[SegmentName]:
    """All segments, in order."""
    return sorted(n for name in os.listdir(folder) if (n := SegmentName.parse(name)) is not None)
