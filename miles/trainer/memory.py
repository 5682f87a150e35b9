"""`DeviceMemory`: what model and optimizer hold on a GPU, given back and taken again, bit for bit.

Works on storages, not on tensors: megatron-core's parameters, gradients and optimizer shards are views into a few flat buffers, and every view stays
valid while its storage has no memory and after it has it again. Contents wait in page-locked host memory, which is kept between turns, or in a file
(miles.optim.paused).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from miles.optim import PausedFile
from miles.trainer.model import PolicyModel


class _Block(NamedTuple):
    """One storage, and its size while it has memory."""

    storage: torch.UntypedStorage
    size: int  # bytes

    def view(self) -> torch.Tensor:
        """uint8 [size]."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class DeviceMemory:
    """Everything in `kept` and `scratch` (contents not needed again) that lies on `device`, a device type. Tensors elsewhere stay as they are. `file`: where
    contents wait, instead of in host memory. Raises EnvironmentFault: its disk has no space for them."""

    def __init__(self, kept: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = (), *, device: str = "cuda", file: Path | None = None):
        seen: set[int] = set()
        self._kept, self._scratch = _blocks(kept, device, seen), _blocks(scratch, device, seen)
        self._on_gpu = device == "cuda" and bool(seen)
        sizes = [block.size for block in self._kept]
        self._waiting = PausedFile(file, sizes, pinned=self._on_gpu) if file is not None else _HostCopies(sizes, pinned=self._on_gpu)

    @classmethod
    def of(cls, *trained: tuple[PolicyModel, Any], **options) -> DeviceMemory:
        """Of a trainer rank's models, each with its optimizer: parameters, buffers, optimizer state; the gradient buffers are scratch, they are zeroed
        before each step."""
        kept, scratch = [], []
        for model, optimizer in trained:
            buffers = [b for chunk in model.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            kept += [b.param_data for b in buffers if b.param_data is not None]
            scratch += [b.grad_data for b in buffers]
            for chunk in model.chunks:
                kept += [*chunk.module.parameters(), *chunk.module.buffers()]
            for part in optimizer.chained_optimizers:
                kept += [p for group in part.optimizer.param_groups for p in group["params"]]
                kept += [t for state in part.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return cls(kept, scratch, **options)

    @property
    def bytes(self) -> int:
        return sum(block.size for block in (*self._kept, *self._scratch))

    def release(self) -> None:
        """Put by what is needed again and free everything, also what the allocator has cached. Raises EnvironmentFault: the disk takes no more."""
        self._waiting.put([block.view() for block in self._kept])
        for block in (*self._kept, *self._scratch):
            block.storage.resize_(0)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Memory and contents again. Raises torch.OutOfMemoryError where another process holds the GPU, EnvironmentFault where the disk has not kept them."""
        for block in (*self._kept, *self._scratch):
            block.storage.resize_(block.size)
        self._waiting.get([block.view() for block in self._kept])


class _HostCopies:
    """Of tensors of these `sizes` (bytes), with the methods of a PausedFile."""

    def __init__(self, sizes: Sequence[int], *, pinned: bool):
        self._copies, self._pinned = [torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in sizes], pinned

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copy(tensors, self._copies)

    def get(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copy(self._copies, tensors)

    def _copy(self, source: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> None:
        for there, here in zip(to, source, strict=True):
            there.copy_(here, non_blocking=True)
        if self._pinned:
            torch.cuda.synchronize()


def _blocks(tensors: Iterable[torch.Tensor], device: str, seen: set[int]) -> list[_Block]:
    """Their storages on `device` that are not empty and not `seen` yet."""
    out = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            out.append(_Block(storage, storage.nbytes()))
    return out
