"""The digest of a tensor: xxh3-128 over the xxh3-128 of each of its blocks, so that blocks are hashed, verified and patched in parallel."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from miles.weights.parallel import threads

BLOCK_BYTES = 1 << 22
"""Fixed: a digest depends on it."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Flat integer view of a contiguous tensor's bytes, one element each."""
    return tensor.contiguous().view(-1).view(_BITS[tensor.element_size()])


def blocks(tensor: torch.Tensor) -> list[np.ndarray]:
    """A CPU tensor's bit patterns as flat unsigned integers in blocks of at most `BLOCK_BYTES`; views of it where it is contiguous."""
    flat = bits(tensor.detach().cpu()).numpy()
    flat = flat.view(f"u{flat.itemsize}")
    size = BLOCK_BYTES // flat.itemsize
    return [flat[i:i + size] for i in range(0, len(flat), size)]


def join(block_digests: list[bytes]) -> str:
    """Digest of a tensor from those of its blocks, hex."""
    return xxhash.xxh3_128_hexdigest(b"".join(block_digests))


def digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes, hex."""
    return join(list(threads().map(xxhash.xxh3_128_digest, blocks(tensor))))
