"""Loops of the patch codec that NumPy cannot run near memory speed, compiled by numba, each beside its definition in plain NumPy.

    find     where two blocks differ: gaps between changed positions, signs and magnitudes of the differences of their bit patterns
    scatter  the inverse: add (or take back) the differences at their positions

A difference is taken modulo 2^bits of the element, split into a sign and a magnitude in 1 .. 2^(bits-1), of which magnitude - 1 is kept. So it
always inverts exactly, whatever the elements mean; one step of a float's last place is magnitude 1. The kernels release the GIL.

Compiled code is kept in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache; miles/numba), never beside the sources: an installation may
be read-only for its users, or shared. Where that folder cannot be written, each process compiles again (about two seconds).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

ESCAPE = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}
"""A gap symbol of this value means: go on by that much, no change here yet."""


def compiled(function: Callable) -> Callable:
    """`numba.njit` without the GIL, cached outside the source tree or not at all."""
    before, folder = numba.config.CACHE_DIR, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles" / "numba"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK) or folder.stat().st_uid != os.getuid():  # a cache is code: only one's own
            raise PermissionError(folder)
        numba.config.CACHE_DIR = str(folder)  # read once, when the function is wrapped
        return numba.njit(nogil=True, cache=True)(function)
    except (OSError, RuntimeError):  # RuntimeError: numba found the folder not writable
        return numba.njit(nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = before


@compiled
def _find(new, old, new_words, old_words, lanes, mask, shift, gaps, magnitudes, signs):
    count, after, highest, byte = 0, 0, np.uint64(0), np.uint8(0)
    tail = len(new_words) * lanes
    start = 0
    while start < len(new):
        stop = start + 1
        if start < tail:  # whole words are compared first: most hold no change
            word = start // lanes
            while word < len(new_words) and new_words[word] == old_words[word]:
                word += 1
            start = word * lanes
            stop = min(start + lanes, len(new))
        for at in range(start, stop):
            if new[at] == old[at]:
                continue
            difference = (np.uint64(new[at]) - np.uint64(old[at])) & mask
            negative = difference >> shift
            magnitude = ((np.uint64(0) - difference) & mask if negative else difference) - np.uint64(1)
            gaps[count] = at - after
            magnitudes[count] = magnitude
            highest |= magnitude
            byte |= np.uint8(negative) << np.uint8(count & 7)
            if count & 7 == 7:
                signs[count >> 3] = byte
                byte = np.uint8(0)
            after = at + 1
            count += 1
        start = stop
    if count & 7:
        signs[count >> 3] = byte
    return count, highest


@compiled
def _narrow(gaps, escape, out):
    size = 0
    for i in range(len(gaps)):
        gap = gaps[i]
        while gap >= escape:
            out[size] = escape
            size += 1
            gap -= escape
        out[size] = gap
        size += 1
    return size


@compiled
def _scatter(block, symbols, escape, signs, magnitudes, flip):
    at, count = 0, 0
    ones = len(magnitudes) == 0
    for i in range(len(symbols)):
        at += symbols[i]
        if symbols[i] == escape:
            continue
        amount = np.uint64(1) if ones else np.uint64(magnitudes[count]) + np.uint64(1)
        if ((signs[count >> 3] >> (count & 7)) & 1) ^ flip:
            block[at] = np.uint64(block[at]) - amount
        else:
            block[at] = np.uint64(block[at]) + amount
        at += 1
        count += 1


class Scratch:
    """Buffers of one thread, large enough for blocks of `size` bytes; results of `find` are views into them until its next call."""

    def __init__(self, size: int):
        self.gaps, self.signs = np.empty(size, np.uint32), np.empty(size // 8 + 1, np.uint8)
        self.symbols, self.magnitudes = np.empty(2 * (size + size // 255 + 2), np.uint8), np.empty(size, np.uint8)


def find(new: np.ndarray, old: np.ndarray, scratch: Scratch) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(symbols, signs, magnitudes) of equal-sized blocks of unsigned integers.

    symbols: uint8 or uint16, per change the number of unchanged elements before it, preceded by an `ESCAPE` for each `escape` of them;
    uint16 where changes are more than 512 apart on average. signs: bits, lowest first, 1 = downwards. magnitudes: minus one, in the blocks'
    dtype; None where all are 0. No changes: no symbols.
    """
    new, old = (x if x.ctypes.data % 8 == 0 else x.copy() for x in (new, old))
    width = new.dtype.itemsize
    whole = len(new) * width // 8 * 8
    words = [x.view(np.uint8)[:whole].view(np.uint64) for x in (new, old)]
    magnitudes = scratch.magnitudes[:new.nbytes].view(new.dtype)
    count, highest = _find(new, old, *words, 8 // width, np.uint64(2 ** (8 * width) - 1), np.uint64(8 * width - 1), scratch.gaps, magnitudes, scratch.signs)
    symbols = scratch.symbols if count * 512 >= len(new) else scratch.symbols.view(np.uint16)
    size = _narrow(scratch.gaps[:count], ESCAPE[symbols.dtype], symbols)
    return symbols[:size], scratch.signs[:-(-count // 8)], magnitudes[:count] if highest else None


def scatter(block: np.ndarray, symbols: np.ndarray, signs: np.ndarray, magnitudes: np.ndarray | None, *, undo: bool = False) -> None:
    """Add the differences to `block` in place, or take them back. What `find` returned for equal shapes; the caller has checked the ranges."""
    _scatter(block, symbols, ESCAPE[symbols.dtype], signs, block[:0] if magnitudes is None else magnitudes, undo)


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
