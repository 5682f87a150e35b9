#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""The patch codec against its baseline, in one run: tools/bench/weights.py [--quick] [--json]. Exit status 1 where a target is missed.

Baseline: XOR of the bit patterns, zstd level 1 of blocks of 4 MiB over as many threads, xxh3-128 of each block's payload and of its result.
Both write a file (page cache, no fsync), and both apply from that file to a resident copy of the base, in place, and verify the result; their
buffers are warm. "Plain": the baseline with a new tensor for its result. Measured in turns, best of several each, as wall time and as processor
time of all threads: where other work shares the machine, wall time flatters whatever is shorter. Targets are for both. Rates are of the dense tensor's bytes.

Inputs: random bf16 weights of which 1 %, 5 %, 30 % have moved by one unit in the last place, up or down; and bf16 copies of fp32 masters
that Adam moves (learning rate 1e-6, after 20 steps, the patch of the last one), where whichever weights change do.

Limits: bytes: the entropy of which elements changed, and a sign each. Encode: reading old and new once. Decode and apply: reading each element once
(verifying the result takes that, however little changed). Both at the rate of a copy in as many threads as the codec's, in this run. Wire: each of its bytes
copied to the kernel and from it, at that rate.

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
from tools.bench.table import figure, tell

ELEMENTS, QUICK_ELEMENTS = 64 << 20, 8 << 20
LEARNING_RATE, STEPS = 1e-6, 20
AT_ONE_PERCENT = {"bytes": 0.6, "over_bound": 1.35, "encode": 3.0, "apply": 4.0}  # of the baseline's, or of the bound, to be reached
MOST_BYTES = 1.05  # of the baseline's, of any input


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


def compare(name: str, new: torch.Tensor, old: torch.Tensor, folder: Path, repeats: int, copy: tuple[float, float], targets: dict[str, float]) -> list[dict]:
    """Figures of one input. `copy`: what `copy_rates` found."""
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
    mb = new.nbytes / 1e6
    figures = [
        figure(f"{name}: patch", "bytes", written.size, size, bound, most=targets.get("bytes", MOST_BYTES), of_ratio=True, changed=float(p),
               one_ulp=float((np.abs(steps.astype(np.int32)) == 1).mean()), of_dense=written.size / new.nbytes, over_entropy_of_steps=written.size / full,
               new_values_at_best_bytes=as_values),
        figure(f"{name}: patch over the bound", "x", written.size / bound, size / bound, 1.0, most=targets.get("over_bound")),
    ]
    for what, passes in (("encode", 2), ("apply", 1)):
        for clock, seconds, rate in (("", best.wall, copy[0]), (", processor time", best.cpu, copy[1])):
            facts = {"plain_baseline_mb_s": mb / seconds["plain_apply"]} if what == "apply" else {}
            figures.append(figure(f"{name}: {what}{clock}", "MB/s", mb / seconds[what], mb / seconds[f"xor_{what}"], rate / passes / 1e6, least=targets.get(what),
                                  of_ratio=True, **facts))
    return figures


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


def copy_rates(tensor: torch.Tensor) -> tuple[float, float]:
    """Bytes per second and per second of processor time, read and written counted, of a copy over the codec's threads."""
    into, best = tensor.clone(), Best()
    for _ in range(9):
        best.timed("copy", lambda: list(threads().map(np.copyto, blocks(into), blocks(tensor))))
    return 2 * tensor.nbytes / best.wall["copy"], 2 * tensor.nbytes / best.cpu["copy"]


def over_wire(folder: Path, ranks: int, elements: int, repeats: int, copy_rate: float) -> list[dict]:
    """Figures of what weights_ranks.py measures."""
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
    found = json.loads((run.path / "figures.json").read_text())
    base, mb = found["broadcast"], found["model_bytes"] / 1e6
    return [figure(f"wire, {mb:.0f} MB from {ranks} to {ranks} ranks, {name}", "s", r["seconds"], base["seconds"], 4 * r["wire_bytes"] / copy_rate,
                   wire_bytes=r["wire_bytes"], baseline_wire_bytes=base["wire_bytes"], first_s=r["first_s"])
            for name, r in (("whole", found["whole"]), ("shares", found["shares"]))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 M elements instead of 64 M")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    elements = QUICK_ELEMENTS if args.quick else ELEMENTS
    old = (torch.randn(elements, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    copy = copy_rates(old)
    with tempfile.TemporaryDirectory(prefix="miles-bench-weights-") as folder:
        figures = compare("1% by one ulp", moved(old, 0.01, 7), old, Path(folder), 12, copy, AT_ONE_PERCENT)
        for density in (0.05, 0.3):
            figures += compare(f"{density:.0%} by one ulp", moved(old, density, 7), old, Path(folder), 3, copy, {})
        figures += compare(f"Adam, lr {LEARNING_RATE:g}, step {STEPS}", *trained(elements), Path(folder), 3, copy, {})
        figures += over_wire(Path(folder), 2 if args.quick else 4, elements, 2 if args.quick else 3, copy[0])
    return tell("weights", figures, args.json, elements=elements, threads=thread_count(), block_bytes=BLOCK_BYTES, copy_bytes_per_s=copy[0])


if __name__ == "__main__":
    sys.exit(main())
