#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""Routes in the buffer: bytes, speed and partial reads against int32, zstd level 1 and the information bound. [--quick] [--json]

32k tokens x 60 MoE layers x 8 of 256 experts (--quick: 8k tokens), drawn uniformly and with expert popularity ~ 1 / rank (Zipf), which expert
is popular differing by layer. Baselines, on the same routes in the same run:
  int32     as the engine sends them
  zstd      level 1, one frame a layer: bytes of uint8 routes (how they were stored before), speed on the int32 input
The bound is n * log2 C(256, 8) for uniform routes; for Zipf routes the entropy of the distribution they were drawn from, estimated as the
mean of -log2 p (conditional Poisson sampling, p by the same sums that the codec uses, with the true weights).
Speeds are MB of int32 input per second of CPU time of one thread, best of several; their limit is a copy of the routes, one byte each as they are handed over.
Exit 1 where a target is missed.
"""

import argparse
import sys
import tempfile
import time
from math import comb, log2
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import zstandard

from miles.buffer import route_kernels as kernels
from miles.buffer.frames import StoredBytes
from miles.buffer.routes import RouteReader, decode_routes, encode_routes
from tools.bench.table import figure, tell

LAYERS, CHOSEN, EXPERTS = 60, 8, 256


def draw(rng: np.random.Generator, tokens: int, weights: np.ndarray) -> np.ndarray:
    """uint8 [tokens, LAYERS, CHOSEN] with P(set) ~ product of its experts' weights [LAYERS, EXPERTS], in random order along the last axis."""
    out = np.empty((tokens, LAYERS, CHOSEN), np.uint8)
    for layer, w in enumerate(weights):
        z = kernels.subset_sums(w, CHOSEN)[0].reshape(CHOSEN + 1, -1)[:, : EXPERTS + 1]
        chosen, after = np.empty((CHOSEN, tokens), np.int64), np.zeros(tokens, np.int64)
        for i in range(CHOSEN):  # the next expert is the last j with Z[m, j] >= t, t uniform in (0, Z[m, after]]
            m = CHOSEN - i
            t = z[m, after] * (1 - rng.random(tokens))
            chosen[i] = np.clip(np.searchsorted(-z[m], -t, side="right") - 1, after, EXPERTS - m)
            after = chosen[i] + 1
        out[:, layer] = rng.permuted(chosen.T.astype(np.uint8), axis=1)
    return out


def entropy_bits(routes: np.ndarray, weights: np.ndarray) -> float:
    total = 0.0
    for layer, w in enumerate(weights):
        z = kernels.subset_sums(w, CHOSEN)[0].reshape(CHOSEN + 1, -1)[CHOSEN, 0]
        total += len(routes) * log2(z) - float(np.log2(w)[routes[:, layer]].sum())
    return total


def cpu_seconds(function, *args, times: int) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        function(*args)
        best = min(best, time.thread_time() - start)
    return best


def zstd_encode(layers: list[np.ndarray]) -> list[bytes]:
    compressor = zstandard.ZstdCompressor(level=1)
    return [compressor.compress(a) for a in layers]


def zstd_decode(frames: list[bytes]) -> list[bytes]:
    decompressor = zstandard.ZstdDecompressor()
    return [decompressor.decompress(f) for f in frames]


def bytes_from_file(blob: np.ndarray, layers: slice | tuple, rows: list[tuple[int, int]] | None = None) -> int:
    """What the kernel hands to this process (rchar) when these layers and rows are read from a file, as the buffer reads its segments."""
    with tempfile.TemporaryFile() as file:
        file.write(blob)
        file.flush()
        for _ in range(2):  # the first loads compiled code
            before = _rchar()
            RouteReader(StoredBytes(file.fileno(), 0, len(blob))).read(layers, rows)
        return _rchar() - before


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(kind: str, routes: np.ndarray, bound_bits: float, times: int) -> list[dict]:
    int32, mb = routes.size * 4, routes.size * 4 / 1e6
    blob = encode_routes(routes)
    assert np.array_equal(decode_routes(blob), np.sort(routes, axis=-1))
    per_layer = [np.ascontiguousarray(routes[:, layer]) for layer in range(LAYERS)]
    frames = zstd_encode(per_layer)
    zstd_bytes = sum(map(len, frames))
    scale = int32 / (32768 * LAYERS * CHOSEN * 4)
    most = 12.6e6 * scale * (1 if kind == "uniform" else 0.95)
    encode, decode = mb / cpu_seconds(encode_routes, routes, times=times), mb / cpu_seconds(decode_routes, blob, times=times)
    wide = [a.astype(np.int32) for a in per_layer]
    zstd_speed = mb / cpu_seconds(zstd_encode, wide, times=times), mb / cpu_seconds(zstd_decode, zstd_encode(wide), times=times)
    copy = mb / cpu_seconds(np.copyto, np.empty_like(routes), routes, times=times)
    quarter, whole = bytes_from_file(blob, slice(15, 30)), bytes_from_file(blob, slice(None))
    rows, chunk = len(routes), (len(routes) - 1000) // 8
    held = [(chunk, 2 * chunk), (6 * chunk, 7 * chunk)]  # of a sequence whose chunks end within segments of 2048 rows
    touched = sum(min(-(-stop // 2048) * 2048, rows) - start // 2048 * 2048 for start, stop in held) / rows
    part = bytes_from_file(blob, slice(None), held)
    above = {"above_limit": f"{8 * len(blob) / bound_bits - 1:.2%}"}
    return [
        figure(f"{kind}: against int32", "bytes", len(blob), int32, bound_bits / 8, most=most, **above),
        figure(f"{kind}: against zstd-1 of uint8", "bytes", len(blob), zstd_bytes, bound_bits / 8, most=most, **above),
        figure(f"{kind}: encode, against zstd-1 of int32", "MB/s", encode, zstd_speed[0], copy, least=300),
        figure(f"{kind}: decode, against zstd-1 of int32", "MB/s", decode, zstd_speed[1], copy, least=300),
        figure(f"{kind}: read for 15 of 60 layers", "bytes", quarter, whole, whole / 4, most=0.3, of_ratio=True),
        figure(f"{kind}: read by rank 1 of 4 (cp)", "bytes", part, whole, whole / 4, most=touched + 0.01, of_ratio=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8k tokens instead of 32k")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tokens, rng = 8192 if args.quick else 32768, np.random.default_rng(0)
    zipf = np.stack([1 / (1 + rng.permutation(EXPERTS)) for _ in range(LAYERS)])
    figures = []
    for kind, weights in (("uniform", np.ones((LAYERS, EXPERTS))), ("zipf", zipf)):
        routes = draw(rng, tokens, weights)
        bound = tokens * LAYERS * log2(comb(EXPERTS, CHOSEN)) if kind == "uniform" else entropy_bits(routes, weights)
        figures += measure(kind, routes, bound, times=5)
    return tell("routes", figures, args.json, tokens=tokens, layers=LAYERS, chosen=CHOSEN, experts=EXPERTS)


if __name__ == "__main__":
    sys.exit(main())
