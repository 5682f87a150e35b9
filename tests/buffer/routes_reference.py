"""The arithmetic of `miles.buffer.route_kernels` in plain Python: slow, and the description of the format. Integers are exact, floats IEEE doubles."""

import numpy as np

TOTAL = 1 << 24
LOW = 1 << 31


def subset_sums(weights, k):
    """Z[m][a]: sum over sets of m experts out of a..E-1 of the product of their weights."""
    e = len(weights)
    z = [[1.0] * (e + 1)] + [[0.0] * (e + 1) for _ in range(k)]
    for m in range(1, k + 1):
        for a in reversed(range(e)):
            z[m][a] = z[m][a + 1] + float(weights[a]) * z[m - 1][a + 1]
    return z


def start_of(z, m, a, j):
    """Where, in 0 .. 2^24, the choice of expert j begins when m experts are to go and a is the lowest allowed."""
    experts = len(z[0]) - 1
    return j - a + int((z[m][a] - z[m][j]) * ((TOTAL - experts) / z[m][a]))


def encode(rows, weights, k, lanes):
    """rows [n, K], ascending along K -> list of 32-bit words."""
    z = subset_sums(weights, k)
    states, words = [LOW] * lanes, []
    n, whole = len(rows), len(rows) - len(rows) % lanes
    order = [[(row, i) for i in range(k)] for row in range(whole, n)]  # as it is decoded
    rounds = [(first + lane, i) for first in range(0, whole, lanes) for i in range(k) for lane in range(lanes)] if lanes > 1 else \
        [(row, i) for row in range(whole) for i in range(k)]
    for row, i in reversed(rounds + [step for steps in order for step in steps]):
        m, a, j = k - i, int(rows[row][i - 1]) + 1 if i else 0, int(rows[row][i])
        start = start_of(z, m, a, j)
        freq = start_of(z, m, a, j + 1) - start
        x = states[row % lanes]
        if x >= freq << 39:
            words.append(x & 0xFFFFFFFF)
            x >>= 32
        states[row % lanes] = (x // freq << 24) + x % freq + start
    for x in reversed(states):
        words += [x >> 32, x & 0xFFFFFFFF]
    return words[::-1]


def decode(words, weights, n, k, lanes):
    """Inverse: uint16 [n, K]."""
    z, experts = subset_sums(weights, k), len(weights)
    words = [int(w) for w in words]
    states = [words[2 * i] | words[2 * i + 1] << 32 for i in range(lanes)]
    at, out = 2 * lanes, np.zeros((n, k), np.uint16)
    whole = n - n % lanes
    steps = [(first + lane, i) for first in range(0, whole, lanes) for i in range(k) for lane in range(lanes)] if lanes > 1 else \
        [(row, i) for row in range(whole) for i in range(k)]
    for row, i in steps + [(row, i) for row in range(whole, n) for i in range(k)]:
        m, a, x = k - i, int(out[row, i - 1]) + 1 if i else 0, states[row % lanes]
        u = x % TOTAL
        j = a
        while j < experts - m and start_of(z, m, a, j + 1) <= u:
            j += 1
        start = start_of(z, m, a, j)
        x = (start_of(z, m, a, j + 1) - start) * (x >> 24) + u - start
        if x < LOW:
            x, at = x << 32 | words[at], at + 1
        states[row % lanes], out[row, i] = x, j
    assert at == len(words) and states == [LOW] * lanes
    return out
