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

Then publishing on disk (synced) beside the next step against publishing before it, the same publisher in asynchronous and in synchronous mode: a state of the
size of SmolLM2-135M in bf16 (--quick: of 8 M elements), 1.5 % of its elements moved by one unit in the last place, the step a small network trained in the
publisher's thread for half as long again as a keyframe takes. "Waits": from the optimizer step until the next may begin. "Step": with that. Medians. Limit:
reading old and new weights once, at the rate of a copy; for a keyframe, the new ones copied; for a step, its training alone.

Then the transports over a wire: 4 tensor-parallel trainer ranks and 4 rollout ranks (2 and 2 with --quick), all on this machine, point to point over MPI on loopback
TCP, against gathering on the leader and broadcasting from there over gloo. Point to point is verified end to end, broadcast is not. No target: which is faster depends on
how many machines share the work, and here all ranks share one.

Then host memory (weights_memory.py). Of a publisher, beside the model's tensors, while it publishes keyframe, three deltas and keyframe: the limit is one
snapshot and two buckets of 64 MiB, in which a trainer gathers. Of four ranks of a node (two with --quick) that follow these versions together, and what they read from the shared file system: with one pull
for the node, against one for each rank (baseline). The limits are the bytes of all files, and of one keyframe.
"""

import argparse
import json
import os
import statistics
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
from miles.weights.digest import BLOCK_BYTES, blocks, digest
from miles.weights.mapping.transfer import BUCKET_BYTES
from miles.weights.parallel import thread_count, threads
from miles.weights.patch import Patch, encode_patch, write_patch
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from tools.bench.table import figure, tell
from tools.bench.weights_memory import VERSIONS

ELEMENTS, QUICK_ELEMENTS = 64 << 20, 8 << 20
LEARNING_RATE, STEPS = 1e-6, 20
PUBLISHED_ELEMENTS, PUBLISHED_TENSORS, MOVED = 134_500_000, 30, 0.015
AT_ONE_PERCENT = {"bytes": 0.6, "over_bound": 1.35, "encode": 3.0, "apply": 4.0}  # of the baseline's, or of the bound, to be reached
MOST_WAIT = {"delta": 1.0, "keyframe": 0.5}  # of publishing before the next step
MOST_STEP = 1.0  # of one with publishing before it: beside it, publishing takes no more of the step than was won
MOST_BYTES = 1.05  # of the baseline's, of any input
ONE_PULL = 1.05  # most that all ranks of a node read and hold, of what one does


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
            return write_patch(f, encode_patch([("w", new)], {"w": old}, digests))

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


class Training:
    """Forward and backward of a small network, again and again."""

    def __init__(self):
        self._x, self._w = torch.randn(64, 512), [torch.randn(512, 512, requires_grad=True) for _ in range(4)]
        self._times = 1

    def last(self, seconds: float) -> None:
        """Let a step last about so long."""
        start = time.perf_counter()
        self._times = 20
        self.step()
        self._times = max(1, round(20 * seconds / (time.perf_counter() - start)))

    def step(self) -> None:
        for _ in range(self._times):
            y = self._x
            for w in self._w:
                y = torch.nn.functional.normalize(y @ w)
            y.sum().backward()


def publishing(folder: Path, elements: int, rounds: int, copy_rate: float) -> list[dict]:
    """Figures of publishing beside the next step."""
    project = Path(__file__).resolve().parents[2]
    old, new = {}, {}
    for i in range(PUBLISHED_TENSORS):
        old[f"w{i}"] = (torch.randn(elements // PUBLISHED_TENSORS, generator=torch.Generator().manual_seed(i)) * 0.02).bfloat16()
        new[f"w{i}"] = moved(old[f"w{i}"], MOVED, i)
    publishers, training, found = {}, Training(), []
    for mode in ("async", "sync"):
        overrides = (f"run.root={folder}", f"run.name={mode}", f"run.mode={mode}", "weights.keyframe_every=4")
        run = RunDir.create(load_config(project / "configs/tiny_async.toml", overrides))
        store = WeightStore(run)
        publishers[mode] = Publisher(run, run.new_epoch("trainer"), store, lambda: None, lambda state: ""), store
    for publisher, _ in publishers.values():
        training.last(1.5 * publisher.publish(0, ((n, t.clone()) for n, t in old.items())).seconds)
    for _ in range(rounds):
        for mode, (publisher, store) in publishers.items():
            steps = []
            for state in (new, old, new, old):  # three deltas and a keyframe
                start = time.perf_counter()
                publication = publisher.begin(0, ((n, t.clone()) for n, t in state.items()))
                waits = time.perf_counter() - start
                training.step()
                steps.append((publication, waits, time.perf_counter() - start))
            publisher.settle()
            found += [(mode, store.manifest(p.result().version).encoding, waits, step, p.result().seconds) for p, waits, step in steps]
    size = sum(t.nbytes for t in old.values())
    out = []
    for encoding in ("delta", "keyframe"):
        (waits, step, total), (waits_before, step_before, total_before) = (
            [statistics.median(row[i] for row in found if row[:2] == (mode, encoding)) for i in (2, 3, 4)] for mode in ("async", "sync"))
        name = f"publish {size / 1e6:.0f} MB, {encoding}"
        out.append(figure(f"{name}: the trainer waits", "s", waits, waits_before, 2 * size / copy_rate, most=MOST_WAIT[encoding], of_ratio=True,
                          until_there_s=total, baseline_until_there_s=total_before))
        out.append(figure(f"{name}: step", "s", step, step_before, step_before - waits_before, most=MOST_STEP, of_ratio=True))
    return out


def host_memory(folder: Path, ranks: int, elements: int) -> list[dict]:
    """Figures of what weights_memory.py measures."""
    project = Path(__file__).resolve().parents[2]
    run = RunDir.create(load_config(project / "configs/tiny_async.toml", (
        f"run.root={folder}", "run.name=memory", f"weights.keyframe_every={VERSIONS - 1}", f"cluster.site={project / 'configs/sites/dev.toml'}")))
    run.new_epoch("rollout")
    program = [sys.executable, str(Path(__file__).with_name("weights_memory.py"))]
    publisher = [*program, "publisher", str(run.path), str(elements), str(BUCKET_BYTES)]
    found = json.loads(subprocess.run(publisher, check=True, capture_output=True, text=True).stdout)
    limit, store = found["snapshot"] + 2 * BUCKET_BYTES, WeightStore(run)
    sizes = [store.manifest(v).file_size for v in store.versions()]
    shared, own = follow(program, run, [folder / "all"] * ranks), follow(program, run, [folder / f"own-{i}" for i in range(ranks)])
    return [
        figure("publisher's peak memory, of a snapshot and 2 buckets", "x", found["extra"] / limit, None, 1.0, most=1.0, peak_mb=found["extra"] / 1e6,
               snapshot_mb=found["snapshot"] / 1e6, bucket_mb=BUCKET_BYTES / 1e6),
        figure(f"{ranks} ranks of a node: read from the file system", "MB", shared["read"] / 1e6, own["read"] / 1e6, sum(sizes) / 1e6, most=ONE_PULL / ranks,
               of_ratio=True),
        figure(f"{ranks} ranks of a node: host copies", "MB", shared["held"] / 1e6, own["held"] / 1e6, max(sizes) / 1e6, most=ONE_PULL / ranks, of_ratio=True,
               seconds=shared["seconds"], baseline_seconds=own["seconds"]),
    ]


def follow(program: list[str], run: RunDir, folders: list[Path]) -> dict:
    """Bytes that ranks, one for each folder, read in all and hold at most after a version, and the seconds that they take over all versions. Those with one
    folder share."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
    ranks = [subprocess.Popen([*program, "rank", str(run.path), str(f)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for f in folders]
    out = {"read": 0, "held": 0, "seconds": 0.0}
    try:
        for version in (0, *WeightStore(run).versions()):  # nothing leads to 0: they have started
            start = time.perf_counter()
            for rank in ranks:
                print(version, file=rank.stdin, flush=True)
            found = [json.loads(rank.stdout.readline()) for rank in ranks]
            if version:
                out["seconds"] += time.perf_counter() - start
                out["read"] += sum(f["read"] for f in found)
                out["held"] = max(out["held"], sum(f["shared"] for f in found))
    finally:
        for rank in ranks:
            rank.stdin.close()
            rank.wait(timeout=60)
    return out


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
        figures += publishing(Path(folder), elements if args.quick else PUBLISHED_ELEMENTS, 3, copy[0])
        figures += over_wire(Path(folder), 2 if args.quick else 4, elements, 2 if args.quick else 3, copy[0])
        figures += host_memory(Path(folder), 2 if args.quick else 4, 8 * elements if args.quick else 4 * elements)  # 2 buckets, 8 buckets
    return tell("weights", figures, args.json, elements=elements, threads=thread_count(), block_bytes=BLOCK_BYTES, copy_bytes_per_s=copy[0])


if __name__ == "__main__":
    sys.exit(main())
