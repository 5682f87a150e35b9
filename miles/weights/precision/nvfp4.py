"""nvfp4: e2m1 elements, one e4m3 scale per 16 elements of a row, and one fp32 scale for the tensor (NVIDIA, "Introducing NVFP4").

    h = amax(tensor) / (448 * 6), rounded up to 16 significant bits;  s = e4m3(amax(block) / 6 / h);  q = e2m1(w / (s * h)), to nearest even;  w' = q * s * h

Named and laid out as ModelOpt stores it and SGLang's `modelopt_fp4` loads it: two elements a byte, the first in the low half. Every product is exact in
fp32 (2 + 4 + 16 bits). Where s rounds to zero, so do its elements.
"""

from __future__ import annotations

import torch

from miles.weights.precision.checks import matrix, round_up

BLOCK = 16
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_TIES_UP = torch.tensor([False, True, False, True, False, True, False])  # to the neighbour with an even mantissa
_SMALLEST, _LARGEST = 2.0**-100, float.fromhex("0x1.861p116")


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [r, c] float -> `weight` uint8 [r, c/2], `weight_scale` e4m3 [r, c/16], `weight_scale_2` fp32 []. Raises StructureError: c not a multiple of 16
    (see `matrix`)."""
    w = matrix(weight, BLOCK)
    blocks = w.view(w.shape[0], -1, BLOCK)
    amax = blocks.abs().amax(dim=2)
    h = round_up((amax.amax() / (_E4M3_MAX * _E2M1_MAX)).clamp(_SMALLEST, _LARGEST), 16).clamp(max=_LARGEST)
    scale = (amax / _E2M1_MAX / h).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    both = (scale.float() * h).unsqueeze(2)
    x = torch.where(both > 0, blocks / both, torch.zeros(()).copysign(blocks)).view(w.shape)
    code = _e2m1(x)
    return {"weight": code[:, 0::2] | code[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": h}


def dequantize(parts: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as a reader sees it: [r, c] in `dtype`."""
    packed = parts["weight"]
    code = torch.stack([packed & 15, packed >> 4], dim=2).view(packed.shape[0], -1).long()
    q = _VALUES[code & 7] * (1 - 2 * (code >> 3))
    q = q.where(q != 0, torch.zeros(()).copysign((code >> 3).float() * -2 + 1))
    scale = parts["weight_scale"].float() * parts["weight_scale_2"]
    return (q * scale.repeat_interleave(BLOCK, 1)).to(dtype)


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0..15) of the nearest e2m1 values; beyond 6 saturates."""
    size = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8)
    for middle, up in zip(_MIDDLES.tolist(), _TIES_UP.tolist(), strict=True):
        code += (size >= middle) if up else (size > middle)
    return code | torch.signbit(x).to(torch.uint8) << 3
