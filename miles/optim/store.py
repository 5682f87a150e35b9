"""Two files that take turns: generation n lies in state.<n % 2>; the next is written to the other, and the manifest then names it.

    read bucket i + 1  |  compute bucket i  |  write bucket i - 1        three buffers, reused

The file that the manifest names is never written to, so that a kill at any point leaves a whole generation. Manifest last: data synced, then renamed
into place. Digests of all buckets are in it and are checked at every read.

A snapshot is a hard link to the file of a generation: while it is there, a step that has to write that file begins a new one in its place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
import xxhash

from miles.core import EnvironmentFault
from miles.optim.layout import FIELDS, PAGE, BucketLayout
from miles.rundir import publish_bytes

BUFFERS = 3
AGAIN = "start the run again: it goes on from the last checkpoint; if it happens again, the disk is failing: set trainer.optimizer.state_dir to another"

Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # main, exp_avg, exp_avg_sq: float32 [stride], on the CPU


class Manifest(msgspec.Struct, frozen=True):
    """Which generation is whole, and what it is."""

    generation: int
    elements: int
    bucket: int
    digests: list[str]  # xxh3-128 of each block


class BucketStore:
    """The state of one shard in `folder`, which one process uses.

    >>> store = BucketStore.create(folder, layout, fill)
    >>> store.step(compute)              # compute(i, (main, exp_avg, exp_avg_sq)) changes the fields of bucket i in place
    """

    def __init__(self, folder: Path, layout: BucketLayout, manifest: Manifest):
        self.folder, self.layout, self.manifest = folder, layout, manifest
        self._buffers = [mmap.mmap(-1, max(layout.block_bytes, PAGE)) for _ in range(BUFFERS)]  # page-aligned
        self._fds = [_open(folder / f"state.{i}") for i in range(2)]

    @classmethod
    def create(cls, folder: Path, layout: BucketLayout, fill: Callable[[int, Fields], None]) -> BucketStore:
        """Generation 0: `fill(i, fields)` sets bucket i, zeros before. Replaces what is in `folder`. Raises EnvironmentFault: the disk is full."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").unlink(missing_ok=True)
        for i in range(2):
            _reserve(folder / f"state.{i}", layout.file_bytes)
        store = cls(folder, layout, Manifest(-1, layout.elements, layout.bucket, []))
        store.step(fill, fresh=True)
        return store

    @classmethod
    def open(cls, folder: Path, layout: BucketLayout) -> BucketStore:
        """What is in `folder`. Raises EnvironmentFault: no manifest, or one of another layout."""
        path = folder / "manifest.json"
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (OSError, msgspec.MsgspecError) as e:
            raise EnvironmentFault(f"{path} cannot be read: {e}", "the manifest of a streamed optimizer state", AGAIN) from e
        if (manifest.elements, manifest.bucket) != (layout.elements, layout.bucket):
            raise EnvironmentFault(f"{path} is of {manifest.elements} elements in buckets of {manifest.bucket}",
                                   f"{layout.elements} elements in buckets of {layout.bucket}", AGAIN)
        return cls(folder, layout, manifest)

    @property
    def buffer_bytes(self) -> int:
        """Memory that the store holds."""
        return sum(len(b) for b in self._buffers)

    def read(self, bucket: int) -> Fields:
        """A bucket of the present generation; valid until the next call. Raises EnvironmentFault: it is damaged."""
        return self._fields(self._read(bucket, self._buffers[0]))

    def step(self, compute: Callable[[int, Fields], None], *, fresh: bool = False) -> None:
        """Write the next generation: each bucket of the present one (`fresh`: zeros), as `compute` leaves it.

        Raises EnvironmentFault: a block is damaged or the disk takes no more; the present generation stays.
        """
        self._leave_to_snapshot((self.manifest.generation + 1) % 2)
        count, load = self.layout.buckets, self._zeros if fresh else self._read
        writes: list[Future[str]] = []
        with ThreadPoolExecutor(1, "optim-read") as reader, ThreadPoolExecutor(1, "optim-write") as writer:
            reading = reader.submit(load, 0, self._buffers[0]) if count else None
            for i in range(count):
                buffer = reading.result()
                if i + 1 < count:
                    if i >= 2:
                        writes[i - 2].result()  # used the buffer that is read into next
                    reading = reader.submit(load, i + 1, self._buffers[(i + 1) % BUFFERS])
                compute(i, self._fields(buffer))
                writes.append(writer.submit(self._write, i, buffer))
            digests = [w.result() for w in writes]
        generation = self.manifest.generation + 1
        with _Explained(self.folder / f"state.{generation % 2}"):
            os.fsync(self._fds[generation % 2])
        manifest = Manifest(generation, self.layout.elements, self.layout.bucket, digests)
        publish_bytes(self.folder / "manifest.json", msgspec.json.encode(manifest))
        self.manifest = manifest

    def snapshot(self) -> Snapshot:
        """The present generation, as it stays whatever steps follow. One at a time. Raises EnvironmentFault: the file system has no hard links."""
        path, state = self.folder / "snapshot", self.folder / f"state.{self.manifest.generation % 2}"
        path.unlink(missing_ok=True)
        with _Explained(path):
            os.link(state, path)
        return Snapshot(path, self.layout, self.manifest)

    def _leave_to_snapshot(self, which: int) -> None:
        """A file that is about to be written and that a snapshot holds is left to it."""
        if os.fstat(self._fds[which]).st_nlink > 1:
            path = self.folder / f"state.{which}"
            _reserve(path, self.layout.file_bytes)
            os.close(self._fds[which])
            self._fds[which] = _open(path)

    def _fields(self, buffer: mmap.mmap) -> Fields:
        flat = torch.frombuffer(buffer, dtype=torch.float32, count=len(FIELDS) * self.layout.stride)
        return tuple(flat.view(len(FIELDS), -1).unbind())

    def _zeros(self, bucket: int, buffer: mmap.mmap) -> mmap.mmap:
        for field in self._fields(buffer):
            field.zero_()
        return buffer

    def _read(self, bucket: int, buffer: mmap.mmap) -> mmap.mmap:
        which = self.manifest.generation % 2
        _read_block(self._fds[which], self.folder / f"state.{which}", self.layout, self.manifest, bucket, buffer)
        return buffer

    def _write(self, bucket: int, buffer: mmap.mmap) -> str:
        which, size = (self.manifest.generation + 1) % 2, self.layout.block_bytes
        view, done = memoryview(buffer)[:size], 0
        digest = xxhash.xxh3_128_hexdigest(view)
        with _Explained(self.folder / f"state.{which}"):
            while done < size:
                done += os.pwritev(self._fds[which], [view[done:]], bucket * size + done)
        return digest


class Snapshot:
    """One generation of a store. It takes the space of a file until it is copied."""

    def __init__(self, path: Path, layout: BucketLayout, manifest: Manifest):
        self._path, self._layout, self._manifest = path, layout, manifest

    def copy(self, to: Path) -> None:
        """Write it to a new file, a block at a time, and give its space back. Raises EnvironmentFault: a block is damaged, or `to` takes no more."""
        source, buffer, size = _open(self._path), mmap.mmap(-1, max(self._layout.block_bytes, PAGE)), self._layout.block_bytes
        try:
            with to.open("wb", buffering=0) as f, _Explained(to):
                for bucket in range(self._layout.buckets):
                    _read_block(source, self._path, self._layout, self._manifest, bucket, buffer)
                    view = memoryview(buffer)[:size]
                    while view:
                        view = view[f.write(view):]
        finally:
            os.close(source)
            self._path.unlink(missing_ok=True)


def _reserve(path: Path, size: int) -> None:
    """A new file of `size` bytes in place of what has this name."""
    path.unlink(missing_ok=True)
    with path.open("wb") as f, _Explained(path):
        if size:
            os.posix_fallocate(f.fileno(), 0, size)


def _read_block(fd: int, path: Path, layout: BucketLayout, manifest: Manifest, bucket: int, buffer: mmap.mmap) -> None:
    size, done = layout.block_bytes, 0
    view = memoryview(buffer)[:size]
    with _Explained(path):
        while done < size:
            n = os.preadv(fd, [view[done:]], bucket * size + done)
            if n == 0:
                raise EnvironmentFault(f"{path} ends within bucket {bucket}", f"{layout.file_bytes} bytes", AGAIN)
            done += n
    if (found := xxhash.xxh3_128_hexdigest(view)) != manifest.digests[bucket]:
        raise EnvironmentFault(f"bucket {bucket} of {path} (generation {manifest.generation}) has digest {found}", f"{manifest.digests[bucket]}, as it was written",
                               AGAIN)


class _Explained:
    """Turns an OSError of `path` into an EnvironmentFault."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, OSError):
            raise EnvironmentFault(f"streamed optimizer state {self.path}: {error.strerror}", "a local disk that works and has space",
                                   "free space or set trainer.optimizer.state_dir to another disk, then start the run again: "
                                   "it goes on from the last checkpoint") from error


def _open(path: Path) -> int:
    """Past the page cache where the file system can do that: the state is read once a step, and is larger than memory."""
    with _Explained(path):
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            return os.open(path, os.O_RDWR)
        try:
            os.preadv(fd, [mmap.mmap(-1, PAGE)], 0)
        except OSError:
            os.close(fd)
            return os.open(path, os.O_RDWR)
        return fd
