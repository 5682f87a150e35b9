"""Adam whose main parameters and moments are in a BucketStore."""

from __future__ import annotations

from pathlib import Path

import torch

from miles.optim.folder import check_folder
from miles.optim.layout import BucketLayout, Piece, cut
from miles.optim.store import BucketStore, Fields
from miles.platform.cpu_adam import adam_

BUCKET = 1 << 23  # elements: 96 MiB of state, three of which are in memory
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
        self._index = {p: i for i, (p, _) in enumerate(self._tensors)}
        layout = BucketLayout(tuple(p.numel() for p, _ in self._tensors), bucket)
        self._pieces: list[list[Piece]] = list(layout.pieces())
        self._cached = -1  # bucket whose fields `read` has in memory
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder, 2 * layout.file_bytes)
        self.store = BucketStore.create(folder, layout, lambda i, fields: self._fill(i, fields, {p: {"param": p.detach()} for p, _ in self._tensors}))

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        self._cached = -1
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

    def read(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of a parameter's main value and moments: param, exp_avg, exp_avg_sq, float32 [n] on the CPU. Raises EnvironmentFault: damaged."""
        out = {name: torch.empty(param.numel()) for name in ("param", "exp_avg", "exp_avg_sq")}
        for bucket, pieces in enumerate(self._pieces):
            for x in pieces:
                if x.tensor == self._index[param]:
                    if self._cached != bucket:
                        self._fields, self._cached = self.store.read(bucket), bucket
                    for values, field in zip(out.values(), self._fields, strict=True):
                        values[x.start:x.start + x.count] = field[x.at:x.at + x.count]
        return out

    @torch.no_grad()
    def replace(self, states: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        """Make these states (of every parameter, named as `read` names them) the present ones."""
        self._cached = -1
        self.store.step(lambda i, fields: self._fill(i, fields, states), fresh=True)

    def _fill(self, bucket: int, fields: Fields, states: dict) -> None:
        for x in self._pieces[bucket]:
            state = states[self._tensors[x.tensor][0]]
            for name, field in zip(("param", "exp_avg", "exp_avg_sq"), fields, strict=True):
                if name in state:
                    field[x.at:x.at + x.count] = state[name].view(-1)[x.start:x.start + x.count]

    def load_state_dict(self, state_dict: dict) -> None:
        """Hyperparameters and step counters; the tensors come by `replace`."""
        super().load_state_dict({**state_dict, "state": {}})
        self._tensors = [(p, group) for group in self.param_groups for p in group["params"]]
