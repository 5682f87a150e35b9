"""Bytes of tensors that wait in a file while the tensors have no memory.

    put:  copy a chunk from the device  |  digest and write those before it
    get:  read and digest those after it  |  copy a chunk to the device        staging buffers in a ring

In the file the tensors lie one behind the other, cut into chunks of one size, so that small ones share a transfer. Its space is reserved at the start. Nothing
is synced: the bytes are of no use to a successor, and what a disk lost or changed is found by the digest of its chunk before any of it reaches a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from miles.core import EnvironmentFault
from miles.optim.direct import AGAIN, buffer_of, open_file, read_digested, reserve, write_digested
from miles.optim.layout import PAGE, pieces_of

BUFFERS = 8  # 128 MiB
CHUNK = 16 << 20  # bytes, whole pages
THREADS = 2  # one digests while the other moves bytes


class PausedFile:
    """Room in the file `path` for tensors of these `sizes` (bytes); one process uses it. `pinned`: they are on a GPU.

    Raises EnvironmentFault: the disk has no space for it.
    """

    def __init__(self, path: Path, sizes: Sequence[int], *, pinned: bool, chunk: int = CHUNK):
        self.path, self._pinned, self._chunk = path, pinned, chunk
        self._pieces = pieces_of(sizes, chunk)
        self._bytes = -(-sum(sizes) // PAGE) * PAGE  # of the file
        path.parent.mkdir(parents=True, exist_ok=True)
        reserve(path, self._bytes, f"{self._bytes / 1e9:.3g} GB for what waits here while engines generate, and that of every other trainer rank of the node",
                "free space, use fewer trainer ranks a node or more nodes, set trainer.optimizer.state_dir to a larger disk, or trainer.paused_state = 'host'")
        self._fd = open_file(path)
        self._buffers = [buffer_of(min(chunk, self._bytes)) for _ in range(min(BUFFERS, len(self._pieces)))]
        self._staging = [torch.frombuffer(b, dtype=torch.uint8) for b in self._buffers]
        if pinned:
            for staging in self._staging:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(staging.data_ptr(), staging.nbytes, 0))
        self._digests: list[str] = []

    @property
    def buffer_bytes(self) -> int:
        """Host memory that it holds."""
        return sum(len(b) for b in self._buffers)

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Their bytes, uint8 [size] each, to the file; all are there when it returns. Raises EnvironmentFault: the disk takes no more."""
        writes: list[Future[str]] = []
        with ThreadPoolExecutor(THREADS, "pause-write") as writer:
            for i, pieces in enumerate(self._pieces):
                if i >= BUFFERS:
                    writes[i - BUFFERS].result()  # used the same buffer
                staging = self._staging[i % BUFFERS]
                for x in pieces:
                    staging[x.at:x.at + x.count].copy_(tensors[x.tensor][x.start:x.start + x.count], non_blocking=True)
                self._synchronize()
                writes.append(writer.submit(write_digested, self._fd, self.path, self._view(i), i * self._chunk))
            self._digests = [w.result() for w in writes]

    def get(self, tensors: Sequence[torch.Tensor]) -> None:
        """The bytes of the last `put` to tensors of the same sizes. Raises EnvironmentFault: the disk does not give back what was written; some of `tensors`
        are filled by then, with what was."""
        with ThreadPoolExecutor(THREADS, "pause-read") as reader:
            reads = [reader.submit(self._read, i) for i in range(len(self._buffers))]
            for i, pieces in enumerate(self._pieces):
                reads[i].result()
                staging = self._staging[i % BUFFERS]
                for x in pieces:
                    tensors[x.tensor][x.start:x.start + x.count].copy_(staging[x.at:x.at + x.count], non_blocking=True)
                self._synchronize()
                if i + BUFFERS < len(self._pieces):
                    reads.append(reader.submit(self._read, i + BUFFERS))

    def _read(self, i: int) -> None:
        view = self._view(i)
        found = read_digested(self._fd, self.path, view, i * self._chunk)
        if found != self._digests[i]:
            where = f"bytes {i * self._chunk} to {i * self._chunk + len(view)} of {self.path}"
            raise EnvironmentFault(f"{where} have digest {found}", f"{self._digests[i]}, as they were written", AGAIN)

    def _view(self, i: int) -> memoryview:
        """Chunk i in its buffer: whole pages, the last one with what was there before behind its end."""
        return memoryview(self._buffers[i % BUFFERS])[:min(self._chunk, self._bytes - i * self._chunk)]

    def _synchronize(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()
