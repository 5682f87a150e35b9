"""The patch of one tensor: changed positions and their new values. Applying it twice, or to a tensor that has it, changes nothing.

Values are compared and stored as raw bit patterns, so -0.0, NaN payloads and every format of 1, 2, 4 or 8 bytes survive exactly.
"""

from __future__ import annotations

import torch
import xxhash

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION_BYTES = 4


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Flat integer view of a contiguous tensor's bytes, one element each."""
    return tensor.contiguous().view(-1).view(_BITS[tensor.element_size()])


def digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes, hex."""
    return xxhash.xxh3_128_hexdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def diff(new: torch.Tensor, old: torch.Tensor) -> tuple[str, torch.Tensor | None, torch.Tensor | None]:
    """What has to be sent to turn `old` into `new` (same shape and dtype).

    Returns (kind, positions, values): ("same", None, None); ("sparse", int32 [n], bits [n]); ("dense", None, new).
    """
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ValueError(f"a patch needs equal shape and dtype, got {tuple(new.shape)} {new.dtype} and {tuple(old.shape)} {old.dtype}")
    a, b = bits(new), bits(old)
    positions = torch.nonzero(a != b).view(-1)
    if len(positions) == 0:
        return "same", None, None
    if len(positions) * (_POSITION_BYTES + new.element_size()) >= a.numel() * new.element_size() or a.numel() >= 2**31:
        return "dense", None, new.contiguous()
    return "sparse", positions.to(torch.int32), a[positions]


def apply_sparse(tensor: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A new tensor with `values` (bit patterns) at `positions`. Raises IndexError for a position outside."""
    if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= tensor.numel()):
        raise IndexError(f"patch position outside a tensor of {tensor.numel()} elements")
    out = tensor.clone(memory_format=torch.contiguous_format)
    bits(out)[positions.long()] = values
    return out
