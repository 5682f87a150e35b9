"""Compact lossless storage of routes: which K of E experts processed each token in each MoE layer.

The K experts of a row are a set. The trainer gathers the router's scores at these indices and scatters them back over all experts
(megatron-core's RouterReplay), so their order decides nothing but the rounding of one sum of K numbers, and engines differ in it.
Rows come back ascending; that is the canonical form everywhere after the buffer.

A set of K out of E needs log2 C(E, K) bits when all are equally likely: 48.54 for 8 of 256, where int32 takes 256 and bytes take 64.
Measured at 8 of 256, 32k tokens, in bits a set, for uniform | Zipf routes:

    bytes + zstd level 1                 64.00 | 54.66
    gaps between experts + zstd          50.42 | 48.06   a code word is whole bits, and a gap does not know where it leads
    rank of the combination, packed      49    | 49      blind to skew; K and E are bound by 64-bit ranks
    this codec                           48.55 | 38.20
    entropy of these routes              48.54 | 38.11

This codec is the combinatorial number system with weights. Rows are coded expert by expert, ascending: with m experts to go, all >= a,
the next one is >= j in Z[m, j] of Z[m, a] cases, where Z[m, a] = sum over m-subsets of {a..E-1} of the product of the experts' weights.
With all weights 1 that is C(E-a, m), the classic enumerative code (Cover 1973, doi:10.1109/TIT.1973.1054929); with a weight per expert and layer it is the
best code for routers whose experts are unequally popular (conditional Poisson sampling: Chen, Dempster and Liu 1994, doi:10.1093/biomet/81.3.457).
The choices go into a range variant of asymmetric numeral systems (Duda, arXiv:1311.2540): 64-bit state, 24-bit probabilities, four states that
take turns by row. Weights are a byte per expert; per layer the smallest of uniform, weighted and zstd (repetitive text) is taken.

Blob, little-endian: `_HEAD`, then a `_BLOCK` entry per block, then the blocks. A *section* is one layer, or for short trajectories as many layers as
make about 1024 sets; a *segment* is 2048 rows. The blocks are, segment after segment, one of each section, after one of each section with its weights (no
bytes where they are equal). So a pipeline stage reads its own layers, a context-parallel rank its own rows, each with a few contiguous reads; a segment
costs 13 bytes of table and some 20 of coder states a layer, 0.3 % of its bytes. The header and every block carry the xxh3-64 of their bytes, checked before
anything is decoded; besides, a coder that does not end in the state in which the encoder began has met other tables than the encoder's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
import zstandard

from miles.buffer import route_kernels as kernels
from miles.core import StructureError

_HEAD = np.dtype([("format", "u1"), ("itemsize", "u1"), ("chosen", "<u2"), ("experts", "<u4"), ("layers", "<u4"), ("together", "<u4"), ("rows", "<u4"), ("segment", "<u4"), ("digest", "<u8")])
_BLOCK = np.dtype([("method", "u1"), ("size", "<u4"), ("digest", "<u8")])
_FORMAT = 2
_PLAIN, _ZSTD, _UNIFORM, _WEIGHTED = range(4)
_SEGMENT = 2048  # rows
_SETS_TOGETHER = 1024  # a section has at least about so many where one layer has fewer: each costs 26 bytes and some 20 us
_SETS_FOR_LANES = 64  # below, one coder: the states of four would cost more than they save
_SAMPLED_SETS = 8192  # of a section, to learn its weights; 256 weights learnt from so many cost < 0.05 bit a set
_ZSTD_SETS = 256  # below, zstd is not tried
_ZSTD_SAMPLE = 1 << 13  # bytes of a section, to see whether zstd is worth trying

Ranges = Sequence[tuple[int, int]]


def encode_routes(routes: np.ndarray) -> np.ndarray:
    """routes, uint8 or uint16 [rows, layers, K], as a blob: uint8 [bytes]. The order along K is lost.

    Raises StructureError: another dtype or number of axes.
    """
    if routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3:
        raise StructureError(f"routes of {routes.dtype} {list(routes.shape)}", "uint8 or uint16 [tokens, layers, K]", cause="routes")
    rows, layers, chosen = routes.shape
    experts = int(routes.max()) + 1 if routes.size else 0
    together = max(1, min(layers, _SETS_TOGETHER // max(rows, 1)))
    grid = _Grid(layers, rows, together, _SEGMENT)
    head, table = np.zeros(1, _HEAD), np.zeros((1 + grid.segments, grid.sections) if routes.size else 0, _BLOCK)
    head[0] = (_FORMAT, routes.dtype.itemsize, chosen, experts, layers, together, rows, _SEGMENT, 0)
    blocks: list[list[np.ndarray]] = []
    if routes.size:
        planes = _planes(chosen, layers * rows, routes.dtype)
        kernels.sort_planes(np.ascontiguousarray(routes), planes)
        coder = _Coder(experts, chosen)
        for section in range(grid.sections):
            inside = grid.layers_of(section)
            found = coder.encode(planes[:, inside.start * rows : inside.stop * rows], _SEGMENT if grid.segments > 1 else len(inside) * rows)
            table[:, section] = [(method, len(block), xxhash.xxh3_64_intdigest(block)) for method, block in found]
            blocks.append([block for _, block in found])
    head["digest"] = xxhash.xxh3_64_intdigest(head.tobytes() + table.tobytes())
    return np.concatenate([head.view(np.uint8), table.reshape(-1).view(np.uint8), *(block for row in zip(*blocks, strict=True) for block in row)])


def decode_routes(blob: np.ndarray, layers: slice | Sequence[int] | None = None, rows: Ranges | None = None) -> np.ndarray:
    """Inverse of `encode_routes`, ascending along K. Raises StructureError (cause `digest`): damaged bytes."""
    return RouteReader(blob).read(layers, rows)


@dataclass(frozen=True)
class _Grid:
    """Sections of `together` layers, segments of `segment` rows."""

    layers: int
    rows: int
    together: int
    segment: int

    @property
    def sections(self) -> int:
        return -(-self.layers // self.together)

    @property
    def segments(self) -> int:
        return -(-self.rows // self.segment)

    def layers_of(self, section: int) -> range:
        return range(section * self.together, min((section + 1) * self.together, self.layers))

    def rows_of(self, segment: int) -> range:
        return range(segment * self.segment, min((segment + 1) * self.segment, self.rows))


class RouteReader:
    """Reads some layers and rows of a blob. `source`: anything that `source[a:b]` gives uint8 bytes of, such as an open HDF5 dataset.

    >>> routes = RouteReader(file["routes"]).read(layers=range(15, 30), rows=[(0, 512), (3584, 4096)])
    """

    def __init__(self, source):
        self._source = source
        head = np.asarray(source[: _HEAD.itemsize])
        if len(head) < _HEAD.itemsize:
            raise _damaged("no header")
        kind, self._itemsize, self.chosen, self.experts, self.layers, together, self.rows, segment, digest = head.view(_HEAD)[0].tolist()
        self._grid = _Grid(self.layers, self.rows, max(together, 1), max(segment, 1))
        blocks = (1 + self._grid.segments) * self._grid.sections if self.rows and self.chosen else 0
        end = _HEAD.itemsize + blocks * _BLOCK.itemsize
        table = np.asarray(source[_HEAD.itemsize : min(end, len(source))])
        unsigned = head.copy()
        unsigned[_HEAD.fields["digest"][1] :] = 0
        if kind != _FORMAT or xxhash.xxh3_64_intdigest(unsigned.tobytes() + table.tobytes()) != digest:
            raise _damaged("its header is not one")
        self._table = table.view(_BLOCK)
        self._ends = end + np.cumsum(self._table["size"], dtype=np.int64)
        if len(source) != (self._ends[-1] if blocks else end):
            raise _damaged(f"{len(source)} bytes, which its header does not say")
        self.header: bytes = head.tobytes() + table.tobytes()

    def size(self, layers: slice | Sequence[int] | None = None, rows: Ranges | None = None) -> int:
        """Bytes that `read` takes, header included."""
        sections, segments = self._wanted(self._columns(layers), self._ranges(rows))
        return len(self.header) + int(sum(self._table["size"][i] for i in self._blocks(sections, segments)))

    def read(self, layers: slice | Sequence[int] | None = None, rows: Ranges | None = None) -> np.ndarray:
        """uint8|uint16 [chosen rows, chosen layers, K]; `rows`: ranges [start, stop), in order, all by default. Raises StructureError: (cause `digest`) a
        block is not what was written, (cause `routes`) a layer or row that is not there."""
        columns, ranges = self._columns(layers), self._ranges(rows)
        out = np.empty((sum(stop - start for start, stop in ranges), len(columns), self.chosen), np.dtype(f"u{self._itemsize}"))
        if not out.size:
            return out
        sections, segments = self._wanted(columns, ranges)
        blocks = self._fetch(self._blocks(sections, segments))
        coder, place = _Coder(self.experts, self.chosen), {layer: i for i, layer in enumerate(columns)}
        for section in sections:
            inside = self._grid.layers_of(section)
            coder.weigh(blocks[section][1])
            for segment in segments:
                method, block = blocks[(1 + segment) * self._grid.sections + section]
                here = self._grid.rows_of(segment)
                parts = _overlaps(here, ranges)
                alone = len(inside) == 1 and parts[0][1] - parts[0][0] == len(here)
                decoded = out[parts[0][2]:][: len(here), place[inside[0]]] if alone else np.empty((len(inside) * len(here), self.chosen), out.dtype)
                if not coder.decode(method, block, decoded):
                    raise self._not_written(section, segment)
                if not alone:
                    for layer, of_layer in zip(inside, decoded.reshape(len(inside), len(here), self.chosen), strict=True):
                        if layer in place:
                            for start, stop, at in parts:
                                out[at : at + stop - start, place[layer]] = of_layer[start - here.start : stop - here.start]
        return out

    def _columns(self, layers: slice | Sequence[int] | None) -> list[int]:
        """Layers asked for. Raises StructureError: one that is not there, or twice the same."""
        columns = range(self.layers)[layers or slice(None)] if layers is None or isinstance(layers, slice) else layers
        if any(not 0 <= c < self.layers for c in columns) or len(set(columns)) < len(columns):
            raise StructureError(f"layers {list(columns)} of routes with {self.layers} layers", f"each once, of 0 .. {self.layers - 1}", cause="routes")
        return list(columns)

    def _ranges(self, rows: Ranges | None) -> list[tuple[int, int]]:
        """Rows asked for, without empty ranges. Raises StructureError: they are not there, or not in order."""
        ranges = [(0, self.rows)] if rows is None else list(rows)
        bounds = [bound for part in ranges for bound in part]
        if bounds != sorted(bounds) or bounds and not 0 <= bounds[0] <= bounds[-1] <= self.rows:
            raise StructureError(f"rows {ranges} of routes with {self.rows} rows", f"ranges in order, within 0 .. {self.rows}", cause="routes")
        return [(start, stop) for start, stop in ranges if start < stop]

    def _wanted(self, columns: list[int], ranges: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """(sections, segments) that have something of these, in order."""
        if not (columns and ranges and self.chosen):
            return [], []
        size = self._grid.segment
        return sorted({c // self._grid.together for c in columns}), sorted({s for start, stop in ranges for s in range(start // size, -(-stop // size))})

    def _blocks(self, sections: list[int], segments: list[int]) -> list[int]:
        """Numbers of their blocks, weights first."""
        rows = [0, *(1 + s for s in segments)] if sections else []
        return [row * self._grid.sections + section for row in rows for section in sections]

    def _fetch(self, wanted: list[int]) -> dict[int, tuple[int, np.ndarray]]:
        """(method, bytes) of these blocks, neighbours with one read. Raises StructureError (cause `digest`): they are not what was written."""
        found = {}
        for run in _runs(wanted):
            first = int(self._ends[run[0]] - self._table["size"][run[0]])
            last = int(self._ends[run[-1]])
            data = np.asarray(self._source[first:last]) if last > first else np.empty(0, np.uint8)
            for i in run:
                method, size, digest = self._table[i].tolist()
                block = data[int(self._ends[i]) - size - first :][:size]
                if xxhash.xxh3_64_intdigest(block) != digest:
                    raise self._not_written(i % self._grid.sections, i // self._grid.sections - 1)
                found[i] = (method, block)
        return found

    def _not_written(self, section: int, segment: int) -> StructureError:
        layers = self._grid.layers_of(section)
        rows = f", rows {self._grid.rows_of(segment).start} .." if segment >= 0 else ", weights"
        return _damaged(f"the block of layers {layers[0]} .. {layers[-1]}{rows} is not what was written")


def _overlaps(here: range, ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(start, stop, place among all chosen rows) of the chosen rows that lie in `here`."""
    found, at = [], 0
    for start, stop in ranges:
        first, last = max(start, here.start), min(stop, here.stop)
        if first < last:
            found.append((first, last, at + first - start))
        at += stop - start
    return found


class _Coder:
    """Sections of sets of `chosen` out of `experts`. Tables for equal weights are shared by all of them."""

    def __init__(self, experts: int, chosen: int):
        self.experts, self.chosen = experts, chosen
        self._equal = self._guess = self._weighted = self._compressor = None

    def encode(self, plane: np.ndarray, segment: int) -> list[tuple[int, np.ndarray]]:
        """(method, block) of the weights, and of each `segment` sets of plane [K, sets], ascending along K: the smallest of the methods."""
        none = (_PLAIN, np.empty(0, np.uint8))
        parts = [plane[:, at : at + segment] for at in range(0, plane.shape[1], segment)]
        if kernels.repeats(plane):
            return [none, *self._zstd(plane, parts, None)]
        sets = plane.shape[1]
        tables, method, weights, bits = self._equal_tables(), _UNIFORM, none, math.inf
        if (total := tables[0][self._total]) < math.inf:
            bits = sets * math.log2(total)
        if bits > 64 * self.experts:  # else the weights could take more than they save
            counts = np.zeros(self.experts, np.int64)
            stride = max(1, sets // _SAMPLED_SETS)
            kernels.histogram(plane, stride, counts)
            codes = fit_weights(counts, -(-sets // stride))
            fitted = kernels.subset_sums(decode_weights(codes), self.chosen)
            if (total := fitted[0][self._total]) < math.inf:
                cost = sets * math.log2(total) - float(counts @ np.log2(decode_weights(codes))) * sets / -(-sets // stride) + 8 * self.experts
                if cost < bits:
                    tables, method, weights, bits = fitted, _WEIGHTED, (_PLAIN, codes), cost
        if bits == math.inf or sets >= _ZSTD_SETS:
            other = self._zstd(plane, parts, None if bits == math.inf else bits / 8 + sum(8 * _lanes(part.shape[1]) for part in parts))
            if other is not None:
                return [none, *other]
        found = [weights]
        for part in parts:
            words = np.empty(self.chosen * part.shape[1] + 2 * kernels.LANES + 1, np.uint32)
            found.append((method, words[kernels.encode(part, *tables, _lanes(part.shape[1]), words) :].view(np.uint8)))
        return found

    def weigh(self, codes: np.ndarray) -> None:
        """The blocks decoded next are those of a section with these weights (no bytes: equal ones)."""
        self._weighted = None
        if len(codes) == self.experts:
            tables = kernels.subset_sums(decode_weights(codes), self.chosen)
            self._weighted = (*tables, kernels.guesses(tables[0], self.chosen))

    def decode(self, method: int, block: np.ndarray, out: np.ndarray) -> bool:
        """Block into out [sets, K]; False when it is no block of this shape."""
        if method == _ZSTD:
            try:
                block = np.frombuffer(zstandard.decompress(block.tobytes(), max_output_size=out.size * out.itemsize), np.uint8)
            except zstandard.ZstdError:
                return False
            method = _PLAIN
        if method == _PLAIN:
            if len(block) != out.size * out.itemsize:
                return False
            out[...] = block.view(out.dtype).reshape(out.shape)
            return True
        if method not in (_UNIFORM, _WEIGHTED) or method == _WEIGHTED and self._weighted is None:
            return False
        z, s, guess = self._weighted if method == _WEIGHTED else self._equal_guesses()
        if len(block) % 4 or not 0 < z[self._total] < math.inf:
            return False
        return bool(kernels.decode(np.frombuffer(bytearray(block), np.uint32), z, s, guess, _lanes(len(out)), out))

    @property
    def _total(self) -> int:
        """Where Z[K, 0] lies."""
        return self.chosen * kernels.row_width(self.experts, self.chosen)

    def _equal_tables(self) -> tuple[np.ndarray, np.ndarray]:
        if self._equal is None:
            self._equal = kernels.subset_sums(np.ones(self.experts), self.chosen)
        return self._equal

    def _equal_guesses(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tables = self._equal_tables()
        if self._guess is None:
            self._guess = kernels.guesses(tables[0], self.chosen)
        return (*tables, self._guess)

    def _zstd(self, plane: np.ndarray, parts: list[np.ndarray], limit: float | None) -> list[tuple[int, np.ndarray]] | None:
        """Row after row of each of `parts` of plane [K, sets], zstd-compressed where that helps; None unless all take less than `limit` bytes."""
        if self._compressor is None:
            self._compressor = zstandard.ZstdCompressor(level=1)
        size, sets = plane.size * plane.itemsize, plane.shape[1]
        if limit is not None and size > 4 * _ZSTD_SAMPLE:
            sampled = sets * _ZSTD_SAMPLE // size
            sample = np.ascontiguousarray(plane[:, (sets - sampled) // 2 :][:, :sampled].T)
            if len(self._compressor.compress(sample)) * size >= limit * sample.nbytes:
                return None
        found = []
        for part in parts:
            data = np.ascontiguousarray(part.T).view(np.uint8).reshape(-1)
            packed = np.frombuffer(self._compressor.compress(data), np.uint8)
            found.append((_ZSTD, packed) if len(packed) < len(data) else (_PLAIN, data))
        return found if limit is None or sum(len(block) for _, block in found) < limit else None


def _lanes(sets: int) -> int:
    return kernels.LANES if sets >= _SETS_FOR_LANES else 1


def fit_weights(counts: np.ndarray, rows: int) -> np.ndarray:
    """Weights of experts that occur `counts` times in `rows` rows: uint8 [E]. The odds of an expert, which is the maximum of the likelihood up
    to O(K/E) (Hajek 1964, doi:10.1214/aoms/1177700375); an expert not seen counts as half seen."""
    share = np.clip(counts, 0.5, rows - 0.5) / rows
    odds = share / (1 - share)
    exponent = np.log2(odds / odds.min())
    whole = np.minimum(np.floor(exponent), 31)
    steps = np.rint((np.minimum(np.exp2(exponent - whole), 2) - 1) * 8)
    return np.minimum(8 * whole + steps, 255).astype(np.uint8)


def decode_weights(codes: np.ndarray) -> np.ndarray:
    """Code q stands for (8 + q mod 8) * 2^(q div 8 - 3): eight steps an octave, exact in float64 on every machine. 1 for q = 0."""
    return np.ldexp(8.0 + (codes & 7), (codes >> 3).astype(np.int64) - 3)


def _planes(chosen: int, sets: int, dtype: np.dtype) -> np.ndarray:
    """Empty [chosen, >= sets] whose rows lie 320 bytes off multiples of a page: kernels walk all rows at once, and at a distance of pages they
    would share few lines of the cache (measured: 32768 tokens took a third longer than 32767)."""
    stride = sets * dtype.itemsize
    return np.empty((chosen, (stride + (320 - stride) % 4096) // dtype.itemsize), dtype)


def _runs(blocks: list[int]) -> Iterable[list[int]]:
    """Blocks split where they do not follow each other, so that neighbours are one read."""
    run: list[int] = []
    for i in blocks:
        if run and i != run[-1] + 1:
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _damaged(what: str) -> StructureError:
    return StructureError(f"stored routes: {what}", "the bytes that were written", "the group is dropped; check the file system", cause="digest")
