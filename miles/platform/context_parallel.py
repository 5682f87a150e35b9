"""Which positions of a sequence a context-parallel rank holds. The split is Transformer Engine's, on CPU too. Pure."""

from __future__ import annotations

import torch


def zigzag_positions(n: int, cp: int, rank: int) -> torch.Tensor:
    """Positions, int64 [n/cp], of rank `rank` in a sequence of n tokens; n is a multiple of 2*cp.

    The sequence is cut into 2*cp chunks and rank r holds chunks r and 2*cp-1-r, so that causal attention costs every rank the same.
    """
    chunk = n // (2 * cp)
    mirrored = 2 * cp - 1 - rank
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(mirrored * chunk, (mirrored + 1) * chunk)])
