"""Compiled kernels of the route codec (`miles.buffer.routes`, which explains the method). Pure functions over NumPy arrays.

tests/buffer/routes_reference.py holds the same arithmetic in plain Python; a property test holds them equal byte for byte, so every
floating-point operation here is part of the format: IEEE double, in this order, never fused (numba without `fastmath`).
"""

from __future__ import annotations

import numba
import numpy as np

from miles.core.compiled import compiled

SCALE_BITS = 24  # one choice of an expert divides 2^24
SCALE = 1 << SCALE_BITS
LOW = 1 << 31  # a coder's state lies in [2^31, 2^63) between choices; words of 32 bits go in and out
LANES = 4  # coders that take turns by row, so that the processor works on four rows at once
_GUESS_BITS = 7  # mantissa bits of a guess: 128 steps an octave, over 32 octaves
_GUESSES = 32 << _GUESS_BITS
_SHIFT = 52 - _GUESS_BITS
# unsigned, because numba adds a test for negative indices to signed ones, and mixes of both become floats
_0, _1, _2, _5, _32 = (np.uint64(i) for i in (0, 1, 2, 5, 32))
_LOW, _WORD, _MASK = np.uint64(LOW), np.uint64(0xFFFFFFFF), np.uint64(SCALE - 1)
_SCALE_BITS, _FULL = np.uint64(SCALE_BITS), np.uint64(63 - SCALE_BITS)
_TILE = 1024  # rows sorted at once: vector minimum and maximum over rows


def _inlined(function):
    return compiled(function, forceinline=True)


@compiled
def sort_planes(routes, planes):
    """routes [n, L, K] into planes [K, >= L * n], layer after layer, ascending along K. A sorting network: each exchange is a vector operation
    over rows."""
    n, layers, k = routes.shape
    for first in range(0, n, _TILE):
        last = min(first + _TILE, n)
        for layer in range(layers):
            for row in range(first, last):
                for i in range(k):
                    planes[i, layer * n + row] = routes[row, layer, i]
            for sweep in range(k):  # odd-even transposition: after k sweeps all is in order
                for i in range(sweep & 1, k - 1, 2):
                    low, high = planes[i, layer * n + first : layer * n + last], planes[i + 1, layer * n + first : layer * n + last]
                    for row in range(last - first):
                        a, b = low[row], high[row]
                        low[row], high[row] = min(a, b), max(a, b)  # these two vectorize; a comparison and a choice do not


@compiled
def repeats(plane):
    """Does some row of plane [K, n], sorted, name an expert twice?"""
    k, n = plane.shape
    count = 0
    for i in range(k - 1):
        a, b = plane[i], plane[i + 1]
        for row in range(n):
            count += a[row] == b[row]
    return count > 0


@compiled
def histogram(plane, stride, counts):
    """Add up how often each expert occurs in every `stride`-th row of plane [K, n]."""
    k, n = plane.shape
    for i in range(k):
        for row in range(0, n, stride):
            counts[plane[i, row]] += 1


@_inlined
def row_width(experts, k):
    """Entries of one row of the tables: a = 0..E and a margin of zeros, into which damaged words can lead the decoder (`_pop`)."""
    return experts + k + 4


@compiled
def subset_sums(weights, k):
    """Z and its scale S, both float64 [(k+1) * row_width], index m * row_width + a.

    Z[m, a] = sum over sets of m experts out of a..E-1 of the product of their weights; S[m, a] = (2^24 - E) / Z[m, a].
    """
    experts = len(weights)
    width = row_width(experts, k)
    z, s = np.zeros((k + 1) * width), np.zeros((k + 1) * width)
    z[: experts + 1] = 1.0
    for m in range(1, k + 1):
        for a in range(experts - 1, -1, -1):
            value = z[m * width + a + 1] + weights[a] * z[(m - 1) * width + a + 1]
            z[m * width + a] = value
            if value > 0.0:
                s[m * width + a] = (SCALE - experts) / value
    return z, s


@compiled
def guesses(z, k):
    """For the decoder: the last expert j with Z[m, j] >= a value, by the leading bits of the value as a double. uint16 [(k+1) * 4096].

    The last entry of a row stands for values above Z[m, 0], all others for the 4095 steps up to it; below that it is expert 0 or more.
    """
    width = len(z) // (k + 1)
    experts = width - row_width(0, k)
    out = np.zeros((k + 1) * _GUESSES, np.uint16)
    bits = z.view(np.int64)  # positive doubles order like their bits
    for m in range(1, k + 1):
        base = (bits[m * width] >> _SHIFT) - (_GUESSES - 2)
        j = 0
        for index in range(_GUESSES - 1, -1, -1):
            top = (base + index + 1) << _SHIFT
            while j + 1 < experts and bits[m * width + j + 1] >= top:
                j += 1
            out[m * _GUESSES + index] = j
    return out


@_inlined
def _push(x, z, s, o, a, j, out, at):
    """Code expert j, the first one chosen out of a, a+1, ...; o = m * (E+1) with m experts to go. Writes downwards from `out[at - 1]`."""
    top, scale = z[o + a], s[o + a]
    start = (j - a) + np.uint64(np.int64((top - z[o + j]) * scale))
    freq = (j + _1 - a) + np.uint64(np.int64((top - z[o + j + _1]) * scale)) - start
    out[at - _1] = np.uint32(x & _WORD)
    full = np.uint64(x >= freq << _FULL)
    at -= full
    x >>= full << _5
    q = x // freq
    return (q << _SCALE_BITS) + (x - q * freq) + start, at


@compiled
def encode(plane, z, s, lanes, out):
    """plane [K, n], sorted, into the end of out (uint32, at least K*n + 2*LANES + 1 words); returns the first word used.

    Row r belongs to coder r % lanes. The last row is coded first, so that the decoder goes forwards; the coders' states come first.
    """
    k, n = plane.shape
    width = np.uint64(len(z) // (k + 1))
    at = np.uint64(len(out))
    whole = n - n % LANES if lanes == LANES else 0
    states = np.full(LANES, LOW, np.uint64)
    for row in range(n - 1, whole - 1, -1):
        lane = row - whole if lanes == LANES else 0
        x = states[lane]
        for i in range(k - 1, -1, -1):
            a = np.uint64(plane[i - 1, row]) + _1 if i else _0
            x, at = _push(x, z, s, np.uint64(k - i) * width, a, np.uint64(plane[i, row]), out, at)
        states[lane] = x
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    for row in range(whole - LANES, -1, -LANES):
        for i in range(k - 1, -1, -1):
            o = np.uint64(k - i) * width
            a0 = a1 = a2 = a3 = _0
            if i:
                a0, a1 = np.uint64(plane[i - 1, row]) + _1, np.uint64(plane[i - 1, row + 1]) + _1
                a2, a3 = np.uint64(plane[i - 1, row + 2]) + _1, np.uint64(plane[i - 1, row + 3]) + _1
            x3, at = _push(x3, z, s, o, a3, np.uint64(plane[i, row + 3]), out, at)
            x2, at = _push(x2, z, s, o, a2, np.uint64(plane[i, row + 2]), out, at)
            x1, at = _push(x1, z, s, o, a1, np.uint64(plane[i, row + 1]), out, at)
            x0, at = _push(x0, z, s, o, a0, np.uint64(plane[i, row]), out, at)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    for lane in range(lanes - 1, -1, -1):
        at -= np.uint64(2)
        out[at] = np.uint32(states[lane] & _WORD)
        out[at + _1] = np.uint32(states[lane] >> _32)
    return at


@numba.extending.intrinsic
def _bits(typingctx, value):
    """A double's bits as int64."""
    from llvmlite import ir

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(64))

    return numba.types.int64(numba.types.float64), codegen


@_inlined
def _pop(x, z, s, guess, o, g, base, near, step, a, last, words, at):
    """Inverse of `_push`: (state, expert, next word). `last`: highest expert that leaves room for the rest of the row.

    Z of the expert looked for is at most `above` and nearly it, so the guess is that expert or one or two before.
    Damaged words can lead past `last`, two experts per choice at most: the margin of the tables.
    """
    top, scale = z[o + a], s[o + a]
    u = x & _MASK
    above = top * (near - np.float64(np.int64(u)) * step)
    j = max(np.uint64(guess[np.uint64(max(_bits(above) >> _SHIFT, base) + g)]), a)
    v = u - (j - a)  # starts from here on are relative to that of j
    first = j
    start = np.uint64(np.int64((top - z[o + j]) * scale))
    after = np.uint64(np.int64((top - z[o + j + _1]) * scale)) + _1
    later = np.uint64(np.int64((top - z[o + j + _2]) * scale)) + _2
    # mostly it is j or j + 1: chosen by masks, because a branch here would be mispredicted every other time
    if after <= v:  # half the time, so this must stay a selection without a branch, as all of it up to the loop
        start, after, j = after, later, j + _1
    while after <= v and j < last:
        j += _1
        start = after
        after = np.uint64(np.int64((top - z[o + j + _1]) * scale)) + (j + _1 - first)
    x = (after - start) * (x >> _SCALE_BITS) + (v - start)
    more = np.uint64(x < _LOW)
    return (x << (more << _5)) | (np.uint64(words[at]) & (_0 - more)), j, at + more


@compiled
def decode(words, z, s, guess, lanes, out):
    """words (uint32) into out [n, K] (any strides). True when the words end exactly where the rows do and the coders are back at their start."""
    n, k = out.shape
    width = np.uint64(len(z) // (k + 1))
    size = np.uint64(len(words))
    if len(words) < 2 * lanes:
        return False
    experts = len(z) // (k + 1) - row_width(0, k)
    step = 1.0 / np.float64(SCALE - experts)
    near = 1.0 + experts * step
    padded = np.zeros(len(words) + LANES * k + 1, np.uint32)  # damaged bytes are noticed once a round, not once a word
    padded[: len(words)] = words
    states = np.full(LANES, LOW, np.uint64)
    for lane in range(lanes):
        states[lane] = np.uint64(words[2 * lane]) | (np.uint64(words[2 * lane + 1]) << _32)
    at = np.uint64(2 * lanes)
    bases = np.empty(k + 1, np.int64)
    for m in range(1, k + 1):
        bases[m] = (_bits(z[np.uint64(m) * width]) >> _SHIFT) - (_GUESSES - 2)
    whole = n - n % LANES if lanes == LANES else 0
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    for row in range(0, whole, LANES):
        a0 = a1 = a2 = a3 = _0
        for i in range(k):
            m = np.uint64(k - i)
            o, g, base, last = m * width, np.int64(m) * _GUESSES - bases[m], bases[m], np.uint64(experts) - m
            x0, j0, at = _pop(x0, z, s, guess, o, g, base, near, step, a0, last, padded, at)
            x1, j1, at = _pop(x1, z, s, guess, o, g, base, near, step, a1, last, padded, at)
            x2, j2, at = _pop(x2, z, s, guess, o, g, base, near, step, a2, last, padded, at)
            x3, j3, at = _pop(x3, z, s, guess, o, g, base, near, step, a3, last, padded, at)
            out[row, i], out[row + 1, i], out[row + 2, i], out[row + 3, i] = j0, j1, j2, j3
            a0, a1, a2, a3 = j0 + _1, j1 + _1, j2 + _1, j3 + _1
        if at > size:
            return False
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    for row in range(whole, n):
        lane = (row - whole) if lanes == LANES else 0
        x, a = states[lane], _0
        for i in range(k):
            m = np.uint64(k - i)
            x, j, at = _pop(x, z, s, guess, m * width, np.int64(m) * _GUESSES - bases[m], bases[m], near, step, a, np.uint64(experts) - m, padded, at)
            out[row, i] = j
            a = j + _1
        if at > size:
            return False
        states[lane] = x
    for lane in range(lanes):
        if states[lane] != _LOW:
            return False
    return at == size
