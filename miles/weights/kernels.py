"""Loops of the patch codec that NumPy cannot run near memory speed, compiled by numba, each beside its definition in plain NumPy.

    find     where two blocks differ: gaps between changed positions, signs and magnitudes of the differences of their bit patterns
    scatter  the inverse: add (or take back) the differences at their positions

A difference is taken modulo 2^bits of the element, split into a sign and a magnitude in 1 .. 2^(bits-1), of which magnitude - 1 is kept. So it
always inverts exactly, whatever the elements mean; one step of a float's last place is magnitude 1. The kernels release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miles.core.compiled import compiled

ESCAPE = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}
"""A gap symbol of this value means: go on by that much, no change here yet."""

PIECE_BYTES = 1 << 20
"""Worked on, and hashed, before the next is touched: it is in a cache then. Smaller pieces cost more in calls than they gain (measured)."""


# Indices are unsigned: numba tests signed ones for counting from the end. Numba makes a float of a signed and an unsigned integer, so none are mixed.
_0, _1, _3, _7 = (np.uint64(i) for i in (0, 1, 3, 7))


@compiled
def _find(new, old, new_words, old_words, lanes, start, hits, positions, differences, count):
    """From element `start` on, of arrays that begin there: append positions of the elements that differ, and new - old, to the `count` found before.

    First the words that differ, of as many as fit the innermost cache, then their elements. No branch depends on the data: with a change in a
    hundred elements every one of them would be mispredicted.
    """
    words, room = np.uint64(len(new_words)), np.uint64(len(hits)) - _1
    begin = _0
    while begin < words:
        end = min(begin + room, words)
        found = _0
        for word in range(begin, end):
            hits[found] = word
            found += np.uint64(new_words[word] != old_words[word])
        begin = end
        before = count
        for i in range(found):
            first = np.uint64(hits[i]) * lanes
            for at in range(first, first + lanes):
                positions[count] = start + at
                count += np.uint64(new[at] != old[at])
        for i in range(before, count):
            at = np.uint64(positions[i]) - start
            differences[i] = np.uint64(new[at]) - np.uint64(old[at])
    for at in range(words * lanes, np.uint64(len(new))):
        positions[count] = start + at
        differences[count] = np.uint64(new[at]) - np.uint64(old[at])
        count += np.uint64(new[at] != old[at])
    return count


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
def _scatter(block, symbols, escape, signs, magnitudes, flip, i, at, count, stop):
    """Apply symbols from number `i` on, at element `at`, of change `count`, up to element `stop`. Returns where to go on."""
    size, ones = np.uint64(len(symbols)), len(magnitudes) == 0
    while i < size:
        symbol = np.uint64(symbols[i])
        if at + symbol >= stop:
            break
        at += symbol
        i += _1
        if symbol == escape:
            continue
        down = ((np.uint64(signs[count >> _3]) >> (count & _7)) & _1) ^ flip
        amount = _1 if ones else np.uint64(magnitudes[count]) + _1
        block[at] = np.uint64(block[at]) + ((amount ^ (_0 - down)) + down)  # signs are coin flips: no branch
        at += _1
        count += _1
    return i, at, count


class Scratch:
    """Buffers of one thread, large enough for blocks of `size` bytes; results of `find` are views into them until its next call."""

    def __init__(self, size: int):
        self.positions, self.signs = np.empty(size + 1, np.uint32), np.empty(size // 8 + 1, np.uint8)
        self.symbols, self.differences = np.empty(2 * (size + size // 255 + 2), np.uint8), np.empty(size + 8, np.uint8)  # 8: the last candidate is written before it is known to be none
        self.hits = np.empty(4097, np.uint32)


def find(new: np.ndarray, old: np.ndarray, scratch: Scratch, seen: Callable[[np.ndarray], None]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(symbols, signs, magnitudes) of equal-sized blocks of unsigned integers.

    symbols: uint8 or uint16, per change the number of unchanged elements before it, preceded by an `ESCAPE` for each `escape` of them;
    uint16 where changes are more than 512 apart on average. signs: bits, lowest first, 1 = downwards. magnitudes: minus one, in the blocks'
    dtype; None where all are 0. No changes: no symbols.
    seen: called with `new` piece by piece while it is in the cache, for a digest.
    """
    new, old = (x if x.ctypes.data % 8 == 0 else x.copy() for x in (new, old))
    width, count = new.dtype.itemsize, _0
    differences = scratch.differences[:new.nbytes + width].view(new.dtype)
    for start in range(0, len(new), PIECE_BYTES // width):
        a, b = new[start:start + PIECE_BYTES // width], old[start:start + PIECE_BYTES // width]
        whole = a.nbytes // 8 * 8 // width
        words = a[:whole].view(np.uint64), b[:whole].view(np.uint64)
        count = np.uint64(_find(a, b, *words, np.uint64(8 // width), np.uint64(start), scratch.hits, scratch.positions, differences, count))
        seen(a)
    count = int(count)
    symbols = scratch.symbols if count * 512 >= len(new) else scratch.symbols.view(np.uint16)
    signs, differences = scratch.signs[:(count + 7) // 8], differences[:count]
    if not count:
        return symbols[:0], signs, None
    highest = _split(differences, np.uint64(8 * width - 1), signs)
    size = _gaps(scratch.positions[:count], np.uint64(ESCAPE[symbols.dtype]), symbols)
    return symbols[:size], signs, differences if highest else None


def scatter(block: np.ndarray, symbols: np.ndarray, signs: np.ndarray, magnitudes: np.ndarray | None, *, undo: bool = False,
            seen: Callable[[np.ndarray], None] | None = None) -> None:
    """Add the differences to `block` in place, or take them back. What `find` returned for equal shapes; the caller has checked the ranges.

    seen: called with the result piece by piece while it is in the cache, for a digest.
    """
    escape, flip, size = np.uint64(ESCAPE[symbols.dtype]), np.uint64(undo), PIECE_BYTES // block.itemsize
    amounts = block[:0] if magnitudes is None else magnitudes
    i, at, count = _0, _0, _0
    for start in range(0, len(block), size):
        stop = np.uint64(min(start + size, len(block)))
        i, at, count = map(np.uint64, _scatter(block, symbols, escape, signs, amounts, flip, i, at, count, stop))
        if seen is not None:
            seen(block[start:start + size])


def find_numpy(new: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Definition of `find`."""
    at = np.flatnonzero(new != old)
    gaps = np.diff(at, prepend=-1) - 1
    dtype = np.dtype(np.uint8 if len(at) * 512 >= len(new) else np.uint16)
    runs = gaps // ESCAPE[dtype]
    symbols = np.full(len(gaps) + runs.sum(), ESCAPE[dtype], dtype)
    symbols[np.cumsum(runs + 1) - 1] = gaps % ESCAPE[dtype]
    difference = new[at] - old[at]
    negative = difference >> (8 * new.dtype.itemsize - 1) != 0
    magnitudes = np.where(negative, -difference, difference) - np.ones(1, new.dtype)
    return symbols, np.packbits(negative, bitorder="little"), magnitudes if magnitudes.any() else None


def scatter_numpy(block: np.ndarray, symbols: np.ndarray, signs: np.ndarray, magnitudes: np.ndarray | None, *, undo: bool = False) -> None:
    """Definition of `scatter`."""
    is_change = symbols != ESCAPE[symbols.dtype]
    at = (np.cumsum(symbols, dtype=np.int64) + np.cumsum(is_change) - 1)[is_change]
    amount = np.ones(len(at), block.dtype) if magnitudes is None else magnitudes + np.ones(1, block.dtype)
    negative = np.unpackbits(signs, count=len(at), bitorder="little").astype(bool) ^ undo
    block[at] += np.where(negative, -amount, amount)
