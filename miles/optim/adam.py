"""Adam whose main parameters and moments are in a BucketStore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from miles.optim.folder import check_folder
from miles.optim.layout import BucketLayout, Piece, cut
from miles.optim.store import BucketStore, Fields
from miles.platform.cpu_adam import adam_

BUCKET = 1 << 23  # elements: 96 MiB of state, three of which are in memory
Values = Callable[[torch.Tensor, int, int], Sequence[torch.Tensor]]
"""(parameter, start, n) -> main value and moments, or the main value alone, of its elements [start, start + n), flat."""
CHUNK = 1 << 16  # elements a CPU works on at once: Adam passes over them eight times, and they stay in its cache


class StreamedAdam(torch.optim.Optimizer):
    """`params`: groups of fp32 parameters that carry shapes and gradients; `targets`: for each parameter the tensor that gets its value after a step, of
    any type. The parameters' own values are read once, here; their storage may be freed afterwards (where it is not that of the target).

    On the CPU a step gives, bit for bit, what CpuFusedAdam gives.
    """

    def __init__(self, params: list[dict], targets: list[torch.Tensor], folder: Path, *, bucket: int = BUCKET):
        super().__init__([torch.zeros(1)], {})
        self.param_groups = params  # megatron's are views of model parameters, which torch's constructor refuses
        self._targets = targets
        self._tensors = [(p, group) for group in self.param_groups for p in group["params"]]
        layout = BucketLayout(tuple(p.numel() for p, _ in self._tensors), bucket)
        self._pieces: list[list[Piece]] = list(layout.pieces())
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder, 3 * layout.file_bytes)  # the third while a snapshot is copied
        self.store = BucketStore.create(folder, layout, lambda i, fields: self._fill(i, fields, lambda p, start, n: [p.detach().view(-1)[start:start + n]]))

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step") or 0) + 1
        self.store.step(self._update)

    def _update(self, bucket: int, fields: Fields) -> None:
        by_group: dict[int, tuple[dict, list[Piece]]] = {}
        for piece in self._pieces[bucket]:
            p, group = self._tensors[piece.tensor]
            if p.grad is not None:
                by_group.setdefault(id(group), (group, []))[1].append(piece)
        device = self._targets[0].device
        on_device = tuple(f.to(device) for f in fields)  # on the CPU the fields themselves
        for group, pieces in by_group.values():
            for part in cut(pieces, CHUNK) if device.type == "cpu" else [pieces]:
                main, means, squares = ([f[x.at:x.at + x.count] for x in part] for f in on_device)
                grads = [self._tensors[x.tensor][0].grad.view(-1)[x.start:x.start + x.count].float() for x in part]
                adam_(main, grads, means, squares, group)
                for values, x in zip(main, part, strict=True):
                    self._targets[x.tensor].view(-1)[x.start:x.start + x.count].copy_(values)
        for field, changed in zip(fields, on_device, strict=True):
            if changed is not field:
                field.copy_(changed)

    @torch.no_grad()
    def replace(self, values: Values) -> None:
        """Make other values the present state; they are asked for in the order of the parameters."""
        self.store.step(lambda i, fields: self._fill(i, fields, values), fresh=True)

    def _fill(self, bucket: int, fields: Fields, values: Values) -> None:
        for x in self._pieces[bucket]:
            for field, found in zip(fields, values(self._tensors[x.tensor][0], x.start, x.count), strict=False):  # at first there are no moments
                field[x.at:x.at + x.count] = found

    @property
    def parameters(self) -> list[torch.Tensor]:
        """In the order in which their elements lie in the store."""
        return [p for p, _ in self._tensors]
