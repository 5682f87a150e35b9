"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the mean is the value itself.

Neighbours among bfloat16 numbers, which have 8 significant bits, are 1/256 to 1/128 of their value apart. So exp_avg_sq, which a step changes by 1 - beta2
of it where gradients vanish, would be rounded back to where it was at beta2 = 0.999, and never move. Rounded at random it moves in one step of 4 to 8, by
4 to 8 times as much (Gupta et al. 2015, arXiv:1502.02551; in training with bfloat16: Zamirai et al. 2020, arXiv:2010.06192).

The random bits are a function of (parameter, step, element), a counter instead of a state: a run that goes on from a checkpoint rounds as the one that
was not interrupted, in whatever order or parts elements are rounded; and ranks that hold the same parameter round it alike, or it would become another on each.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def key_of(*numbers: int) -> tuple[int, int]:
    """Two words of 32 bits, signed, that are well mixed from all of `numbers` (SplitMix64: Steele, Lea and Flood 2014, doi:10.1145/2714064.2660195)."""
    x = 0
    for n in numbers:
        x = (x + n + 0x9E3779B97F4A7C15) & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
    return _signed(x), _signed(x >> 32)


def random_bits(key: tuple[int, int], start: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int32 [count]: 32 bits for each of elements [start, start + count): the last steps of MurmurHash3 over their numbers, keyed."""
    x = torch.arange(count, dtype=torch.int32, device=device).mul_(_signed(0x9E3779B1)).add_(_signed(start * 0x9E3779B1 + key[0]))
    for shift, then in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(_signed(then)).bitwise_xor_(key[1])
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def round_to_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """bfloat16 [n]: each of `values`, float32 [n], or of the two that are next to it; `bits`: int32 [n], the lower 16 of which decide. What a bfloat16 can
    hold stays as it is, infinities and nan among it."""
    rounded = (values.view(torch.int32) + bits.bitwise_and(0xFFFF)).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).bfloat16()  # the sum can carry a nan over into zero


def _signed(x: int) -> int:
    """The lower 32 bits as int32."""
    return (x & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
