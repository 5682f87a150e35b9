"""Open sessions on disk, so that a process that was killed continues them: those of harnesses outside, whose next request comes, and those of the run's
own trajectories, which are played again up to the turn that was answered last.

    RUN/sessions/r003.e0007.0002.log     rank 3, epoch 7 of the rollout role, second file of that process

A file is a row of frames `<u32 length> <u64 xxh3-64 of the body> <body>` (little endian), each body one record in MessagePack: a session was opened, a
turn was answered, a session was closed. It begins with the sessions that were open when it was made and appears by one rename, so the newest file
alone is the truth and older ones are removed. A torn last frame (kill -9, full disk) is not believed; its turn was never answered.

Turns of many sessions are made durable together: while one write and fsync is under way the next ones gather.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec
import xxhash

from miles.core import EnvironmentFault, MilesError
from miles.core.at_work import at_work
from miles.rundir.publish import explain_os_errors, publish_file, remove_unfinished, temp_path

log = logging.getLogger(__name__)

_FRAME = struct.Struct("<IQ")
ROTATE_BYTES = 64 << 20  # a file of this size is replaced by one of the sessions that are still open, if that is much smaller


class Opened(msgspec.Struct, tag="open", omit_defaults=True):
    """A session began."""

    id: str
    routing_key: str
    version: int  # weight version served at its opening
    wall: float  # unix seconds
    trajectory: bool = False  # of a trajectory that this run plays: it goes on when that is played again, not with the next request


class Answered(msgspec.Struct, tag="turn", omit_defaults=True):
    """A turn was sampled. Arrays are the bytes of `Turn`'s; of its input only what follows the tokens of `parent`."""

    id: str
    kept: int  # turns of the session that stand before this one; a linear retry drops those after
    parent: int  # index of the turn it goes on from, -1 for none
    appended: list[dict[str, Any]]
    reply: dict[str, Any]
    new_ids: bytes
    output_ids: bytes
    logprobs: bytes
    versions: bytes
    finish: str
    tools: list[dict[str, Any]] | None = None  # of a first turn
    cached: int = 0
    cacheable: int = 0
    reused: int = 0
    seconds: float = 0.0
    routes: bytes | None = None
    routes_dtype: str = ""
    routes_shape: tuple[int, ...] = ()
    routes_start: int = 0
    counters: dict[str, Any] = {}
    drafts: tuple[int, int, int] = (0, 0, 0)


class Closed(msgspec.Struct, tag="close"):
    id: str


Record = Opened | Answered | Closed
Stored = tuple[Opened, list[Answered]]  # a session as it stands
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Record)


def frame(record: Record) -> bytes:
    body = _encoder.encode(record)
    return _FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def read_frames(data: bytes) -> Iterator[Record]:
    """The records up to the first frame that is torn."""
    view, at = memoryview(data), 0
    while at + _FRAME.size <= len(view):
        length, digest = _FRAME.unpack_from(view, at)
        body = view[at + _FRAME.size: at + _FRAME.size + length]
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
            return
        yield _decoder.decode(body)
        at += _FRAME.size + length


def open_sessions(records: Iterable[Record]) -> dict[str, Stored]:
    """Sessions that were not closed, with their turns as they stand. Pure."""
    found: dict[str, Stored] = {}
    for record in records:
        match record:
            case Opened():
                found[record.id] = (record, [])
            case Answered():
                turns = found[record.id][1]
                turns[record.kept:] = [record]
            case Closed():
                found.pop(record.id, None)
    return found


def stored_sessions(folder: Path, rank: int) -> dict[str, Stored]:
    """What the newest process of a rank, dead or alive, has on disk."""
    while files := sorted(folder.glob(f"{_stem(rank)}.e*.log")):
        try:
            return open_sessions(read_frames(files[-1].read_bytes()))
        except FileNotFoundError:
            continue  # replaced by a newer one since it was listed
    return {}


def _stem(rank: int) -> str:
    return f"r{rank:03d}"


class SessionStore:
    """The file of one server process. `restored`: the sessions that its predecessors left open. Use `append` in one event loop."""

    def __init__(self, folder: Path, rank: int, epoch: int, fence: Callable[[], None] = lambda: None):
        """`fence` raises StaleEpochError when another process has taken over; asked before each answer."""
        self._folder, self._stem, self._fence = folder, _stem(rank), fence
        fence()
        folder.mkdir(exist_ok=True)
        remove_unfinished(folder, f"{self._stem}.")
        self._number, self._epoch = 0, epoch
        self.restored = stored_sessions(folder, rank)
        self._waiting: list[tuple[bytes, asyncio.Future]] = []
        self._writing = False
        # A bare queue: an executor's futures would double what handing a turn to the thread costs.
        self._batches: SimpleQueue[tuple[asyncio.AbstractEventLoop, list[tuple[bytes, asyncio.Future]]] | None] = SimpleQueue()
        self._thread = Thread(target=self._commit_batches, name="sessions", daemon=True)
        self._fd, self._path, self._size, self._rotate_at = -1, folder, 0, ROTATE_BYTES
        self._broken: MilesError | None = None
        self._begin(self.restored)
        self._thread.start()

    def append(self, *records: Record) -> asyncio.Future[None]:
        """Done when the records survive kill -9 and power loss; an EnvironmentFault when they cannot be written: then they are not there."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((b"".join(map(frame, records)), done))
        if not self._writing:
            self._write()
        return done

    def close(self) -> None:
        """When nothing is appended any more."""
        self._batches.put(None)
        self._thread.join()
        os.close(self._fd)

    def _write(self) -> None:
        """Begin to write all that waits. What comes meanwhile is written next."""
        batch, self._waiting, self._writing = self._waiting, [], True
        self._batches.put((asyncio.get_running_loop(), batch))

    def _written(self, batch: list[tuple[bytes, asyncio.Future[None]]], error: Exception | None) -> None:
        self._writing = False
        if self._waiting:
            self._write()
        for _, done in batch:
            if done.done():  # its caller has given up
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    # -- in the thread -------------------------------------------------------------------------------------------------------
    def _commit_batches(self) -> None:
        while (job := self._batches.get()) is not None:
            loop, batch = job
            error: Exception | None = None
            try:
                with at_work(f"writing sessions to {self._path}"):
                    self._commit(b"".join(data for data, _ in batch))
            except Exception as e:  # noqa: BLE001  whoever waits for the batch is told
                error = e
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._written, batch, error)

    def _commit(self, data: bytes) -> None:
        if self._broken is not None:
            raise self._broken
        path = self._path
        try:
            with explain_os_errors(path):
                view = memoryview(data)
                while view:
                    view = view[os.pwrite(self._fd, view, self._size + len(data) - len(view)):]
                os.fdatasync(self._fd)  # the length too, as POSIX wants it; the times of the file alone may be lost
        except (EnvironmentFault, OSError) as e:
            fault = e if isinstance(e, EnvironmentFault) else EnvironmentFault(f"cannot write {path}: {e}", "a file system that keeps what is written")
            try:
                os.ftruncate(self._fd, self._size)  # half a frame would hide all that come after it
                os.fsync(self._fd)
            except OSError:
                self._broken = fault  # what is in the file is no longer known
            raise fault from e
        self._size += len(data)
        self._fence()
        if self._size > self._rotate_at:
            try:
                self._begin(open_sessions(read_frames(path.read_bytes())))
            except (EnvironmentFault, OSError) as e:
                log.warning("%s stays in use: %s", path, e)
                self._rotate_at = 2 * self._size

    def _begin(self, live: dict[str, Stored]) -> None:
        """Go on in a new file that begins with these sessions. The old one stays in use when that fails."""
        path = self._folder / f"{self._stem}.e{self._epoch:04d}.{self._number + 1:06d}.log"
        with explain_os_errors(path):
            with open(temp_path(path), "wb") as f:
                for opened, turns in live.values():
                    f.write(frame(opened))
                    f.writelines(frame(t) for t in turns)
            publish_file(temp_path(path), path)
            fd = os.open(path, os.O_WRONLY)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path, self._number = fd, path, self._number + 1
        self._size = os.fstat(fd).st_size
        self._rotate_at = max(ROTATE_BYTES, 4 * self._size)
        for old in self._folder.glob(f"{self._stem}.e*.log"):
            if old < path:
                old.unlink(missing_ok=True)
