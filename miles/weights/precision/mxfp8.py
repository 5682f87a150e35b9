"""mxfp8: e4m3 elements, one power of two per 32 elements of a row (OCP Microscaling Formats v1.0, sections 5.2, 5.4.1 and 6.3).

    X = 2^(floor(log2 amax) - 8);  q = e4m3(w / X), to nearest even, saturated at 448;  w' = q * X

8 is the exponent of e4m3's largest power of two. X is stored as its exponent plus 127 (UE8M0). A block of zeros has the smallest X.
"""

from __future__ import annotations

import torch

from miles.weights.precision.checks import matrix

BLOCK = 32
_BIAS, _ELEMENT_EXPONENT, _E4M3_MAX = 127, 8, 448.0


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [r, c] float -> `weight` e4m3 [r, c], `weight_scale_inv` uint8 [r, c/32]. Raises StructureError: c not a multiple of 32 (see `matrix`)."""
    w = matrix(weight, BLOCK)
    blocks = w.view(w.shape[0], -1, BLOCK)
    amax = blocks.abs().amax(dim=2)
    exponent = torch.frexp(amax).exponent - 1 - _ELEMENT_EXPONENT  # frexp's mantissa is in [0.5, 1)
    exponent = torch.where(amax > 0, exponent, -_BIAS).clamp(-_BIAS, _BIAS)
    q = (blocks * _power(-exponent).unsqueeze(2)).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return {"weight": q.view(w.shape), "weight_scale_inv": (exponent + _BIAS).to(torch.uint8)}


def dequantize(parts: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as a reader sees it: [r, c] in `dtype`."""
    scale = _power(parts["weight_scale_inv"].int() - _BIAS)
    return (parts["weight"].float() * scale.repeat_interleave(BLOCK, 1)).to(dtype)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, also where that is subnormal (-127)."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()
