"""Adam whose main parameters and moments are in a BucketStore."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from miles.optim.folder import check_folder
from miles.optim.layout import BucketLayout, Moments, Piece, cut
from miles.optim.rounding import key_of, random_bits, round_to_bf16
from miles.optim.store import BucketStore, Fields
from miles.platform.cpu_adam import adam_ as adam_on_cpu

BUCKET = 1 << 23  # elements: 96 MiB of state (64 with moments in bf16), three of which are in memory
Values = Callable[[torch.Tensor, int, int], Sequence[torch.Tensor]]
"""(parameter, start, n) -> main value and moments, or the main value alone, of its elements [start, start + n), flat."""
CHUNK = 1 << 16  # elements of which a CPU rounds moments at once: they stay in its cache


class StreamedAdam(torch.optim.Optimizer):
    """`params`: groups of fp32 parameters that carry shapes and gradients; `targets`: for each parameter the tensor that gets its value after a step, of
    any type. The parameters' own values are read once, here; their storage may be freed afterwards (where it is not that of the target).

    `moments` is their format in the store; they are computed in float32 and, as bf16, stored by stochastic rounding, whose bits `origins` picks: for each
    parameter what it is a part of, as a number, and where in that its first element lies (by itself: each is all of something). `network`: `folder` may be on a network file system. On the CPU a step with fp32 moments gives, bit for bit, what CpuFusedAdam gives.
    """

    def __init__(self, params: list[dict], targets: list[torch.Tensor], folder: Path, *, bucket: int = BUCKET, moments: Moments = "fp32",
                 origins: Sequence[tuple[int, int]] | None = None, network: bool = False):
        super().__init__([torch.zeros(1)], {})
        self.param_groups = params  # megatron's are views of model parameters, which torch's constructor refuses
        self._targets = targets
        self._tensors = [(p, group) for group in self.param_groups for p in group["params"]]
        self._origins = origins or [(i, 0) for i in range(len(self._tensors))]
        layout = BucketLayout(tuple(p.numel() for p, _ in self._tensors), bucket, moments)
        self._pieces: list[list[Piece]] = list(layout.pieces())
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder, 3 * layout.file_bytes, network=network)
        self.store = BucketStore.create(folder, layout, lambda i, fields: self._fill(i, fields, lambda p, start, n: [p.detach().view(-1)[start:start + n]]))

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step") or 0) + 1
        self.store.step(self._update)

    def _update(self, bucket: int, fields: Fields) -> None:
        device, narrow = self._targets[0].device, self.store.layout.moments == "bf16"
        on_device = tuple(f.to(device) for f in fields)  # on the CPU the fields themselves
        adam = adam_on_cpu if device.type == "cpu" else adam_on_device
        for piece in self._pieces[bucket]:
            p, group = self._tensors[piece.tensor]
            if p.grad is None:
                continue
            target, grad = self._targets[piece.tensor].view(-1), p.grad.view(-1)
            for x in cut(piece, CHUNK) if narrow and device.type == "cpu" else [piece]:
                main, mean, square = (f[x.at:x.at + x.count] for f in on_device)
                wide = mean.float(), square.float()  # of fp32 moments the tensors themselves
                adam(main, grad[x.start:x.start + x.count].float(), *wide, group)
                if narrow:
                    whole, first = self._origins[x.tensor]
                    bits = random_bits(key_of(whole, group["step"]), first + x.start, x.count, device)
                    mean.copy_(round_to_bf16(wide[0], bits))
                    square.copy_(round_to_bf16(wide[1], bits >> 16))
                target[x.start:x.start + x.count].copy_(main)
        for field, changed in zip(fields, on_device, strict=True):
            if changed is not field:
                field.copy_(changed)

    @torch.no_grad()
    def replace(self, values: Values) -> None:
        """Make other values the present state; they are asked for in the order of the parameters. bf16 moments are the nearest of these."""
        self.store.step(lambda i, fields: self._fill(i, fields, values), fresh=True)

    def _fill(self, bucket: int, fields: Fields, values: Values) -> None:
        for x in self._pieces[bucket]:
            for field, found in zip(fields, values(self._tensors[x.tensor][0], x.start, x.count), strict=False):  # at first there are no moments
                field[x.at:x.at + x.count] = found

    @property
    def parameters(self) -> list[torch.Tensor]:
        """In the order in which their elements lie in the store."""
        return [p for p, _ in self._tensors]


def adam_on_device(param: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, group: dict) -> None:
    """`adam_` of miles.platform.cpu_adam, AdamW alone, as torch operations: equal up to rounding."""
    beta1, beta2 = group["betas"]
    correction1, correction2 = (1 - beta1 ** group["step"], 1 - beta2 ** group["step"]) if group["bias_correction"] else (1.0, 1.0)
    param.mul_(1 - group["lr"] * group["weight_decay"])
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    param.addcdiv_(mean, square.sqrt().div_(math.sqrt(correction2)).add_(group["eps"]), value=-group["lr"] / correction1)
