"""Streamed state in a checkpoint: the files of all ranks as they lay on their disks, and how a rank of any layout finds its elements in them.

    optimizer_00003.1.state      the blocks of rank 3's second store (miles.optim.layout)
    optimizer_00003.1.json       whose elements they are (`SavedFile`)

The name is `optimizer`, or that of a second model that is trained.

So writing one is copying a file, with one block in memory, and a rank that reads has one parameter in memory. Moments in bf16 are read as the float32
that they stand for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from miles.core import EnvironmentFault
from miles.optim.layout import FIELDS, BucketLayout, Moments
from miles.optim.store import DTYPES


class SavedTensor(msgspec.Struct, frozen=True):
    """Elements [start, start + count) of one shard, flat, of a parameter."""

    names: tuple[str, ...]  # Hugging Face tensors that the parameter is made of
    shard: int
    of: int  # shards
    shape: tuple[int, ...]  # of the shard
    start: int
    count: int


class SavedFile(msgspec.Struct, frozen=True):
    """What lies in the file beside it."""

    bucket: int  # elements
    moments: Moments
    tensors: list[SavedTensor]

    @property
    def layout(self) -> BucketLayout:
        return BucketLayout(tuple(t.count for t in self.tensors), self.bucket, self.moments)


class _Where(NamedTuple):
    file: int
    flat: int  # element of the file's shard that is the first of `tensor`
    tensor: SavedTensor


def file_names(name: str, rank: int, part: int) -> tuple[str, str]:
    """(state, description) of one store of a rank."""
    stem = f"{name}_{rank:05d}.{part}"
    return f"{stem}.state", f"{stem}.json"


def is_saved(folder: Path) -> bool:
    """Whether a checkpoint holds streamed state."""
    return next(folder.glob(_described("optimizer")), None) is not None


def _described(name: str) -> str:
    return f"{name}_*.json"


class SavedState:
    """The streamed state of one name in a checkpoint. Its files are those of its COMMIT: their digests have been compared."""

    def __init__(self, folder: Path, name: str):
        """Raises EnvironmentFault: a file is missing or is no such file."""
        self._folder, self._fds, self._layouts = folder, [], []
        self._shards: dict[tuple[tuple[str, ...], int], list[_Where]] = {}
        self._of: dict[tuple[str, ...], tuple[int, tuple[int, ...]]] = {}
        for path in sorted(folder.glob(_described(name))):
            try:
                described = msgspec.json.decode(path.read_bytes(), type=SavedFile)
                self._fds.append(os.open(path.with_suffix(".state"), os.O_RDONLY))
            except (OSError, msgspec.MsgspecError) as e:
                raise EnvironmentFault(f"{path} and its .state cannot be read: {e}", "the streamed optimizer state of a checkpoint",
                                       "resume from another checkpoint") from e
            self._layouts.append(described.layout)
            flat = 0
            for t in described.tensors:
                known = self._shards.setdefault((t.names, t.shard), [])
                if not any((w.tensor.start, w.tensor.count) == (t.start, t.count) for w in known):  # replicas: one is enough
                    known.append(_Where(len(self._fds) - 1, flat, t))
                self._of[t.names] = (t.of, t.shape)
                flat += t.count

    def shards(self, names: tuple[str, ...]) -> tuple[int, tuple[int, ...]]:
        """(shards in which a parameter was saved, shape of each). Raises EnvironmentFault: it was not."""
        if names not in self._of:
            raise EnvironmentFault(f"the optimizer state in {self._folder} has nothing for {names}", "a checkpoint of the same model", "resume from another checkpoint")
        return self._of[names]

    def read(self, names: tuple[str, ...], shard: int, start: int, count: int) -> list[torch.Tensor]:
        """Main value and moments (float32 [count] each) of elements [start, start + count) of a shard. Raises EnvironmentFault: not all are there."""
        out, missing = [torch.empty(count) for _ in FIELDS], count
        for file, flat, t in self._shards.get((names, shard), ()):
            begin, end = max(start, t.start), min(start + count, t.start + t.count)
            if begin < end:
                self._copy(file, flat + begin - t.start, [o[begin - start:end - start] for o in out])
                missing -= end - begin
        if missing:
            raise EnvironmentFault(f"{missing} of {count} elements of shard {shard} of {names} are not in {self._folder}", "files of all ranks that wrote it",
                                   "resume from another checkpoint")
        return out

    def _copy(self, file: int, flat: int, out: list[torch.Tensor]) -> None:
        """Elements from `flat` on of a file's shard, into float32 tensors of equal length."""
        layout, done, count = self._layouts[file], 0, len(out[0])
        while done < count:
            bucket, at = divmod(flat + done, layout.bucket)
            n = min(count - done, layout.bucket - at)
            for i, (field, width) in enumerate(zip(out, layout.widths, strict=True)):
                offset, stored = bucket * layout.block_bytes + layout.offset(i, at), torch.empty(n, dtype=DTYPES[width])
                view = memoryview(stored.view(torch.uint8).numpy())
                while view:
                    got = os.preadv(self._fds[file], [view], offset)
                    if not got:
                        raise EnvironmentFault(f"optimizer state {self._folder}: a file ends before byte {offset}", f"{layout.file_bytes} bytes",
                                               "resume from another checkpoint")
                    view, offset = view[got:], offset + got
                field[done:done + n] = stored
            done += n

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *_) -> None:
        for fd in self._fds:
            os.close(fd)
