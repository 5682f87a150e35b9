"""Loops of the patch codec, compiled by numba, beside their definition in plain NumPy. Each goes once over its block, in pieces that stay in the innermost
cache, and digests the new state on the way, so that memory is read once; each is one call without the GIL.

    find     where two blocks differ: gaps between changed positions, signs and magnitudes of the differences of their bit patterns
    scatter  the inverse: add (or take back) the differences at their positions; or only say what digest the block would have then

A difference is taken modulo 2^bits of the element, split into a sign and a magnitude in 1 .. 2^(bits-1), of which magnitude - 1 is kept. So it
always inverts exactly, whatever the elements mean; one step of a float's last place is magnitude 1.

Digests are xxh3-128 (seed 0), as the package xxhash has them. Of more than 240 bytes that is a sum that blocks of 1024 bytes change one after the other, which are the
pieces (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md); smaller ones are left to the package, and their loops to NumPy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import xxhash
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from miles.core.compiled import compiled

ESCAPE = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}
"""A gap symbol of this value means: go on by that much, no change here yet."""

SMALL = 240
"""Bytes up to which xxh3-128 is another function."""

# Indices are unsigned: numba tests signed ones for counting from the end. Numba makes a float of a signed and an unsigned integer, so none are mixed.
_0, _1, _3, _7, _64, _PIECE = (np.uint64(i) for i in (0, 1, 3, 7, 64, 1024))


# -- vectors: what LLVM makes the widest instructions of the machine from -----------------------------------------------------
_INT, _BYTE, _LANES = ir.IntType(64), ir.IntType(8), ir.VectorType(ir.IntType(64), 8)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
_PRIME32_1 = 0x9E3779B1
_PRIME64_1, _PRIME64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_SUMS = np.array([0xC2B2AE3D, _PRIME64_1, _PRIME64_2, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, _PRIME32_1], np.uint64)


def _secret(at: int) -> ir.Constant:
    return ir.Constant(_LANES, np.frombuffer(_SECRET, "<u8", 8, at).tolist())


def _alike(value: int) -> ir.Constant:
    return ir.Constant(_LANES, [value] * 8)


def _memory(context, builder, kind, array, byte, vector):
    """Pointer to a vector in an array, from that byte on."""
    start = builder.bitcast(context.make_array(kind)(context, builder, array).data, _BYTE.as_pointer())
    return builder.bitcast(builder.gep(start, [byte]), vector.as_pointer())


def _with_stripe(builder, sums, data, secret):
    """Sums after 64 bytes."""
    keyed = builder.xor(data, secret)
    product = builder.mul(builder.and_(keyed, _alike(0xFFFFFFFF)), builder.lshr(keyed, _alike(32)))
    neighbours = builder.shuffle_vector(data, data, ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6]))
    return builder.add(builder.add(sums, neighbours), product)


@intrinsic
def _digest_piece(typing, sums, array, byte):
    """Go on with the sums over 1024 bytes of an array."""
    def code(context, builder, signature, args):
        held = _memory(context, builder, signature.args[0], args[0], _INT(0), _LANES)
        now = builder.load(held, align=8)
        for i in range(16):
            at = builder.add(args[2], _INT(64 * i))
            now = _with_stripe(builder, now, builder.load(_memory(context, builder, signature.args[1], args[1], at, _LANES), align=1), _secret(8 * i))
        now = builder.xor(builder.xor(now, builder.lshr(now, _alike(47))), _secret(128))
        builder.store(builder.mul(now, _alike(_PRIME32_1)), held, align=8)
        return context.get_dummy_value()

    return types.void(sums, array, types.uint64), code


@intrinsic
def _digest_stripe(typing, sums, array, byte, secret):
    """Go on with the sums over 64 bytes of an array, with the secret from byte `secret` on."""
    table = ir.Constant(ir.ArrayType(_BYTE, len(_SECRET)), bytearray(_SECRET))

    def code(context, builder, signature, args):
        whole = cgutils.global_constant(builder, "xxh3_secret", table)
        part = builder.bitcast(builder.gep(whole, [_INT(0), args[3]]), _LANES.as_pointer())
        held = _memory(context, builder, signature.args[0], args[0], _INT(0), _LANES)
        data = builder.load(_memory(context, builder, signature.args[1], args[1], args[2], _LANES), align=1)
        builder.store(_with_stripe(builder, builder.load(held, align=8), data, builder.load(part, align=1)), held, align=8)
        return context.get_dummy_value()

    return types.void(sums, array, types.uint64, types.uint64), code


@intrinsic
def _folded(typing, a, b):
    """Both halves of a product of 128 bits, XORed."""
    def code(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(x, wide) for x in args))
        return builder.xor(builder.trunc(product, _INT), builder.trunc(builder.lshr(product, wide(64)), _INT))

    return types.uint64(types.uint64, types.uint64), code


@intrinsic
def _differing(typing, new, old, at):
    """Which of 64 elements differ, a bit each, lowest first."""
    def code(context, builder, signature, args):
        vector = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), 64)
        byte = builder.mul(args[2], _INT(signature.args[0].dtype.bitwidth // 8))
        a, b = (builder.load(_memory(context, builder, signature.args[i], args[i], byte, vector), align=1) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), _INT)

    return types.uint64(new, old, types.uint64), code


@intrinsic
def _lowest(typing, bits):
    """Number of the lowest bit that is set; 64 if none is."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.cttz(args[0], ir.IntType(1)(0))


@intrinsic
def _ones(typing, bits):
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


_LOW, _HIGH = (np.frombuffer(_SECRET, "<u8", 8, at).astype(np.uint64) for at in (11, 117))


@compiled
def _merged(sums, secret, value):
    for i in range(4):
        value += _folded(sums[2 * i] ^ secret[2 * i], sums[2 * i + 1] ^ secret[2 * i + 1])
    value ^= value >> np.uint64(37)
    value *= np.uint64(0x165667919E3779F9)
    return value ^ (value >> np.uint64(32))


@compiled
def _digest_end(sums, array, at, size):
    """Both halves of the digest of `size` bytes, the last 1 to 1024 of which are still to come, and lie in the array from byte `at` on."""
    rest = (size - _1) % _PIECE + _1
    for i in range((rest - _1) // _64):
        _digest_stripe(sums, array, at + np.uint64(i) * _64, np.uint64(8 * i))
    _digest_stripe(sums, array, at + rest - _64, np.uint64(121))
    return _merged(sums, _HIGH, ~(size * _PRIME64_2)), _merged(sums, _LOW, size * _PRIME64_1)


# -- loops --------------------------------------------------------------------------------------------------------------------
@compiled
def _find(new, old, advance, positions, differences):
    """Positions of the elements that differ, and new - old: how many there are, and the digest of `new`. advance: make `old` the same.

    No branch depends on the data but where more than four of 64 elements differ: with a change in a hundred elements every one would be mispredicted.
    """
    width, length = np.uint64(new.itemsize), np.uint64(len(new))
    step, size = _PIECE // width, width * length
    sums, masks, count = _SUMS.copy(), np.empty(16, np.uint64), _0
    for start in range(_0, length, step):
        end = min(start + step, length)
        before, groups = count, (end - start) // _64
        for i in range(groups):
            masks[i] = _differing(new, old, start + np.uint64(i) * _64)
        for i in range(groups):
            mask, first, to = masks[i], start + np.uint64(i) * _64, count
            count += _ones(mask)
            for _ in range(4):  # what is too many is written over
                positions[to] = first + _lowest(mask)
                mask &= mask - _1
                to += _1
            while mask:
                positions[to] = first + _lowest(mask)
                mask &= mask - _1
                to += _1
        for at in range(start + groups * _64, end):
            positions[count] = at
            count += np.uint64(new[at] != old[at])
        for i in range(before, count):
            at = np.uint64(positions[i])
            differences[i] = np.uint64(new[at]) - np.uint64(old[at])
        if advance:
            for i in range(before, count):
                at = np.uint64(positions[i])
                old[at] = new[at]
        if end < length:
            _digest_piece(sums, new, start * width)
    return count, _digest_end(sums, new, (size - _1) // _PIECE * _PIECE, size)


@compiled
def _split(differences, shift, signs):
    """Differences to magnitudes - 1 in place, signs as bits. Returns the OR of the former."""
    highest = differences[0] ^ differences[0]
    for i in range(len(signs)):
        byte = np.uint64(0)
        for k in range(8 * i, min(8 * i + 8, len(differences))):
            byte |= (np.uint64(differences[k]) >> shift) << np.uint64(k & 7)
        signs[i] = byte
    for i in range(len(differences)):
        value = differences[i]
        value = ~value if np.uint64(value) >> shift else value - np.uint64(1)
        differences[i] = value
        highest |= differences[i]
    return highest


@compiled
def _gaps(positions, escape, out):
    size, after = _0, _0
    for at in positions:
        gap = np.uint64(at) - after
        after = np.uint64(at) + _1
        while gap >= escape:
            out[size] = escape
            size += _1
            gap -= escape
        out[size] = gap
        size += _1
    return size


@compiled
def _find_split(new, old, advance, positions, differences, signs, symbols, symbols_16):
    """`find` in one call: how many changes, how many gap symbols, whether magnitudes are needed, and the digest of `new`."""
    count, halves = _find(new, old, advance, positions, differences)
    if not count:
        return count, _0, False, halves
    highest = _split(differences[:count], np.uint64(8 * new.itemsize - 1), signs[:(count + _7) >> _3])
    if count * np.uint64(512) >= np.uint64(len(new)):
        size = _gaps(positions[:count], np.uint64(255), symbols)
    else:
        size = _gaps(positions[:count], np.uint64(65535), symbols_16)
    return count, size, highest != 0, halves


@compiled
def _span(symbols, escape):
    count, end = _0, _0
    for i in range(len(symbols)):
        count += np.uint64(symbols[i] != escape)
        end += np.uint64(symbols[i])
    return count, end + count


@compiled
def _scatter(block, symbols, escape, signs, magnitudes, flip, aside):
    """Make the changes, piece by piece, and return the digest of the result. aside: None, or where they are made in a copy of each piece, behind the last 64
    bytes of the piece before, which the end of the digest may need. (Numba compiles both cases apart.)"""
    width, length = np.uint64(block.itemsize), np.uint64(len(block))
    step, before, size = _PIECE // width, _64 // width, width * length
    sums, ones, out = _SUMS.copy(), len(magnitudes) == 0, block
    i, at, count, shift = _0, _0, _0, _0  # shift: from a position in the block to that in `out`
    if aside is not None:
        out = aside
    for start in range(_0, length, step):
        end = min(start + step, length)
        if aside is not None:
            shift = start - before
            for k in range(before):
                aside[k] = aside[step + k]
            for k in range(start, end):
                aside[k - shift] = block[k]
        while i < np.uint64(len(symbols)):
            symbol = np.uint64(symbols[i])
            if at + symbol >= end:
                break
            at += symbol
            i += _1
            if symbol == escape:
                continue
            down = ((np.uint64(signs[count >> _3]) >> (count & _7)) & _1) ^ flip
            amount = _1 if ones else np.uint64(magnitudes[count]) + _1
            out[at - shift] = np.uint64(out[at - shift]) + ((amount ^ (_0 - down)) + down)  # signs are coin flips: no branch
            at += _1
            count += _1
        if end < length:
            _digest_piece(sums, out, (start - shift) * width)
    return _digest_end(sums, out, (size - _1) // _PIECE * _PIECE - shift * width, size)


class Scratch:
    """Buffers of one thread, large enough for blocks of `size` bytes; results of `find` are views into them until its next call."""

    def __init__(self, size: int):
        self.positions, self.signs = np.empty(size + 4, np.uint32), np.empty(size // 8 + 1, np.uint8)  # 4: see `_find`
        self.symbols, self.differences = np.empty(2 * (size + size // 255 + 2), np.uint8), np.empty(size, np.uint8)


class Changes(NamedTuple):
    """What leads from one block to another of the same size.

    symbols: uint8 or uint16, per change the number of unchanged elements before it, preceded by an `ESCAPE` for each `escape` of them;
    uint16 where changes are more than 512 apart on average. signs: bits, lowest first, 1 = downwards. magnitudes: minus one, in the blocks'
    dtype; None where all are 0. No changes: no symbols.
    """

    symbols: np.ndarray
    signs: np.ndarray
    magnitudes: np.ndarray | None


def find(new: np.ndarray, old: np.ndarray, scratch: Scratch, *, advance: bool = False) -> tuple[Changes, bytes]:
    """The changes from `old` to `new`, blocks of unsigned integers, and the digest of `new`. advance: make `old` the same as `new`."""
    if new.nbytes <= SMALL:
        changes = find_numpy(new, old)
        if advance:
            old[:] = new
        return changes, xxhash.xxh3_128_digest(new)
    differences, symbols_16 = scratch.differences.view(new.dtype), scratch.symbols.view(np.uint16)
    count, size, more, halves = _find_split(new, old, advance, scratch.positions, differences, scratch.signs, scratch.symbols, symbols_16)
    symbols = scratch.symbols if count * 512 >= len(new) else symbols_16
    return Changes(symbols[:size], scratch.signs[:(count + 7) // 8], differences[:count] if more else None), _bytes(halves)


def span(symbols: np.ndarray) -> tuple[int, int]:
    """How many changes the symbols are of, and how many elements of a block they reach over; symbols that end with an escape are of no changes."""
    escape = ESCAPE[symbols.dtype]
    return _span(symbols, escape) if len(symbols) and symbols[-1] != escape else (0, 0)


def scatter(block: np.ndarray, changes: Changes, *, undo: bool = False, aside: bool = False) -> bytes:
    """Make the changes in the block, or take them back, and return the digest of the result. aside: change nothing, return what it would be. The caller has
    checked that they stay inside the block."""
    if block.nbytes <= SMALL:
        out = block.copy() if aside else block
        scatter_numpy(out, changes, undo=undo)
        return xxhash.xxh3_128_digest(out)
    symbols, signs, magnitudes = changes
    amounts = block[:0] if magnitudes is None else magnitudes
    copy = np.empty((1024 + 64) // block.itemsize, block.dtype) if aside else None
    return _bytes(_scatter(block, symbols, np.uint64(ESCAPE[symbols.dtype]), signs, amounts, np.uint64(undo), copy))


def _bytes(halves: tuple[int, int]) -> bytes:
    return b"".join(h.to_bytes(8, "big") for h in halves)


def find_numpy(new: np.ndarray, old: np.ndarray) -> Changes:
    """Definition of `find`'s changes."""
    at = np.flatnonzero(new != old)
    gaps = np.diff(at, prepend=-1) - 1
    dtype = np.dtype(np.uint8 if len(at) * 512 >= len(new) else np.uint16)
    runs = gaps // ESCAPE[dtype]
    symbols = np.full(len(gaps) + runs.sum(), ESCAPE[dtype], dtype)
    symbols[np.cumsum(runs + 1) - 1] = gaps % ESCAPE[dtype]
    difference = new[at] - old[at]
    negative = difference >> (8 * new.dtype.itemsize - 1) != 0
    magnitudes = np.where(negative, -difference, difference) - np.ones(1, new.dtype)
    return Changes(symbols, np.packbits(negative, bitorder="little"), magnitudes if magnitudes.any() else None)


def scatter_numpy(block: np.ndarray, changes: Changes, *, undo: bool = False) -> None:
    """Definition of `scatter`."""
    symbols, signs, magnitudes = changes
    is_change = symbols != ESCAPE[symbols.dtype]
    at = (np.cumsum(symbols, dtype=np.int64) + np.cumsum(is_change) - 1)[is_change]
    amount = np.ones(len(at), block.dtype) if magnitudes is None else magnitudes + np.ones(1, block.dtype)
    negative = np.unpackbits(signs, count=len(at), bitorder="little").astype(bool) ^ undo
    block[at] += np.where(negative, -amount, amount)
