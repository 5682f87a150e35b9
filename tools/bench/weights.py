#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""The patch codec against its baseline, in one run: tools/bench/weights.py [--quick] [--json]. Exit status 1 where a target is missed.

Baseline: XOR of the bit patterns, zstd level 1 of blocks of 4 MiB over as many threads, xxh3-128 of each block's payload and of its result.
Both write a file (page cache, no fsync), and both apply from that file to a resident copy of the base, in place, and verify the result; their
buffers are warm. "Plain": the baseline with a new tensor for its result. Measured in turns, best of several each, as wall time and as processor
time of all threads: where other work shares the machine, wall time flatters whatever is shorter. The smaller of both ratios counts.

Inputs: random bf16 weights of which 1 %, 5 %, 30 % have moved by one unit in the last place, up or down; and bf16 copies of fp32 masters
that Adam moves (learning rate 1e-6, after 20 steps, the patch of the last one), where whichever weights change do.

Limits: bytes: the entropy of which elements changed, and a sign each. Encode: reading old and new once. Decode and apply: reading each element once
(verifying the result takes that, however little changed). Both at the rate of a copy in as many threads as the codec's, in this run.

Then the transports over a wire: 4 tensor-parallel trainer ranks and 4 rollout ranks (2 and 2 with --quick), all on this machine, point to point over MPI on loopback
TCP, against gathering on the leader and broadcasting from there over gloo. Point to point is verified end to end, broadcast is not. No target: which is faster depends on
how many machines share the work, and here all ranks share one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import xxhash
import zstandard

from miles.config import load_config
from miles.rundir import RunDir
from miles.weights.digest import BLOCK_BYTES, blocks, digest, thread_count, threads
from miles.weights.patch import Patch, write_patch

ELEMENTS, QUICK_ELEMENTS = 64 << 20, 8 << 20
LEARNING_RATE, STEPS = 1e-6, 20


class Xor:
    """The baseline. One buffer per block, made once."""

    def __init__(self, like: torch.Tensor):
        self._scratch = [np.empty_like(b) for b in blocks(like)]
        self._local = threading.local()

    def _zstd(self):
        if not hasattr(self._local, "zstd"):
            self._local.zstd = SimpleNamespace(compress=zstandard.ZstdCompressor(level=1).compress, decompress=zstandard.ZstdDecompressor().decompress)
        return self._local.zstd

    def encode(self, new: torch.Tensor, old: torch.Tensor, path: Path) -> int:
        def one(a, b, x):
            np.bitwise_xor(a, b, out=x)
            data = self._zstd().compress(x)
            return data, xxhash.xxh3_128_digest(data), xxhash.xxh3_128_digest(a)

        with open(path, "wb") as f:
            self._index, at = [], 0
            for data, check, result in threads().map(one, blocks(new), blocks(old), self._scratch):
                f.write(data)
                self._index.append((at, len(data), check, result))
                at += len(data)
        return at

    def apply(self, base: torch.Tensor, path: Path) -> None:
        with open(path, "rb") as f:
            def one(block, entry):
                at, size, check, result = entry
                data = os.pread(f.fileno(), size, at)
                if xxhash.xxh3_128_digest(data) != check:
                    raise ValueError("payload")
                np.bitwise_xor(block, np.frombuffer(self._zstd().decompress(data), block.dtype), out=block)
                if xxhash.xxh3_128_digest(block) != result:
                    raise ValueError("result")

            for _ in threads().map(one, blocks(base), self._index):
                pass

    def apply_plain(self, base: torch.Tensor, path: Path) -> None:
        """As it is usually written: the result is a new tensor, and the base stays."""
        self.apply(base.clone(), path)


class Best:
    """The shortest wall time and the shortest processor time (of all threads) of each thing timed."""

    def __init__(self):
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def timed(self, what: str, function, *args):
        wall, cpu = time.perf_counter(), time.process_time()
        result = function(*args)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.wall[what], self.cpu[what] = min(wall, self.wall.get(what, wall)), min(cpu, self.cpu.get(what, cpu))
        return result


def compare(name: str, new: torch.Tensor, old: torch.Tensor, folder: Path, repeats: int, copy_rate: float) -> dict:
    xor, held, digests, best = Xor(new), old.clone(), {"w": digest(old)}, Best()

    def encode():
        with open(folder / "patch", "wb") as f:
            return write_patch(f, [("w", new)], {"w": old}, digests)

    def apply():
        Patch(folder / "patch", written.size, written.digest).apply({"w": held}, digests)

    def check():
        assert all(np.array_equal(a, b) for a, b in zip(blocks(held), blocks(new), strict=True))
        held.copy_(old)

    for _ in range(repeats):
        written = best.timed("encode", encode)
        size = best.timed("xor_encode", xor.encode, new, old, folder / "xor")
        best.timed("apply", apply)
        check()
        best.timed("xor_apply", xor.apply, held, folder / "xor")
        check()
        best.timed("plain_apply", xor.apply_plain, old, folder / "xor")
    changed = np.concatenate([(a != b) for a, b in zip(blocks(new), blocks(old), strict=True)])
    steps = np.concatenate([a[a != b] - b[a != b] for a, b in zip(blocks(new), blocks(old), strict=True)]).view(np.int16)
    values = np.concatenate([a[a != b] for a, b in zip(blocks(new), blocks(old), strict=True)])
    p = changed.mean()
    bound = (len(changed) * entropy_of(np.array([p, 1 - p])) + len(steps)) / 8  # mask and sign
    full = (len(changed) * entropy_of(np.array([p, 1 - p])) + len(steps) * entropy(steps)) / 8
    as_values = (len(changed) * entropy_of(np.array([p, 1 - p])) + len(steps) * entropy(values)) / 8
    return {
        "input": name, "elements": len(changed), "changed": float(p), "one_ulp": float((np.abs(steps.astype(np.int32)) == 1).mean()), "dense_bytes": new.nbytes,
        "bytes": written.size, "xor_bytes": size, "bytes_ratio": written.size / size, "bytes_of_dense": written.size / new.nbytes,
        "bound_bytes": bound, "bytes_over_bound": written.size / bound, "bytes_over_entropy_of_steps": written.size / full,
        "new_values_bound_bytes": as_values,
        **{f"{k}_s": v for k, v in best.wall.items()}, **{f"{k}_cpu_s": v for k, v in best.cpu.items()},
        **{f"{k}_ratio": best.wall[f"xor_{k}"] / best.wall[k] for k in ("encode", "apply")},
        **{f"{k}_cpu_ratio": best.cpu[f"xor_{k}"] / best.cpu[k] for k in ("encode", "apply")},
        "plain_apply_ratio": best.wall["plain_apply"] / best.wall["apply"],
        "encode_limit_s": 2 * new.nbytes / copy_rate, "encode_over_limit": best.wall["encode"] / (2 * new.nbytes / copy_rate),
        "apply_limit_s": new.nbytes / copy_rate, "apply_over_limit": best.wall["apply"] / (new.nbytes / copy_rate),
    }


def entropy_of(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def entropy(values: np.ndarray) -> float:
    return entropy_of(np.bincount(values.view(np.uint16), minlength=1) / max(1, len(values)))


def moved(old: torch.Tensor, density: float, seed: int) -> torch.Tensor:
    g = np.random.default_rng(seed)
    new = old.clone()
    flat = new.view(torch.int16).numpy()
    at = np.flatnonzero(g.random(len(flat), dtype=np.float32) < density)
    flat[at] += g.integers(0, 2, len(at), dtype=np.int16) * 2 - 1
    return new


def trained(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights before and after the last of `STEPS` Adam steps. Gradients: a slowly turning direction with noise, as of a policy gradient."""
    g = torch.Generator().manual_seed(5)
    master = torch.nn.Parameter(torch.randn(elements, generator=g) * 0.02)
    adam = torch.optim.Adam([master], lr=LEARNING_RATE, betas=(0.9, 0.98), foreach=False, fused=True)
    drift = torch.randn(elements, generator=g)
    before = after = master.detach().bfloat16()
    for _ in range(STEPS):
        noise = torch.randn(elements, generator=g)
        master.grad = noise.add_(drift, alpha=0.3)
        adam.step()
        before, after = after, master.detach().bfloat16()
    return after, before


def copy_rate(tensor: torch.Tensor) -> float:
    """Bytes per second, read and written counted, of a copy over the codec's threads."""
    into, best = tensor.clone(), Best()
    for _ in range(9):
        best.timed("copy", lambda: list(threads().map(np.copyto, blocks(into), blocks(tensor))))
    return 2 * tensor.nbytes / best.wall["copy"]


def over_wire(folder: Path, ranks: int, elements: int, repeats: int) -> dict:
    """Figures of weights_ranks.py."""
    project = Path(__file__).resolve().parents[2]
    run = RunDir.create(load_config(project / "configs/tiny_async.toml", (f"run.root={folder}", f"cluster.site={project / 'configs/sites/dev.toml'}")))
    tcp = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    started = [subprocess.Popen([str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks), sys.executable, str(Path(__file__).with_name("weights_ranks.py")),
                                 role, str(run.path), str(ranks), str(elements), str(repeats)], env={**os.environ, **tcp})
               for role in ("rollout", "trainer")]
    try:
        started[1].wait(timeout=600)
        started[0].wait(timeout=60)
    finally:
        for process in started:
            process.kill()
    return json.loads((run.path / "figures.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 M elements instead of 64 M")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    elements = QUICK_ELEMENTS if args.quick else ELEMENTS
    old = (torch.randn(elements, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    rate = copy_rate(old)
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        rows = [compare(f"{d:.0%} by one ulp", moved(old, d, 7), old, Path(folder), 12 if d < 0.02 else 3, rate) for d in (0.01, 0.05, 0.3)]
        rows.append(compare(f"Adam, lr {LEARNING_RATE:g}, step {STEPS}", *trained(elements), Path(folder), 3, rate))
        wire = over_wire(Path(folder), 2 if args.quick else 4, elements, 2 if args.quick else 3)
    one = rows[0]
    targets = [
        ("bytes at 1 % of the baseline's", one["bytes_ratio"], "<=", 0.6), ("encode at 1 %, times faster", min(one["encode_ratio"], one["encode_cpu_ratio"]), ">=", 3.0),
        ("decode and apply at 1 %, times faster", min(one["apply_ratio"], one["apply_cpu_ratio"]), ">=", 4.0), ("bytes at 1 % of the entropy bound", one["bytes_over_bound"], "<=", 1.35),
        ("bytes of the baseline's, worst input", max(r["bytes_ratio"] for r in rows), "<=", 1.05),
    ]
    checks = [{"figure": n, "value": v, "target": f"{op} {t}", "met": v <= t if op == "<=" else v >= t} for n, v, op, t in targets]
    if args.json:
        print(json.dumps({"threads": thread_count(), "block_bytes": BLOCK_BYTES, "copy_bytes_per_s": rate, "rows": rows, "wire": wire, "targets": checks}, indent=1))
    else:
        show(rows, checks, rate)
        show_wire(wire)
    return 0 if all(c["met"] for c in checks) else 1


def show(rows: list[dict], checks: list[dict], rate: float) -> None:
    print(f"{rows[0]['elements'] / 2**20:.0f} M bf16 elements, {thread_count()} threads, blocks of {BLOCK_BYTES >> 20} MiB; copy {rate / 1e9:.1f} GB/s read + written\n")
    for r in rows:
        print(f"{r['input']}: {r['changed']:.2%} changed, {r['one_ulp']:.1%} of them by one ulp")
        print(f"  bytes   {r['bytes'] / 1e6:9.3f} MB, {r['bytes_of_dense']:.3%} of dense   baseline {r['xor_bytes'] / 1e6:.3f} MB ({r['bytes_ratio']:.2f}x)   "
              f"mask + sign {r['bound_bytes'] / 1e6:.3f} MB ({r['bytes_over_bound']:.3f}x); mask + steps {r['bytes_over_entropy_of_steps']:.3f}x; "
              f"mask + new values at best {r['new_values_bound_bytes'] / 1e6:.3f} MB")
        for what in ("encode", "apply"):
            plain = f"; plain {1e3 * r['plain_apply_s']:.1f} ms ({r['plain_apply_ratio']:.1f}x)" if what == "apply" else ""
            print(f"  {what:7} {1e3 * r[what + '_s']:9.1f} ms   baseline {1e3 * r['xor_' + what + '_s']:.1f} ms ({r[what + '_ratio']:.1f}x; processor time "
                  f"{r[what + '_cpu_ratio']:.1f}x){plain}   limit {1e3 * r[what + '_limit_s']:.1f} ms (we take {r[what + '_over_limit']:.1f}x)")
    print()
    for c in checks:
        print(f"{'met   ' if c['met'] else 'MISSED'} {c['figure']}: {c['value']:.3f} (target {c['target']})")


def show_wire(w: dict) -> None:
    base = w["broadcast"]
    print(f"\n{w['model_bytes'] / 1e6:.0f} MB from {w['ranks']} trainer ranks to {w['ranks']} rollout ranks, loopback TCP")
    for key, name in (("broadcast", "gathered, then broadcast"), ("whole", "point to point, whole tensors to each"), ("shares", "point to point, the shares of one engine")):
        r = w[key]
        first = f"; first {r['first_s']:.3f} s" if "first_s" in r else ""
        print(f"  {name:40} {r['seconds']:.3f} s ({base['seconds'] / r['seconds']:.2f}x the speed)   {r['wire_bytes'] / 1e6:.0f} MB on the wire "
              f"({r['wire_bytes'] / base['wire_bytes']:.2f}x){first}")


if __name__ == "__main__":
    sys.exit(main())
