"""`DeviceMemory`: what model and optimizer hold on a GPU, given back and taken again, bit for bit.

Works on storages, not on tensors: megatron-core's parameters, gradients and optimizer shards are views into a few flat buffers, and every view stays
valid while its storage has no memory and after it has it again. Contents wait in page-locked host memory, which is kept between turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from miles.trainer.model import PolicyModel


@dataclass
class _Block:
    """One storage. `copy` holds its bytes while it is released; None when they need not be kept."""

    storage: torch.UntypedStorage
    size: int  # bytes
    copy: torch.Tensor | None


class DeviceMemory:
    """Everything in `kept` and `scratch` (contents not needed again) that lies on `device`, a device type. Tensors elsewhere stay as they are."""

    def __init__(self, kept: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = (), *, device: str = "cuda"):
        self._device, self._blocks = device, {}
        for tensors, keep in ((kept, True), (scratch, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if tensor.device.type == device and storage.nbytes() and storage.data_ptr() not in self._blocks:
                    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device == "cuda") if keep else None
                    self._blocks[storage.data_ptr()] = _Block(storage, storage.nbytes(), copy)

    @classmethod
    def of(cls, *trained: tuple[PolicyModel, Any], device: str = "cuda") -> DeviceMemory:
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
        return cls(kept, scratch, device=device)

    @property
    def bytes(self) -> int:
        return sum(block.size for block in self._blocks.values())

    def release(self) -> None:
        """Copy to the host what is needed again and free everything, also what the allocator has cached."""
        for block in self._blocks.values():
            if block.copy is not None:
                block.copy.copy_(self._view(block), non_blocking=True)
        self._synchronize()
        for block in self._blocks.values():
            block.storage.resize_(0)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Memory and contents again. Raises torch.OutOfMemoryError where another process holds the GPU."""
        for block in self._blocks.values():
            block.storage.resize_(block.size)
            if block.copy is not None:
                self._view(block).copy_(block.copy, non_blocking=True)
        self._synchronize()

    @property
    def _on_gpu(self) -> bool:
        return self._device == "cuda" and bool(self._blocks)

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _view(self, block: _Block) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=block.storage.device).set_(block.storage)
