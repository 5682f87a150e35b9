"""int4: symmetric integers, one bf16 scale per 32 elements of a row, in the layout "pack-quantized" of compressed-tensors.

    s = amax / 7, rounded up to bf16;  q = round(w / s), to nearest even, in -7..7;  w' = q * s

Eight elements an int32, the first in the lowest bits, each stored as q + 8. -8 is not used, so a weight and its negative have the same size. Every product
is exact in fp32.
"""

from __future__ import annotations

import torch

from miles.weights.precision.checks import matrix, round_up

BLOCK = 32
_MAX = 7
_SMALLEST, _LARGEST = 2.0**-100, 2.0**125  # 7 x the largest is finite


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [r, c] float -> `weight_packed` int32 [r, c/8], `weight_scale` bf16 [r, c/32], `weight_shape` int64 [2]. Raises StructureError: c not a multiple
    of 32 (see `matrix`)."""
    w = matrix(weight, BLOCK)
    r, c = w.shape
    blocks = w.view(r, -1, BLOCK)
    scale = round_up((blocks.abs().amax(dim=2) / _MAX).clamp(_SMALLEST, _LARGEST), 8)
    q = (blocks / scale.unsqueeze(2)).round().clamp(-_MAX, _MAX).to(torch.int64) + 8
    word = (q.view(r, c // 8, 8) << torch.arange(0, 32, 4)).sum(dim=2)
    word = torch.where(word >= 2**31, word - 2**32, word)
    return {"weight_packed": word.to(torch.int32), "weight_scale": scale.to(torch.bfloat16), "weight_shape": torch.tensor([r, c])}


def dequantize(parts: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as a reader sees it: [r, c] in `dtype`."""
    q = (parts["weight_packed"].unsqueeze(2) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15) - 8
    scale = parts["weight_scale"].float().repeat_interleave(BLOCK, 1)
    return (q.reshape(scale.shape).float() * scale).to(dtype)
