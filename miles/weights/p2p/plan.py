"""Which trainer rank sends which rectangle of which tensor to whom. Pure: the same on every rank that knows both layouts.

A tensor is a matrix here: [n] is [n, 1]. A megatron-core parameter is made of Hugging Face tensors (mapping.tables): what one of its shards holds of one of
them is a rectangle of that tensor, or one for each query group where query, key and value are interleaved. Each is cut along the edges of what the
receivers hold, so that every part goes to a fixed set of them, and into parts of at most `CHUNK_BYTES`; each part is given to the replica of
the shard that has the fewest bytes to send so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from miles.core import StructureError
from miles.weights.mapping.architecture import Architecture
from miles.weights.mapping.placement import Key, Place, holders
from miles.weights.mapping.tables import Rule, hf_names, parameters, shard_slices

CHUNK_BYTES = 16 << 20
"""Of one message: large enough that its latency does not count, small enough that two of each source fit anywhere."""


class Box(NamedTuple):
    """A rectangle of a Hugging Face tensor: rows [top, bottom), columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def size(self) -> int:
        return max(0, self.bottom - self.top) * max(0, self.right - self.left)

    def common(self, other: Box) -> Box:
        return Box(max(self.top, other.top), min(self.bottom, other.bottom), max(self.left, other.left), min(self.right, other.right))


class Tensor(NamedTuple):
    """A Hugging Face tensor as it is sent."""

    shape: tuple[int, ...]
    dtype: str  # torch's name

    @property
    def whole(self) -> Box:
        return Box(0, self.shape[0], 0, math.prod(self.shape[1:]))

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]


Held = Mapping[str, Box]
"""What a receiver holds: Hugging Face name -> rectangle. A tensor that it does not hold is not in it."""


class Piece(NamedTuple):
    """One rectangle on its way."""

    name: str  # of the Hugging Face tensor
    box: Box  # where it lies in it
    key: Key  # of the megatron-core parameter
    row: int  # its upper left corner in the source's shard
    column: int


@dataclass(frozen=True)
class Chunk:
    """One message, packed once and sent to each of its receivers."""

    source: int
    receivers: tuple[int, ...]
    pieces: tuple[Piece, ...]
    size: int  # bytes


def plan(arch: Architecture, places: Sequence[Place], tensors: Mapping[str, Tensor], receivers: Sequence[Held], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """All messages of one version, those of a source in the order in which it sends them.

    tensors: every Hugging Face tensor of the model. Raises StructureError: a receiver holds a rectangle that no trainer rank has.
    """
    loads = [0] * len(places)
    edges = _Edges(receivers)
    experts_per_rank = arch.experts // (1 + max(p.ep for p in places)) if arch.experts else 0
    pieces: dict[tuple[int, tuple[int, ...]], list[list[Piece]]] = {}
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}
    for rule, layer, expert in parameters(arch):
        names = hf_names(rule, layer, expert)
        shards = holders(rule, layer, expert, places, experts_per_rank)
        for shard, replicas in enumerate(shards):
            for part, held, row, column in shard_parts(rule, [tensors[n].shape for n in names], len(shards), shard, arch):
                name, itemsize = names[part], tensors[names[part]].itemsize
                for box, to in edges.cells(name, held):
                    for cut in _cut(box, itemsize, chunk_bytes):
                        size = cut.size * itemsize
                        source = min(replicas, key=loads.__getitem__)
                        loads[source] += size * len(to)
                        runs, full = pieces.setdefault((source, to), [[]]), sizes.get((source, to), 0) + size > chunk_bytes
                        if full and runs[-1]:
                            runs.append([])
                        sizes[source, to] = size if full else sizes.get((source, to), 0) + size
                        runs[-1].append(Piece(name, cut, (rule.megatron, layer, expert), row + cut.top - held.top, column + cut.left - held.left))
    chunks = [Chunk(source, to, tuple(run), sum(p.box.size * tensors[p.name].itemsize for p in run))
              for (source, to), runs in sorted(pieces.items()) for run in runs]
    _check_complete(chunks, receivers)
    return chunks


def shard_parts(rule: Rule, shapes: list[tuple[int, ...]], size: int, shard: int, arch: Architecture) -> Iterator[tuple[int, Box, int, int]]:
    """What shard `shard` of `size` holds of each Hugging Face part of a parameter (`shapes`: theirs): part, its rectangle there, and the row and column in
    the shard where that begins. Padding of the vocabulary is no part of anything."""
    boxes = [box_of(index, shape) for index, shape in zip(shard_slices(rule, shapes, size, shard), shapes, strict=True)]
    if rule.kind != "qkv":
        row = 0
        for part, box in enumerate(boxes):
            if box.size:
                yield part, box, row, 0
            row += box.bottom - box.top
        return
    groups = (boxes[1].bottom - boxes[1].top) // arch.head_dim
    heights = [(b.bottom - b.top) // groups for b in boxes]
    for group in range(groups):
        for part, (box, height) in enumerate(zip(boxes, heights, strict=True)):
            top = box.top + group * height
            yield part, Box(top, top + height, box.left, box.right), group * sum(heights) + sum(heights[:part]), 0


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The rectangle that slices cut out of a tensor of one or two dimensions."""
    (top, bottom), (left, right) = ([s.indices(n)[:2] for s, n in zip(index, shape, strict=True)] + [(0, 1)])[:2]
    return Box(top, bottom, left, right)


class _Edges:
    """Cuts rectangles where what receivers hold begins or ends."""

    def __init__(self, receivers: Sequence[Held]):
        self._held: dict[str, list[tuple[int, Box]]] = {}
        for number, held in enumerate(receivers):
            for name, box in held.items():
                if box.size:
                    self._held.setdefault(name, []).append((number, box))

    def cells(self, name: str, box: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Parts of `box` that somebody holds, each with all who hold it."""
        inside = [(number, box.common(held)) for number, held in self._held.get(name, ())]
        inside = [(number, held) for number, held in inside if held.size]
        rows = sorted({edge for _, held in inside for edge in (held.top, held.bottom)})
        columns = sorted({edge for _, held in inside for edge in (held.left, held.right)})
        for top, bottom in pairwise(rows):
            for left, right in pairwise(columns):
                to = tuple(n for n, h in inside if h.top <= top and bottom <= h.bottom and h.left <= left and right <= h.right)
                if to:
                    yield Box(top, bottom, left, right), to


def _cut(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Parts of at most `limit` bytes, one row at least."""
    height = max(1, limit // max(1, (box.right - box.left) * itemsize))
    for top in range(box.top, box.bottom, height):
        yield box._replace(top=top, bottom=min(top + height, box.bottom))


def _check_complete(chunks: list[Chunk], receivers: Sequence[Held]) -> None:
    coming: list[dict[str, int]] = [{} for _ in receivers]
    for chunk in chunks:
        for receiver in chunk.receivers:
            for piece in chunk.pieces:
                coming[receiver][piece.name] = coming[receiver].get(piece.name, 0) + piece.box.size
    for number, held in enumerate(receivers):
        for name, box in held.items():
            if coming[number].get(name, 0) != box.size:
                raise StructureError(f"point-to-point plan: receiver {number} holds {tuple(box)} of {name}, of which the trainer has {coming[number].get(name, 0)} elements",
                                     f"all {box.size}", "the model folders of trainer and rollout differ", cause="weights:plan")
