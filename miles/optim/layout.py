"""Where the elements of a flat shard lie in a state file: pure arithmetic.

A file is a row of equal blocks, one a bucket; a block holds main, exp_avg and exp_avg_sq side by side, each padded to whole pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PAGE = 4096  # bytes; what O_DIRECT asks of offsets, lengths and addresses
FIELDS = ("main", "exp_avg", "exp_avg_sq")
ITEM = 4  # bytes of a float32


class Piece(NamedTuple):
    """Elements [start, start + count) of tensor `tensor`, at [at, at + count) of their bucket."""

    tensor: int
    start: int
    at: int
    count: int


@dataclass(frozen=True)
class BucketLayout:
    """`sizes`: elements of the tensors of the shard, in order. `bucket`: elements of a bucket at most."""

    sizes: tuple[int, ...]
    bucket: int

    def __post_init__(self):
        assert self.bucket > 0 and all(n >= 0 for n in self.sizes), (self.bucket, self.sizes)

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    @property
    def buckets(self) -> int:
        return -(-self.elements // self.bucket)

    @property
    def stride(self) -> int:
        """Elements from one field of a block to the next: whole pages."""
        per_page = PAGE // ITEM
        return -(-min(self.bucket, self.elements) // per_page) * per_page

    @property
    def block_bytes(self) -> int:
        return len(FIELDS) * self.stride * ITEM

    @property
    def file_bytes(self) -> int:
        return self.buckets * self.block_bytes

    def pieces(self) -> Iterator[list[Piece]]:
        """For each bucket the pieces of tensors in it, in order."""
        found: list[list[Piece]] = [[] for _ in range(self.buckets)]
        flat = 0
        for tensor, size in enumerate(self.sizes):
            start = 0
            while start < size:
                bucket, at = divmod(flat, self.bucket)
                count = min(size - start, self.bucket - at)
                found[bucket].append(Piece(tensor, start, at, count))
                start, flat = start + count, flat + count
        return iter(found)


def cut(pieces: list[Piece], most: int) -> Iterator[list[Piece]]:
    """The same elements in the same order, in lists of at most `most` elements."""
    part, room = [], most
    for x in pieces:
        done = 0
        while done < x.count:
            count = min(room, x.count - done)
            part.append(Piece(x.tensor, x.start + done, x.at + done, count))
            done, room = done + count, room - count
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part
