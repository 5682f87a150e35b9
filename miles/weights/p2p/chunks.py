"""A chunk as bytes: its rectangles row by row, each at a multiple of 16, then the xxh3-128 of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash

from miles.weights.mapping.placement import Key
from miles.weights.p2p.image import Image
from miles.weights.p2p.plan import Box, Piece, Tensor

_ALIGN, DIGEST_BYTES = 16, 16


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offset of each rectangle of these bytes, and of the digests behind them."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGN) * _ALIGN
    return offsets, at


def message_bytes(sizes: Sequence[int]) -> int:
    return layout(sizes)[1] + DIGEST_BYTES * len(sizes)


def pack(pieces: Sequence[Piece], tensors: Mapping[str, Tensor], shards: Mapping[Key, torch.Tensor], out: np.ndarray) -> bytes:
    """Write a chunk into `out` (uint8, of `message_bytes`). Returns the digests of its pieces, one after the other."""
    sizes = [p.box.size * tensors[p.name].itemsize for p in pieces]
    offsets, end = layout(sizes)
    digests = []
    for piece, offset, size in zip(pieces, offsets, sizes, strict=True):
        shard = shards[piece.key].detach()
        matrix = shard.view(len(shard), -1)
        height, width = piece.box.bottom - piece.box.top, piece.box.right - piece.box.left
        target = torch.from_numpy(out[offset:offset + size]).view(getattr(torch, tensors[piece.name].dtype)).view(height, width)
        target.copy_(matrix[piece.row:piece.row + height, piece.column:piece.column + width])
        digests.append(xxhash.xxh3_128_digest(out[offset:offset + size]))
    joined = b"".join(digests)
    out[end:end + len(joined)] = np.frombuffer(joined, np.uint8)
    return joined


def unpack(message: np.ndarray, pieces: Sequence[tuple[str, Box]], image: Image) -> tuple[bytes, list[str]]:
    """Write a chunk's pieces to where they belong. Returns their digests as they were found, and the names of tensors whose bytes are not what was sent."""
    sizes = [image.bytes_of(name, box) for name, box in pieces]
    offsets, end = layout(sizes)
    digests, wrong = [], []
    for i, ((name, box), offset, size) in enumerate(zip(pieces, offsets, sizes, strict=True)):
        data = message[offset:offset + size]
        digests.append(xxhash.xxh3_128_digest(data))
        if digests[-1] == message[end + DIGEST_BYTES * i:end + DIGEST_BYTES * (i + 1)].tobytes():
            image.write(name, box, data)
        else:
            wrong.append(name)
    return b"".join(digests), wrong
