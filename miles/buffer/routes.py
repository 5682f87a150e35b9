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

Blob, little-endian: `_HEAD`, then a `_BLOCK` entry per block, then the blocks. A block is one layer, or for short trajectories as many layers as
make about 1024 sets, so that a pipeline stage reads the header and its own layers. The header and every block carry the xxh3-64 of their bytes,
checked before anything is decoded; besides, a coder that does not end in the state in which the encoder began has met other tables than the
encoder's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
import zstandard

from miles.buffer import route_kernels as kernels
from miles.core import StructureError

_HEAD = np.dtype([("format", "u1"), ("itemsize", "u1"), ("chosen", "<u2"), ("experts", "<u4"), ("layers", "<u4"), ("together", "<u4"), ("rows", "<u4"), ("digest", "<u8")])
_BLOCK = np.dtype([("method", "u1"), ("size", "<u4"), ("digest", "<u8")])
_FORMAT = 1
_PLAIN, _ZSTD, _UNIFORM, _WEIGHTED = range(4)
_SETS_TOGETHER = 1024  # a block has at least about so many where one layer has fewer: each costs 13 bytes and some 20 us
_SETS_FOR_LANES = 64  # below, one coder: the states of four would cost more than they save
_SAMPLED_SETS = 8192  # of a block, to learn its weights; 256 weights learnt from so many cost < 0.05 bit a set
_ZSTD_SETS = 256  # below, zstd is not tried
_ZSTD_SAMPLE = 1 << 13  # bytes of a block, to see whether zstd is worth trying


def encode_routes(routes: np.ndarray) -> np.ndarray:
    """routes, uint8 or uint16 [rows, layers, K], as a blob: uint8 [bytes]. The order along K is lost.

    Raises StructureError: another dtype or number of axes.
    """
    if routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3:
        raise StructureError(f"routes of {routes.dtype} {list(routes.shape)}", "uint8 or uint16 [tokens, layers, K]", cause="routes")
    rows, layers, chosen = routes.shape
    experts = int(routes.max()) + 1 if routes.size else 0
    head = np.zeros(1, _HEAD)
    together = max(1, min(layers, _SETS_TOGETHER // max(rows, 1)))
    head[0] = (_FORMAT, routes.dtype.itemsize, chosen, experts, layers, together, rows, 0)
    table = np.zeros(-(-layers // together) if routes.size else 0, _BLOCK)
    parts = [head.view(np.uint8), table.view(np.uint8)]
    if routes.size:
        planes = _planes(chosen, layers * rows, routes.dtype)
        kernels.sort_planes(np.ascontiguousarray(routes), planes)
        coder = _Coder(experts, chosen)
        for i in range(len(table)):
            method, block = coder.encode(planes[:, i * together * rows : min((i + 1) * together, layers) * rows])
            table[i] = (method, len(block), xxhash.xxh3_64_intdigest(block))
            parts.append(block)
    head["digest"] = xxhash.xxh3_64_intdigest(head.tobytes() + table.tobytes())
    return np.concatenate(parts)


def decode_routes(blob: np.ndarray, layers: slice | Sequence[int] | None = None) -> np.ndarray:
    """Inverse of `encode_routes`, ascending along K. Raises StructureError (cause `digest`): damaged bytes."""
    return RouteReader(blob).read(layers)


class RouteReader:
    """Reads some layers of a blob. `source`: anything that `source[a:b]` gives uint8 bytes of, such as an open HDF5 dataset.

    >>> routes = RouteReader(file["routes"]).read(layers=range(15, 30))
    """

    def __init__(self, source):
        self._source = source
        head = np.asarray(source[: _HEAD.itemsize])
        if len(head) < _HEAD.itemsize:
            raise _damaged("no header")
        kind, self._itemsize, self.chosen, self.experts, self.layers, self._together, self.rows, digest = head.view(_HEAD)[0].tolist()
        blocks = -(-self.layers // max(self._together, 1)) if self.rows and self.chosen else 0
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

    def size(self, layers: slice | Sequence[int] | None = None) -> int:
        """Bytes that `read` takes, header included."""
        return len(self.header) + int(sum(self._table["size"][i] for i in self._blocks(self._columns(layers))))

    def read(self, layers: slice | Sequence[int] | None = None) -> np.ndarray:
        """uint8|uint16 [rows, chosen layers, K]. Raises StructureError: (cause `digest`) a block is not what was written, (cause `routes`)
        a layer that is not there."""
        columns = self._columns(layers)
        out = np.empty((self.rows, len(columns), self.chosen), np.dtype(f"u{self._itemsize}"))
        if not out.size:
            return out
        coder, place = _Coder(self.experts, self.chosen), {layer: i for i, layer in enumerate(columns)}
        for run in _runs(self._blocks(columns)):
            first = int(self._ends[run[0]] - self._table["size"][run[0]])
            data = np.asarray(self._source[first : int(self._ends[run[-1]])])
            for i in run:
                method, size, digest = self._table[i].tolist()
                block = data[int(self._ends[i]) - size - first :][:size]
                inside = range(i * self._together, min((i + 1) * self._together, self.layers))
                alone = len(inside) == 1  # decoded in place
                rows = out[:, place[inside[0]]] if alone else np.empty((len(inside) * self.rows, self.chosen), out.dtype)
                if xxhash.xxh3_64_intdigest(block) != digest or not coder.decode(method, block, rows):
                    raise _damaged(f"block {i} (layers {inside[0]} .. {inside[-1]}) is not what was written")
                if not alone:
                    for layer, part in zip(inside, rows.reshape(len(inside), self.rows, self.chosen), strict=True):
                        if layer in place:
                            out[:, place[layer]] = part
        return out

    def _columns(self, layers: slice | Sequence[int] | None) -> list[int]:
        """Layers asked for. Raises StructureError: one that is not there, or twice the same."""
        columns = range(self.layers)[layers or slice(None)] if layers is None or isinstance(layers, slice) else layers
        if any(not 0 <= c < self.layers for c in columns) or len(set(columns)) < len(columns):
            raise StructureError(f"layers {list(columns)} of routes with {self.layers} layers", f"each once, of 0 .. {self.layers - 1}", cause="routes")
        return list(columns)

    def _blocks(self, columns: list[int]) -> list[int]:
        return sorted({c // self._together for c in columns}) if self.rows and self.chosen else []


class _Coder:
    """Blocks of sets of `chosen` out of `experts`. Tables for equal weights are shared by all blocks."""

    def __init__(self, experts: int, chosen: int):
        self.experts, self.chosen = experts, chosen
        self._equal = self._guess = self._compressor = None

    def encode(self, plane: np.ndarray) -> tuple[int, np.ndarray]:
        """(method, block) of plane [K, sets], ascending along K: the smallest of the methods."""
        if kernels.repeats(plane):
            return self._zstd(plane, None)
        sets = plane.shape[1]
        tables, method, weights, bits = self._equal_tables(), _UNIFORM, None, math.inf
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
                    tables, method, weights, bits = fitted, _WEIGHTED, codes, cost
        lanes = _lanes(sets)
        if bits == math.inf or sets >= _ZSTD_SETS:
            other = self._zstd(plane, None if bits == math.inf else bits / 8 + 8 * lanes)
            if other is not None:
                return other
        words = np.empty(self.chosen * sets + 2 * kernels.LANES + 1, np.uint32)
        block = words[kernels.encode(plane, *tables, lanes, words) :].view(np.uint8)
        return method, block if weights is None else np.concatenate([weights, block])

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
        if method == _WEIGHTED and len(block) > self.experts:
            codes, block = block[: self.experts], block[self.experts :]
            tables = kernels.subset_sums(decode_weights(codes), self.chosen)
            guess = kernels.guesses(tables[0], self.chosen)
        elif method == _UNIFORM:
            tables = self._equal_tables()
            if self._guess is None:
                self._guess = kernels.guesses(tables[0], self.chosen)
            guess = self._guess
        else:
            return False
        if len(block) % 4 or not 0 < tables[0][self._total] < math.inf:
            return False
        return bool(kernels.decode(np.frombuffer(bytearray(block), np.uint32), *tables, guess, _lanes(len(out)), out))

    @property
    def _total(self) -> int:
        """Where Z[K, 0] lies."""
        return self.chosen * kernels.row_width(self.experts, self.chosen)

    def _equal_tables(self) -> tuple[np.ndarray, np.ndarray]:
        if self._equal is None:
            self._equal = kernels.subset_sums(np.ones(self.experts), self.chosen)
        return self._equal

    def _zstd(self, plane: np.ndarray, limit: float | None) -> tuple[int, np.ndarray] | None:
        """Row after row of plane [K, sets], zstd-compressed where that helps; None unless it takes less than `limit` bytes."""
        if self._compressor is None:
            self._compressor = zstandard.ZstdCompressor(level=1)
        size, sets = plane.size * plane.itemsize, plane.shape[1]
        if limit is not None and size > 4 * _ZSTD_SAMPLE:
            sampled = sets * _ZSTD_SAMPLE // size
            sample = np.ascontiguousarray(plane[:, (sets - sampled) // 2 :][:, :sampled].T)
            if len(self._compressor.compress(sample)) * size >= limit * sample.nbytes:
                return None
        data = np.ascontiguousarray(plane.T).view(np.uint8).reshape(-1)
        packed = np.frombuffer(self._compressor.compress(data), np.uint8)
        method, block = (_ZSTD, packed) if len(packed) < size else (_PLAIN, data)
        return (method, block) if limit is None or len(block) < limit else None


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
