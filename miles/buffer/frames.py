"""The stored form of one finished sample: a frame, which lies in a segment file and verifies alone.

    prefix   magic, bytes of header and body, xxh3-64 of the header        28 bytes, little-endian
    header   JSON: group, sample, and of each leaf its record, digest and arrays
    body     the arrays of the leaves, one after the other

Of each trajectory (leaf) the body holds tokens int32 [T], loss_mask uint8 [T], logprobs float32 [T], versions int32 [T] and, unless the model is
dense, the routes: the blob of `miles.buffer.routes`, of which some layers and some rows can be read alone. Scalars are in `record`. `digest` is the xxh3-128
of record, arrays and the header of the routes, which holds a digest of each of their blocks: who reads some has verified all that it returns. Tokens, masks and versions are zstd-compressed; log-probabilities do not compress and are stored as they are.

A frame that was cut short (kill -9, full disk) has no whole header, or ends after its file does, and is not believed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash
import zstandard

from miles.core import StructureError, Trajectory
from miles.rundir.publish import Buffer

if TYPE_CHECKING:
    from miles.buffer.routes import Ranges

ARRAYS = {"tokens": "<i4", "loss_mask": "<u1", "logprobs": "<f4", "versions": "<i4"}
PLAIN = ("logprobs",)
_PREFIX = np.dtype([("magic", "S8"), ("header", "<u4"), ("body", "<u8"), ("check", "<u8")])
_MAGIC = b"milespt1"
_AHEAD = 4096  # bytes read at once for a header, whose size is not known: on a shared file system each read is a wait
_SHARED = ("group_id", "sample", "task_id", "reward", "finish_reason")  # by the leaves of a sample
_SCALARS = (
    "group_id", "sample", "leaf", "task_id", "reward", "finish_reason", "turns", "exact", "cached_tokens", "cacheable_tokens",
    "prompt_tokens", "seconds", "meta",
)


class Leaf(msgspec.Struct, frozen=True):
    """One trajectory in a frame. `sizes`: stored bytes of each of ARRAYS, then of the routes (0: none); they lie from `start` of the body on."""

    record: str
    digest: str
    length: int  # tokens
    start: int
    sizes: list[int]


class Header(msgspec.Struct, frozen=True):
    group: int
    sample: int
    leaves: list[Leaf]


class Place(msgspec.Struct, frozen=True):
    """Where a frame lies."""

    sample: int
    segment: str  # file name
    offset: int
    body: int  # offset of its body
    size: int  # bytes, all of it


def encode_frame(leaves: Sequence[Trajectory]) -> list[Buffer]:
    """The frame of one sample, in pieces that are written one after the other. Raises StructureError (cause `leaves`): these are not its leaves 0, 1, ..., with one reward and one end."""
    first = leaves[0]
    expected = {k: getattr(first, k) for k in _SHARED}
    for n, t in enumerate(leaves):
        if t.leaf != n or t is not first and {k: getattr(t, k) for k in _SHARED} != expected:
            raise StructureError(f"leaf {t.leaf} of {len(leaves)}, in place {n}: {({k: getattr(t, k) for k in _SHARED})}", f"leaf {n} of {expected}", cause="leaves")
    heads, body, start = [], [], 0
    for t in leaves:
        head, blobs = _encode_leaf(t, start)
        heads.append(head)
        body += blobs
        start += sum(head.sizes)
    header = msgspec.json.encode(Header(first.group_id, first.sample, heads))
    prefix = np.array([(_MAGIC, len(header), start, xxhash.xxh3_64_intdigest(header))], _PREFIX)
    return [prefix.tobytes(), header, *body]


def read_header(fd: int, segment: str, offset: int, end: int) -> tuple[Header, Place] | None:
    """The frame at `offset` of an open segment of `end` bytes; None when there is no whole one."""
    data = os.pread(fd, _AHEAD, offset)
    if len(data) >= _PREFIX.itemsize and (missing := _PREFIX.itemsize + int(np.frombuffer(data, _PREFIX, 1)["header"][0]) - len(data)) > 0:
        data += os.pread(fd, min(missing, max(end - offset, 0)), offset + len(data))
    found = parse_header(data, segment, offset)
    return found if found is not None and offset + found[1].size <= end else None


def parse_header(data: bytes, segment: str, offset: int) -> tuple[Header, Place] | None:
    """The frame that `data`, read at `offset` of a segment, begins with; None when it is no whole header."""
    if len(data) < _PREFIX.itemsize:
        return None
    magic, size, body, check = np.frombuffer(data, _PREFIX, 1)[0].tolist()
    header = data[_PREFIX.itemsize :][:size]
    if magic != _MAGIC or len(header) < size or xxhash.xxh3_64_intdigest(header) != check:
        return None
    header = msgspec.json.decode(header, type=Header)
    at = offset + _PREFIX.itemsize + size
    return header, Place(header.sample, segment, offset, at, at + body - offset)


def read_frame(fd: int, place: Place, group: int) -> Header:
    """The header of a frame that must be there, in its open segment. Raises StructureError (cause `digest`): it is not."""
    found = parse_header(os.pread(fd, place.body - place.offset, place.offset), place.segment, place.offset)
    if found is None or found[1] != place or found[0].group != group or os.fstat(fd).st_size < place.offset + place.size:
        raise damaged(f"{place.segment}, byte {place.offset}")
    return found[0]


def summary(leaf: Leaf) -> dict:
    """Scalars of a trajectory plus `oldest_version`, `sampled_by` (versions, ascending), `routes_shape` ([L, K] or None) and `length`."""
    return {**msgspec.json.decode(leaf.record), "length": leaf.length}


def decode_leaf(fd: int, place: Place, leaf: Leaf, layers: slice | Sequence[int] | None = None,
                rows: Callable[[int], Ranges] | None = None) -> tuple[Trajectory, np.ndarray | None]:
    """One trajectory, verified, and the routes [chosen rows, chosen layers, K] of it. `layers`: the MoE layers whose routes are read; `rows(T - 1)`: the rows.
    The trajectory has its routes where all of them are read. Raises StructureError (cause `digest`)."""
    where, (*sizes, routes_size) = f"{place.segment}, byte {place.offset}", leaf.sizes
    at = place.body + leaf.start
    whole = layers is None and rows is None
    first = sum(sizes) + (routes_size if whole else 0)  # one read where all of it is wanted
    data, arrays = memoryview(os.pread(fd, first, at)), {}
    if len(data) < first:
        raise damaged(where)
    for (name, dtype), size in zip(ARRAYS.items(), sizes, strict=True):
        stored, data = data[:size], data[size:]
        width = np.dtype(dtype).itemsize * leaf.length
        try:
            raw = stored if name in PLAIN else _zstd().decompress(stored, max_output_size=width)
        except zstandard.ZstdError:
            raise damaged(where) from None
        if len(raw) != width:
            raise damaged(where)
        arrays[name] = np.frombuffer(raw, dtype).copy()
    routes = None
    if routes_size:
        from miles.buffer.routes import RouteReader  # numba takes its time to import, and who reads journals needs none

        routes = RouteReader(np.frombuffer(data, np.uint8) if whole else StoredBytes(fd, at + sum(sizes), routes_size))
    record = leaf.record.encode()
    if _digest(record, list(arrays.values()), routes.header if routes else None) != leaf.digest:
        raise damaged(where)
    scalars = msgspec.json.decode(record)
    for derived in ("oldest_version", "sampled_by", "routes_shape"):
        scalars.pop(derived)
    found = None if routes is None else routes.read(layers, rows(leaf.length - 1) if rows else None)
    return Trajectory(**scalars, **arrays, routes=found if whole else None), found


def damaged(where: str) -> StructureError:
    return StructureError(f"{where}: stored bytes do not match their digest", "the digest written with them", "the group is dropped; check the file system",
                          cause="digest")


_local = threading.local()


def _zstd() -> SimpleNamespace:
    """`compress` and `decompress` of this thread: making their contexts costs more than an array of a few thousand tokens takes."""
    if not hasattr(_local, "zstd"):
        _local.zstd = SimpleNamespace(compress=zstandard.ZstdCompressor(level=1).compress, decompress=zstandard.ZstdDecompressor().decompress)
    return _local.zstd


class StoredBytes:
    """Bytes `start .. start + size` of an open file, read as they are sliced."""

    def __init__(self, fd: int, start: int, size: int):
        self._fd, self._start, self._size = fd, start, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(self._size)
        return np.frombuffer(os.pread(self._fd, max(0, end - begin), self._start + begin), np.uint8)


def _encode_leaf(t: Trajectory, start: int) -> tuple[Leaf, list]:
    arrays = [np.ascontiguousarray(getattr(t, name), dtype) for name, dtype in ARRAYS.items()]
    shape = None if t.routes is None else t.routes.shape[1:]
    record = msgspec.json.encode({**{k: getattr(t, k) for k in _SCALARS}, "oldest_version": t.oldest_version, "sampled_by": t.sampled_by, "routes_shape": shape})
    compress = _zstd().compress
    blobs = [a.view(np.uint8) if name in PLAIN else compress(a) for name, a in zip(ARRAYS, arrays, strict=True)]
    header = None
    if t.routes is not None:
        from miles.buffer.routes import RouteReader, encode_routes

        routes = encode_routes(t.routes)
        header = RouteReader(routes).header
        blobs.append(routes)
    else:
        blobs.append(b"")
    return Leaf(record.decode(), _digest(record, arrays, header), len(t.tokens), start, [len(b) for b in blobs]), blobs


def _digest(record: bytes, arrays: list[np.ndarray], routes_header: bytes | None) -> str:
    h = xxhash.xxh3_128(record)
    for a in arrays:
        h.update(f"{a.dtype.str}{a.shape}".encode())
        h.update(a)
    if routes_header is not None:
        h.update(routes_header)
    return h.hexdigest()
