"""Where the elements of a flat shard lie in a state file: pure arithmetic.

A file is a row of equal blocks, one a bucket; a block holds main, exp_avg and exp_avg_sq side by side, each padded to whole pages. Main values are
float32; moments are float32 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

PAGE = 4096  # bytes; what O_DIRECT asks of offsets, lengths and addresses
FIELDS = ("main", "exp_avg", "exp_avg_sq")
Moments = Literal["fp32", "bf16"]
WIDTHS: dict[Moments, tuple[int, int, int]] = {"fp32": (4, 4, 4), "bf16": (4, 2, 2)}  # bytes of an element of each field


class Piece(NamedTuple):
    """Elements [start, start + count) of tensor `tensor`, at [at, at + count) of their bucket."""

    tensor: int
    start: int
    at: int
    count: int


@dataclass(frozen=True)
class BucketLayout:
    """`sizes`: elements of the tensors of the shard, in order. `bucket`: elements of a bucket at most. `moments`: their format."""

    sizes: tuple[int, ...]
    bucket: int
    moments: Moments = "fp32"

    def __post_init__(self):
        assert self.bucket > 0 and all(n >= 0 for n in self.sizes), (self.bucket, self.sizes)

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    @property
    def buckets(self) -> int:
        return -(-self.elements // self.bucket)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Bytes of an element of each of FIELDS."""
        return WIDTHS[self.moments]

    @property
    def stride(self) -> int:
        """Elements for which each field of a block has room: whole pages of every field."""
        per_page = PAGE // min(self.widths)
        return -(-min(self.bucket, self.elements) // per_page) * per_page

    @property
    def block_bytes(self) -> int:
        return sum(self.widths) * self.stride

    def offset(self, field: int, at: int = 0) -> int:
        """Byte of a block at which element `at` of a field lies."""
        return sum(self.widths[:field]) * self.stride + self.widths[field] * at

    @property
    def file_bytes(self) -> int:
        return self.buckets * self.block_bytes

    def pieces(self) -> Iterator[list[Piece]]:
        """For each bucket the pieces of tensors in it, in order."""
        return iter(pieces_of(self.sizes, self.bucket))


def pieces_of(sizes: Sequence[int], bucket: int) -> list[list[Piece]]:
    """Tensors of these sizes one behind the other, cut into buckets: for each the pieces in it, in order."""
    found: list[list[Piece]] = [[] for _ in range(-(-sum(sizes) // bucket))]
    flat = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            number, at = divmod(flat, bucket)
            count = min(size - start, bucket - at)
            found[number].append(Piece(tensor, start, at, count))
            start, flat = start + count, flat + count
    return found


def cut(piece: Piece, most: int) -> Iterator[Piece]:
    """The same elements in the same order, in pieces of at most `most` elements."""
    for done in range(0, piece.count, most):
        yield Piece(piece.tensor, piece.start + done, piece.at + done, min(most, piece.count - done))
