"""What every quantizer asks of its input, and the rounding of scales."""

from __future__ import annotations

import torch

from miles.core import StructureError


def matrix(weight: torch.Tensor, width: int = 1) -> torch.Tensor:
    """`weight` as fp32 [rows, columns]. Raises StructureError: no matrix, columns that `width` does not divide, infinities or NaN."""
    if weight.ndim != 2 or not weight.dtype.is_floating_point or not weight.numel():
        raise StructureError(f"quantizer: a tensor of shape {tuple(weight.shape)} and dtype {weight.dtype}", "a matrix of floats that is not empty",
                             "list it in model.high_precision", cause="precision:shape")
    if weight.shape[1] % width:
        raise StructureError(f"quantizer: rows of {weight.shape[1]} elements", f"a multiple of the block of {width}", "list it in model.high_precision",
                             cause="precision:shape")
    w = weight.detach().float()
    if not torch.isfinite(w).all():
        raise StructureError(f"quantizer: {int((~torch.isfinite(w)).sum())} elements are infinite or NaN", "finite weights",
                             "the optimizer diverged: go back to a checkpoint", cause="precision:finite")
    return w


def round_up(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """The smallest float of `bits` significant bits that is not below `scale` (fp32, positive, normal)."""
    spare = (1 << (24 - bits)) - 1
    return ((scale.view(torch.int32) + spare) & ~spare).view(torch.float32)
