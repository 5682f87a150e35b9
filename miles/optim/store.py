"""Two files that take turns: generation n lies in state.<n % 2>; the next is written to the other, and the manifest then names it.

    read bucket i + 1  |  compute bucket i  |  write bucket i - 1        three buffers, reused

A bucket is read as soon as its buffer has been written, whatever is computed then: no stage waits for another to begin its next bucket with it.

The file that the manifest names is never written to, so that a kill at any point leaves a whole generation. Manifest last: data synced, then renamed
into place. Digests of all buckets are in it and are checked at every read.

A snapshot is a hard link to the file of a generation: while it is there, a step that has to write that file leaves it to the snapshot and takes the spare one;
the snapshot's becomes the spare when it is copied. All three files are reserved at the start, so that no step ever needs space that others may have taken.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from miles.core import EnvironmentFault
from miles.optim.direct import AGAIN, buffer_of, explained, open_file, read_digested, reserve, write_digested
from miles.optim.layout import BucketLayout, Moments
from miles.rundir import publish_bytes

BUFFERS = 3
THREADS = 2  # each way: one digests while the other moves bytes

Buffer = memoryview  # of whole pages, as large as a block (one page where a block is empty)
Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # main, exp_avg, exp_avg_sq: [stride] each, on the CPU; main float32, moments as the layout says
DTYPES = {4: torch.float32, 2: torch.bfloat16}  # by width


class Manifest(msgspec.Struct, frozen=True):
    """Which generation is whole, and what it is."""

    generation: int
    elements: int
    bucket: int
    moments: Moments
    digests: list[str]  # xxh3-128 of each block


class BucketStore:
    """The state of one shard in `folder`, which one process uses.

    >>> store = BucketStore.create(folder, layout, fill)
    >>> store.step(compute)              # compute(i, (main, exp_avg, exp_avg_sq)) changes the fields of bucket i in place
    """

    def __init__(self, folder: Path, layout: BucketLayout, manifest: Manifest):
        self.folder, self.layout, self.manifest = folder, layout, manifest
        self._spare = threading.Lock()  # a snapshot is given back by the thread that copies it
        self._buffers = [memoryview(buffer_of(layout.block_bytes)) for _ in range(BUFFERS)]
        self._fds = [open_file(folder / f"state.{i}") for i in range(2)]

    @classmethod
    def create(cls, folder: Path, layout: BucketLayout, fill: Callable[[int, Fields], None]) -> BucketStore:
        """Generation 0: `fill(i, fields)` sets bucket i, zeros before. Replaces what is in `folder`. Raises EnvironmentFault: the disk has no space for three
        files."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").unlink(missing_ok=True)
        for name in ("state.0", "state.1", "spare"):
            reserve(folder / name, layout.file_bytes,
                    f"three files of {layout.file_bytes / 1e9:.3g} GB here, and those of every other trainer rank of the node and of the critic",
                    "free space, use fewer trainer ranks a node or more nodes, set trainer.optimizer.state_dir to a larger disk, or moments = 'bf16'")
        store = cls(folder, layout, Manifest(-1, layout.elements, layout.bucket, layout.moments, []))
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
        found, expected = (f"{x.elements} elements in buckets of {x.bucket}, moments in {x.moments}" for x in (manifest, layout))
        if found != expected:
            raise EnvironmentFault(f"{path} is of {found}", expected, AGAIN)
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

        def read(i: int) -> Buffer:
            if i >= BUFFERS:
                writes[i - BUFFERS].result()  # used the same buffer
            return load(i, self._buffers[i % BUFFERS])

        with ThreadPoolExecutor(THREADS, "optim-read") as reader, ThreadPoolExecutor(THREADS, "optim-write") as writer:
            reads = [reader.submit(read, i) for i in range(min(BUFFERS, count))]
            for i in range(count):
                buffer = reads[i].result()
                compute(i, self._fields(buffer))
                writes.append(writer.submit(self._write, i, buffer))
                if i + BUFFERS < count:
                    reads.append(reader.submit(read, i + BUFFERS))
            digests = [w.result() for w in writes]
        generation = self.manifest.generation + 1
        with explained(self.folder / f"state.{generation % 2}"):
            os.fdatasync(self._fds[generation % 2])
        manifest = Manifest(generation, self.layout.elements, self.layout.bucket, self.layout.moments, digests)
        publish_bytes(self.folder / "manifest.json", msgspec.json.encode(manifest))
        self.manifest = manifest

    def snapshot(self) -> Snapshot:
        """The present generation, as it stays whatever steps follow. One at a time. Raises EnvironmentFault: the file system has no hard links."""
        path, state = self.folder / "snapshot", self.folder / f"state.{self.manifest.generation % 2}"
        self._give_back(path)
        with explained(path):
            os.link(state, path)
        return Snapshot(path, self.layout, self.manifest, self._give_back)

    def _leave_to_snapshot(self, which: int) -> None:
        """A file that is about to be written and that a snapshot holds is left to it."""
        path = self.folder / f"state.{which}"
        with self._spare, explained(path):
            if os.fstat(self._fds[which]).st_nlink > 1:
                os.replace(self.folder / "spare", path)
                os.close(self._fds[which])
                self._fds[which] = open_file(path)

    def _give_back(self, snapshot: Path) -> None:
        """A snapshot is not needed any more, if there is one: a file that was left to it is the spare one."""
        with self._spare, explained(snapshot), contextlib.suppress(FileNotFoundError):
            if snapshot.stat().st_nlink > 1:
                snapshot.unlink()
            else:
                os.replace(snapshot, self.folder / "spare")

    def _fields(self, buffer: Buffer) -> Fields:
        layout = self.layout
        return tuple(torch.frombuffer(buffer, dtype=DTYPES[width], count=layout.stride, offset=layout.offset(i)) for i, width in enumerate(layout.widths))

    def _zeros(self, bucket: int, buffer: Buffer) -> Buffer:
        for field in self._fields(buffer):
            field.zero_()
        return buffer

    def _read(self, bucket: int, buffer: Buffer) -> Buffer:
        which = self.manifest.generation % 2
        _read_block(self._fds[which], self.folder / f"state.{which}", self.layout, self.manifest, bucket, buffer)
        return buffer

    def _write(self, bucket: int, buffer: Buffer) -> str:
        which, size = (self.manifest.generation + 1) % 2, self.layout.block_bytes
        return write_digested(self._fds[which], self.folder / f"state.{which}", buffer, bucket * size)


class Snapshot:
    """One generation of a store. It takes the spare file until it is copied."""

    def __init__(self, path: Path, layout: BucketLayout, manifest: Manifest, give_back: Callable[[Path], None]):
        self._path, self._layout, self._manifest, self._give_back = path, layout, manifest, give_back

    def copy(self, to: Path) -> None:
        """Write it to a new file, a block at a time, and give its space back. Raises EnvironmentFault: a block is damaged, or `to` takes no more."""
        source, buffer = open_file(self._path), memoryview(buffer_of(self._layout.block_bytes))
        try:
            with to.open("wb", buffering=0) as f, explained(to):
                for bucket in range(self._layout.buckets):
                    _read_block(source, self._path, self._layout, self._manifest, bucket, buffer)
                    view = buffer
                    while view:
                        view = view[f.write(view):]
        finally:
            os.close(source)
            self._give_back(self._path)


def _read_block(fd: int, path: Path, layout: BucketLayout, manifest: Manifest, bucket: int, buffer: Buffer) -> None:
    found = read_digested(fd, path, buffer, bucket * layout.block_bytes)
    if found != manifest.digests[bucket]:
        raise EnvironmentFault(f"bucket {bucket} of {path} (generation {manifest.generation}) has digest {found}", f"{manifest.digests[bucket]}, as it was written",
                               AGAIN)
