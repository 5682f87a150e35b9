"""fp8: e4m3 elements, one fp32 scale per block of 128x128 (DeepSeek-V3 technical report, section 3.3.2, for weights).

    s = amax(block) / 448, rounded up to 20 significant bits;  q = e4m3(w / s), to nearest even;  w' = q * s

`weight_scale_inv` is that s: what a reader multiplies by. The rounding makes every product exact in fp32 (4 + 20 bits), so quantizing what was
dequantized gives the same bytes; it costs at most 2e-6 of the scale. Blocks at the right and lower edge may be smaller.
"""

from __future__ import annotations

import torch

from miles.weights.precision.checks import matrix, round_up

BLOCK = 128
E4M3_MAX = 448.0
_SMALLEST = 2.0**-100  # below it products would be subnormal; such a block is as good as zero
_LARGEST = float.fromhex("0x1.24924p119")  # x 448 is still finite


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [r, c] float -> `weight` e4m3 [r, c], `weight_scale_inv` fp32 [ceil(r/128), ceil(c/128)]. Raises StructureError (see `matrix`)."""
    w = matrix(weight)
    r, c = w.shape
    grid = (-(-r // BLOCK), -(-c // BLOCK))
    padded = torch.nn.functional.pad(w.abs(), (0, grid[1] * BLOCK - c, 0, grid[0] * BLOCK - r))
    amax = padded.view(grid[0], BLOCK, grid[1], BLOCK).amax(dim=(1, 3))
    scale = round_up((amax / E4M3_MAX).clamp(_SMALLEST, _LARGEST), 20).clamp(max=_LARGEST)
    q = (w / _spread(scale, r, c)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale_inv": scale}


def dequantize(parts: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as a reader sees it: [r, c] in `dtype`."""
    q = parts["weight"]
    return (q.float() * _spread(parts["weight_scale_inv"], *q.shape)).to(dtype)


def _spread(scale: torch.Tensor, r: int, c: int) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK, 0)[:r].repeat_interleave(BLOCK, 1)[:, :c]
