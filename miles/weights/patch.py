"""The patch file: what turns one state (name -> tensor) into the next, as differences of the elements that changed.

    "MILESPT1"
    payloads of the blocks, one after the other
    index     msgpack of `_Index`: per tensor its name, shape, dtype, digests of base and result, and its blocks
    footer    u64 bytes of the index (little endian), 16 bytes xxh3-128 of the index, "MILESPT1"

A tensor is cut into blocks of 4 MiB of its bytes (`digest.BLOCK_BYTES`). A block is one of

    same      no payload
    sparse    the streams: gap symbols (one byte plane, or two: low then high bytes), signs (one bit per change, lowest first), and per byte
              of the largest magnitude one plane of the magnitudes minus one, lowest first; none when every change is of 1. See `kernels.find`
    dense     one plane per byte of the element, lowest first, of the new bit patterns: where that is smaller, or there is no base

Each stream is a zstd frame of level 1, or raw where that is not smaller (its stored size then equals its raw size). A block's record holds the
xxh3-128 of its payload and of its result, so blocks are encoded, written, read, applied and verified independently, in threads. The digest of the
index vouches for all of it; WeightStore keeps it in the manifest.

A sparse block holds differences against a stated base, not new values: for a step of training that is one bit instead of a dozen. It is still
idempotent: a block whose bits do not become the recorded result is put back, exactly, and left alone if it was the result already. A wrong
base, a damaged file or a second application therefore never leave anything but the old state or the new one.

The same holds for any element of 1, 2, 4 or 8 bytes: bit patterns are compared, so -0.0 and NaN payloads survive.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
import zstandard

from miles.core import StructureError
from miles.weights.digest import BLOCK_BYTES, blocks, digest, join
from miles.weights.kernels import Changes, Scratch, find, scatter, span
from miles.weights.parallel import each, in_order

State = dict[str, torch.Tensor]
"""Hugging Face name -> CPU tensor."""
Tensors = Iterable[tuple[str, torch.Tensor]]
"""The same one after the other, as a trainer gathers them."""

_MAGIC = b"MILESPT1"
_FOOTER = 8 + 16 + len(_MAGIC)
_LEVEL = zstandard.ZstdCompressionParameters.from_level(1, hash_log=8)
"""Level 1 with a small table of matches: gaps have none but by chance, and those cost more than they save (6 % of bytes and 3x the time at 30 %)."""


class _Block(msgspec.Struct, array_like=True, frozen=True):
    kind: Literal["same", "sparse", "dense"]
    digest: bytes  # of the result
    payload: bytes = b""  # digest of the stored streams
    changes: int = 0
    symbols: int = 0  # gap symbols
    symbol_bytes: int = 1
    streams: list[int] = []  # stored sizes


class _Tensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    shape: list[int]
    dtype: str
    base: str  # digest of what the differences are against; empty: the tensor is whole
    digest: str
    blocks: list[_Block]

    @property
    def stored(self) -> int:
        """Bytes of its payloads."""
        return sum(sum(b.streams) for b in self.blocks)


class _Index(msgspec.Struct, array_like=True, frozen=True):
    block_bytes: int
    tensors: list[_Tensor]


class _Local(threading.local):
    """Per thread: buffers and zstd contexts, which are not for sharing."""

    def __init__(self):
        self.scratch = Scratch(BLOCK_BYTES)
        self.compress = zstandard.ZstdCompressor(compression_params=_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_local = _Local()


# -- writing -----------------------------------------------------------------------------------------------------------------
class _Head(NamedTuple):
    """A tensor whose blocks follow."""

    name: str
    shape: list[int]
    dtype: str
    base: str  # as in `_Tensor`


class Encoded(NamedTuple):
    """A block of a patch, as `encode_patch` makes it for `write_patch`. Of a tensor without elements there is a head and no block."""

    head: _Head | None  # of the tensor that begins with this block
    block: _Block | None
    streams: list[bytes]

    @property
    def size(self) -> int:
        """Bytes that it adds to the file, and holds until they are there."""
        return sum(map(len, self.streams))


@dataclass(frozen=True)
class Written:
    size: int  # bytes of the file
    digest: str  # of the index: of everything
    tensors: dict[str, dict[str, Any]]  # as in a manifest: name -> shape, dtype, digest


def encode_patch(new: Tensors, old: State, base_digests: dict[str, str] | None = None, *, advance: bool = False) -> Iterator[Encoded]:
    """The patch from `old` to `new`, block by block: all that needs the two states. A tensor that `old` lacks, or has in another shape or dtype, goes whole.
    `new` may be a generator: a tensor of it is let go of when it is encoded.

    base_digests: `digest` of each of `old`'s tensors, where they are known; otherwise they are taken here. advance: make `old` the new state, block by
    block, while each is in the cache; `old` must own its memory, and is of no use when this raises or is not exhausted.
    """
    named: set[str] = set()

    def jobs() -> Iterator[tuple[_Head | None, np.ndarray | None, np.ndarray | None, bool]]:
        for name, tensor in new:
            named.add(name)
            base = old.get(name)
            if base is not None and (base.shape != tensor.shape or base.dtype != tensor.dtype):
                base = None
            stated = "" if base is None else base_digests[name] if base_digests else digest(base)
            head = _Head(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), stated)
            if advance and base is None:
                old[name] = tensor
            parts = blocks(tensor) or [None]
            held = (blocks(base) if base is not None else []) or [None] * len(parts)
            yield from ((head if i == 0 else None, *pair, advance) for i, pair in enumerate(zip(parts, held, strict=True)))

    yield from in_order(_encode, jobs(), lambda head, block, *_: 0 if block is None else block.nbytes)
    if advance:
        for gone in old.keys() - named:
            del old[gone]


def write_patch(out: BinaryIO, encoded: Iterable[Encoded]) -> Written:
    """Write what `encode_patch` makes. Looks at neither state, so that they may change meanwhile."""
    out.write(_MAGIC)
    size = len(_MAGIC)
    heads: list[tuple[_Head, list[_Block]]] = []
    for head, block, streams in encoded:
        if head is not None:
            heads.append((head, []))
        if block is not None:
            heads[-1][1].append(block)
        for stream in streams:
            out.write(stream)
            size += len(stream)
    tensors = [_Tensor(*head, join([b.digest for b in mine]), mine) for head, mine in heads]
    index = msgspec.msgpack.encode(_Index(BLOCK_BYTES, tensors))
    mark = xxhash.xxh3_128_digest(index)
    out.write(index + len(index).to_bytes(8, "little") + mark + _MAGIC)
    return Written(size + len(index) + _FOOTER, mark.hex(), {t.name: {"shape": t.shape, "dtype": t.dtype, "digest": t.digest} for t in tensors})


def _encode(head: _Head | None, new: np.ndarray | None, old: np.ndarray | None, advance: bool) -> Encoded:
    if new is None:
        return Encoded(head, None, [])
    if old is None:
        return Encoded(head, *_dense(new, _planes(new), xxhash.xxh3_128_digest(new)))
    return Encoded(head, *_encode_changes(new, old, advance))


def _encode_changes(new: np.ndarray, old: np.ndarray, advance: bool) -> tuple[_Block, list[bytes]]:
    (symbols, signs, magnitudes), result = find(new, old, _local.scratch, advance=advance)
    if not len(symbols):
        return _Block("same", result), []
    streams = [_pack(p) for p in _byte_planes(symbols)] + [_pack(signs)]
    if magnitudes is not None:
        streams += [_pack(p) for p in _byte_planes(magnitudes)[:(int(magnitudes.max()).bit_length() + 7) // 8]]
    if 2 * sum(map(len, streams)) > new.nbytes:  # else planes of new values cannot be expected to be smaller
        planes = _planes(new)
        if sum(map(len, planes)) < sum(map(len, streams)):
            return _dense(new, planes, result)
    return _Block("sparse", result, _digest(streams), span(symbols)[0], len(symbols), symbols.itemsize, [len(s) for s in streams]), streams


def _dense(new: np.ndarray, streams: list[bytes], result: bytes) -> tuple[_Block, list[bytes]]:
    return _Block("dense", result, _digest(streams), streams=[len(s) for s in streams]), streams


def _planes(block: np.ndarray) -> list[bytes]:
    return [_pack(p) for p in _byte_planes(block)]


def _byte_planes(values: np.ndarray) -> list[np.ndarray]:
    """Byte 0 of all values, byte 1 of all values ..."""
    by_byte = values.view(np.uint8).reshape(len(values), values.itemsize)
    return [np.ascontiguousarray(by_byte[:, i]) for i in range(values.itemsize)]


def _pack(plane: np.ndarray) -> bytes:
    packed = _local.compress(plane)
    return packed if len(packed) < plane.nbytes else plane.tobytes()


def _digest(streams: Iterable[bytes]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(streams))


# -- reading -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Step:
    """One block to bring to its recorded result. `view` is the memory to change: the base's own, or that of a new tensor."""

    view: np.ndarray
    block: _Block
    offset: int  # of its payload in the file
    undoable: bool  # the view is the base's own memory


class Patch:
    """An opened patch file. `apply` moves a state forward, `undo` moves it back."""

    def __init__(self, path: Path, size: int | None = None, digest: str | None = None):
        """Reads the index. size, digest: what the file must be, where that is known. Raises StructureError for any other file."""
        self.path = path
        self._undo: list[tuple[_Step, bytes]] = []  # in-place changes and their payloads
        try:
            with open(path, "rb") as f:
                found = os.fstat(f.fileno()).st_size
                if found < len(_MAGIC) + _FOOTER or (size is not None and found != size):
                    raise self._damaged(f"it has {found} bytes")
                magic = f.read(len(_MAGIC))
                f.seek(found - _FOOTER)
                footer = f.read(_FOOTER)
                end = found - _FOOTER - int.from_bytes(footer[:8], "little")  # of the payloads
                if magic != _MAGIC or footer[24:] != _MAGIC or end < len(_MAGIC):
                    raise self._damaged("its marks are wrong")
                f.seek(end)
                raw = f.read(found - _FOOTER - end)
            if xxhash.xxh3_128_digest(raw) != footer[8:24] or (digest is not None and footer[8:24].hex() != digest):
                raise self._damaged("its index has another digest")
            self._tensors = self._checked(msgspec.msgpack.decode(raw, type=_Index), end)
        except (OSError, msgspec.MsgspecError) as e:
            raise self._damaged(str(e)) from e

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor of the result."""
        return {t.name: tuple(t.shape) for t in self._tensors}

    def check(self) -> None:
        """Read all of it. Raises StructureError (cause patch-file) unless it is, to the byte, what was written."""
        try:
            with open(self.path, "rb") as f:
                f.seek(len(_MAGIC))
                for block in (b for t in self._tensors for b in t.blocks if b.kind != "same"):
                    at = f.tell()
                    if xxhash.xxh3_128_digest(f.read(sum(block.streams))) != block.payload:
                        raise self._damaged(f"the block at byte {at} has another digest")
        except OSError as e:
            raise self._damaged(str(e)) from e

    def apply(self, base: State, base_digests: dict[str, str] | None = None, without: Container[str] = ()) -> tuple[State, set[str]]:
        """The new state and the names of the tensors that changed. Tensors without dense blocks are changed in place: they are the same
        objects in both states. `base` must own its memory; tensors that share it are told apart here.

        base_digests: digests of `base` that are known (from the manifest it was verified by); they must be the stated ones. without: tensors that the reader
        has not got, and the new state has not either.
        Raises StructureError (cause patch-base | patch-file | patch-digest), with every tensor of `base` as it was.
        """
        steps: list[_Step] = []
        state, seen, offset = {}, set(), len(_MAGIC)
        for t in self._tensors:
            if t.name in without:
                offset += t.stored
                continue
            out, own = self._target(t, base, base_digests, seen)
            state[t.name] = out
            for view, block in zip(blocks(out), t.blocks, strict=True):
                steps.append(_Step(view, block, offset, own))
                offset += sum(block.streams)
        try:
            with open(self.path, "rb") as f:
                each(self._run, [(f.fileno(), s) for s in steps])
        except BaseException as e:
            self.undo()
            if isinstance(e, (OSError, zstandard.ZstdError)):
                raise self._damaged(str(e)) from e
            raise
        return state, {t.name for t in self._tensors if t.name in state and (not t.base or any(b.kind != "same" for b in t.blocks))}

    def rehearse(self, base: State, without: Container[str] = ()) -> Callable[[], None] | None:
        """Verify, block by block, that `apply` would make the result of `base`, which is only read. Returns what makes it so, and no longer looks at the file;
        None where blocks are dense, for whose result there is no room aside. Raises like `apply`. For a `base` that nobody changes meanwhile: where somebody
        has, what is returned raises StructureError (cause patch-digest) and leaves a mixture."""
        steps, offset = [], len(_MAGIC)
        for t in self._tensors:
            if t.name in without:
                offset += t.stored
                continue
            out, own = self._target(t, base, None, set())
            if not own:
                return None
            for view, block in zip(blocks(out), t.blocks, strict=True):
                steps.append(_Step(view, block, offset, own))
                offset += sum(block.streams)
        try:
            with open(self.path, "rb") as f:
                changes = [c for c in each(self._rehearse, [(f.fileno(), s) for s in steps]) if c is not None]
        except (OSError, zstandard.ZstdError) as e:
            raise self._damaged(str(e)) from e
        return lambda: each(self._make, changes)

    def _rehearse(self, fd: int, step: _Step) -> tuple[_Step, Changes] | None:
        """What `_make` is to do to a block, if anything."""
        if step.block.kind == "same":
            self._run(fd, step)
            return None
        changes = self._changes(step, self._payload(fd, step))
        if scatter(step.view, changes, aside=True) == step.block.digest:
            return step, changes
        if xxhash.xxh3_128_digest(step.view) == step.block.digest:
            return None  # it is there already
        raise self._another(step.block)

    def _make(self, step: _Step, changes: Changes) -> None:
        if scatter(step.view, changes) != step.block.digest:
            raise self._another(step.block)

    def undo(self) -> None:
        """Take back what `apply` changed in place: the state it was given is what it was."""
        for step, payload in self._undo:
            scatter(step.view, self._changes(step, payload), undo=True)
        self._undo = []

    def _target(self, t: _Tensor, base: State, base_digests: dict[str, str] | None, seen: set[int]) -> tuple[torch.Tensor, bool]:
        """The tensor to change, and whether it is the base's own."""
        if not t.base:
            return torch.empty(t.shape, dtype=getattr(torch, t.dtype)), False
        tensor = base.get(t.name)
        if tensor is None or list(tensor.shape) != t.shape or str(tensor.dtype) != f"torch.{t.dtype}":
            found = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise StructureError(f"{self.path} changes {t.name}, of which the reader has {found}", f"its base: {t.shape} {t.dtype} with digest {t.base}",
                                 "the reader starts again from the last keyframe", cause="patch-base")
        if base_digests is not None and base_digests.get(t.name) != t.base:
            raise StructureError(f"{self.path} changes {t.name}, of which the reader has digest {base_digests.get(t.name)}", f"its base {t.base}",
                                 "the reader starts again from the last keyframe", cause="patch-base")
        own = tensor.is_contiguous() and tensor.data_ptr() not in seen and all(b.kind != "dense" for b in t.blocks)
        if tensor.numel():
            seen.add(tensor.data_ptr())
        return tensor.detach() if own else tensor.detach().clone(memory_format=torch.contiguous_format), own

    def _run(self, fd: int, step: _Step) -> bool:
        """Whether the block was changed."""
        block, view, payload = step.block, step.view, self._payload(fd, step)
        if block.kind == "sparse":
            changes = self._changes(step, payload)
            if scatter(view, changes) == block.digest:
                if step.undoable:
                    self._undo.append((step, payload))
                return True
            if scatter(view, changes, undo=True) == block.digest:
                return False  # it was there already
            raise self._another(block)
        if block.kind == "dense":
            by_byte, at = view.view(np.uint8).reshape(len(view), view.itemsize), 0
            for i, stored in enumerate(block.streams):
                by_byte[:, i] = self._unpack(payload[at:at + stored], len(view))
                at += stored
        if xxhash.xxh3_128_digest(view) != block.digest:
            raise self._another(block)
        return block.kind == "dense"

    def _payload(self, fd: int, step: _Step) -> bytes:
        if step.block.kind == "same":
            return b""
        payload = os.pread(fd, sum(step.block.streams), step.offset)
        if xxhash.xxh3_128_digest(payload) != step.block.payload:
            raise self._damaged(f"the block at byte {step.offset} has another digest")
        return payload

    def _another(self, block: _Block) -> StructureError:
        return StructureError(f"{self.path}: a block does not become what the trainer had", f"digest {block.digest.hex()}",
                              "the reader starts again from the last keyframe", cause="patch-digest")

    def _changes(self, step: _Step, payload: bytes) -> Changes:
        """Those of a sparse block, proven to stay inside it."""
        block, length = step.block, len(step.view)
        if not 0 < block.changes <= block.symbols <= 2 * length:
            raise self._damaged(f"{block.changes} changes in {block.symbols} symbols do not fit a block of {length}")
        sizes = [block.symbols] * block.symbol_bytes + [-(-block.changes // 8)]
        sizes += [block.changes] * (len(block.streams) - len(sizes))
        planes, at = [], 0
        for stored, raw in zip(block.streams, sizes, strict=True):
            planes.append(self._unpack(payload[at:at + stored], raw))
            at += stored
        symbols = _from_planes(planes[:block.symbol_bytes], np.dtype(f"u{block.symbol_bytes}"))
        signs, *magnitudes = planes[block.symbol_bytes:]
        changes, end = span(symbols)
        if changes != block.changes or end > length:
            raise self._damaged(f"positions outside a block of {length} elements")
        return Changes(symbols, signs, _from_planes(magnitudes, step.view.dtype) if magnitudes else None)

    def _unpack(self, stored: bytes, raw: int) -> np.ndarray:
        if len(stored) == raw:
            return np.frombuffer(stored, np.uint8)
        if zstandard.frame_content_size(stored) != raw:  # before it is given memory
            raise self._damaged(f"a stream does not hold {raw} bytes")
        return np.frombuffer(_local.decompress(stored), np.uint8)

    def _checked(self, index: _Index, end: int) -> list[_Tensor]:
        """The index's tensors if they describe the payloads up to byte `end`; a file of another writer is refused here, before any tensor is touched."""
        offset = len(_MAGIC)
        for t in index.tensors:
            dtype = getattr(torch, t.dtype, None)
            if not isinstance(dtype, torch.dtype) or min(t.shape, default=0) < 0:
                raise self._damaged(f"{t.name} is a {t.dtype} of {t.shape}")
            if index.block_bytes != BLOCK_BYTES or len(t.blocks) != -(-math.prod(t.shape) * dtype.itemsize // BLOCK_BYTES):
                raise self._damaged(f"{t.name} has {len(t.blocks)} blocks of {index.block_bytes} bytes")
            for b in t.blocks:
                least, most = {"same": (0, 0), "dense": (dtype.itemsize,) * 2, "sparse": (b.symbol_bytes + 1, b.symbol_bytes + 1 + dtype.itemsize)}[b.kind]
                if not least <= len(b.streams) <= most or min(b.streams, default=0) < 0 or b.symbol_bytes not in (1, 2) or (b.kind != "dense" and not t.base):
                    raise self._damaged(f"{t.name} has a {b.kind} block of {len(b.streams)} streams")
            offset += t.stored
        if offset != end or len({t.name for t in index.tensors}) != len(index.tensors):
            raise self._damaged("its blocks do not fill it, or two tensors share a name")
        return index.tensors

    def _damaged(self, why: str) -> StructureError:
        return StructureError(f"{self.path} does not match its manifest, or is not a whole patch: {why}", "the file as it was published",
                              "the version is skipped; the next keyframe repairs it", cause="patch-file")


def _from_planes(planes: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Inverse of `_byte_planes`; planes that are missing are zero."""
    if len(planes) == dtype.itemsize == 1:
        return planes[0]
    by_byte = np.zeros((len(planes[0]), dtype.itemsize), np.uint8)
    for i, plane in enumerate(planes):
        by_byte[:, i] = plane
    return by_byte.view(dtype)[:, 0]
