#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""The trajectory buffer against plain files, in one run: tools/bench/buffer.py [--quick] [--json]. Exit status 1 where a target is missed.

Input: groups of 8 trajectories of 4,096 tokens with routes of 24 layers x top-8 of 128 experts, uniform (1,000 groups; --quick: 16).

put + get       a group goes the way of a run: one process writes 8 parts and seals them, while another takes the groups that are ready, reads them back
                whole and closes them. Baseline: the same stored bytes written to one file, with the same number of fsyncs, in turns with it, every
                32 groups, which is the limit too. Both in MB of stored bytes a second. Once with the codec of the routes, which is processor time and in a run spread over
                all ranks, and once with a codec that remembers its results
metadata        calls that name a file of the run directory (open, stat, rename, link, unlink, mkdir, ...), whether they succeed or not, seen by strace in a
                child that puts, takes, reads, trains and retires steps of 8 groups, with one rollout process; of 3 steps less those of 1. The 256 folders of
                groups are there, as soon in a run. Baseline and limit: a file of its own for each group, created, opened to be read, and removed
16 writers      the same parts by 16 processes at once and by one; limit: as many times as there are processors
flat            what a call costs in a run with 100,000 groups in journals and on disk (--quick: 20,000) against one with 1,000, in turns, medians.
                The journal of either run ends with a few groups that wait. Limit: no difference
"""

import argparse
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from miles.buffer import (
    BufferView,
    BufferWriter,
    GroupInfo,
    GroupReader,
    TrainerQueue,
    routes,
    storage,
    write_part,
)
from miles.buffer.storage import Parts, groups_dir, parts_dir
from miles.buffer.view import journal_name
from miles.config import load_config
from miles.core import NO_VERSION, Role, Trajectory
from miles.rundir import JournalWriter, RunDir
from tools.bench.table import figure, tell

ROOT = Path(__file__).resolve().parents[2]
SAMPLES, TOKENS, LAYERS, EXPERTS, CHOSEN = 8, 4096, 24, 128, 8
WRITERS = 16
STEP = 8  # groups
STEPS = 40
ROUND = 32  # groups between two turns of the baseline
CALLS = "open,openat,creat,stat,lstat,newfstatat,statx,access,rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat"


def make_run(folder: Path, *settings: str) -> RunDir:
    return RunDir.create(load_config(str(ROOT / "configs/tiny_async.toml"), (f"run.root={folder}", "buffer.keep_trained_gb=0", *settings)))


def samples(tokens: int = TOKENS, layers: int = LAYERS) -> list[Trajectory]:
    """The trajectories of group 0."""
    rng, out = np.random.default_rng(0), []
    for s in range(SAMPLES):
        mask = (np.arange(tokens) % 64 >= 32).astype(np.uint8)
        drawn = rng.random((tokens - 1, layers, EXPERTS), np.float32).argpartition(CHOSEN, axis=-1)[..., :CHOSEN].astype(np.uint8)
        out.append(Trajectory(
            group_id=0, sample=s, task_id="t", tokens=rng.integers(0, 150_000, tokens).astype(np.int32), loss_mask=mask,
            logprobs=np.where(mask, -rng.exponential(size=tokens), 0).astype(np.float32), versions=np.where(mask, 1, NO_VERSION).astype(np.int32),
            routes=drawn if layers else None, reward=float(s % 2), finish_reason="done", turns=8, exact=True,
        ))
    return out


def numbered(made: list[Trajectory], group: int) -> list[Trajectory]:
    return [replace(t, group_id=group) for t in made]


class Both:
    """Both ends of the buffer of a run, in one process: what its leaders do."""

    def __init__(self, run: RunDir):
        self.run, self.step = run, 0
        self.epoch = run.new_epoch(Role.ROLLOUT)
        self.writer, self.view = BufferWriter(run, self.epoch), BufferView(run)
        self.view.own(self.writer.journal)
        self.reader = GroupReader(run.buffer_dir)
        self.queue = TrainerQueue(run, run.new_epoch(Role.TRAINER), 0)

    def put(self, made: list[Trajectory]) -> None:
        group = made[0].group_id
        self.writer.start(group, "t")
        self.view.poll_own()
        for t in made:
            self.writer.told(group, t.sample, *write_part(self.run, self.epoch, [t]))
        self.writer.seal(group, list(range(len(made))))
        self.view.poll_own()

    def take(self, count: int = 1) -> list[GroupInfo]:
        self.step += 1
        self.queue.poll()
        return list(self.queue.take(count, 1, self.step).groups)

    def read(self, group: GroupInfo) -> None:
        self.reader.group(group.sealed)

    def close(self, groups: list[GroupInfo]) -> None:
        self.queue.trained([g.group_id for g in groups], 1, self.step)


@contextmanager
def counting_fsyncs():
    """[how many] of what runs inside."""
    real, seen = os.fsync, [0]

    def fsync(fd):
        seen[0] += 1
        return real(fd)

    os.fsync = fsync
    try:
        yield seen
    finally:
        os.fsync = real


@contextmanager
def codec_for_nothing():
    """The codec of the routes gives again what it gave for the same input, so that what runs inside takes as long as without it."""
    real, stored, read = (routes.encode_routes, routes.RouteReader.read), {}, {}

    def encode(array):
        if id(array) not in stored:
            stored[id(array)] = real[0](array)
        return stored[id(array)]

    def decode(reader, layers=None, rows=None):
        key = bytes(reader.header)
        reader._source[:]  # the bytes are read all the same
        if key not in read:
            read[key] = real[1](reader, layers, rows)
        return read[key]

    routes.encode_routes, routes.RouteReader.read = encode, decode
    try:
        yield
    finally:
        routes.encode_routes, routes.RouteReader.read = real


def stored_bytes(both: Both, group: int) -> bytes:
    """What a group takes on disk."""
    folder, at = both.run.buffer_dir, both.queue.state.groups[group].sealed
    places = [(groups_dir(folder) / at.segment, at.offset, at.size)]
    places += [(parts_dir(folder) / p.segment, p.offset, p.size) for p in both.reader.sealed(at).places]
    found = []
    for path, offset, size in places:
        with open(path, "rb") as f:
            f.seek(offset)
            found.append(f.read(size))
    return b"".join(found)


def plain_seconds(path: Path, data: bytes, fsyncs: int) -> float:
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    size = -(-len(data) // fsyncs)
    for n in range(fsyncs):
        os.write(fd, memoryview(data)[n * size : (n + 1) * size])
        os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - start


def produce(both: Both, made: list[Trajectory], groups: range, pipe) -> None:
    """The rollout's end, in a process of its own as in a run: says when each group is ready, and in the end how many fsyncs that took."""
    made = [numbered(made, group) for group in groups]
    pipe.send("prepared")
    pipe.recv()
    with counting_fsyncs() as fsyncs:
        for samples in made:
            both.put(samples)
            pipe.send("ready")
    pipe.send(fsyncs[0])


def consume(both: Both, count: int, pipe) -> None:
    """The trainer's end: each group that is ready is taken, read back whole, and trained."""
    for _ in range(count):
        pipe.recv()
        consume_one(both)


def consume_one(both: Both) -> None:
    (taken,) = both.take()
    both.read(taken)
    both.close([taken])


def put_and_get(folder: Path, groups: int) -> tuple[float, float]:
    """(MB/s of the buffer, of plain files) in stored bytes."""
    both, made, context = Both(make_run(folder)), samples(), multiprocessing.get_context("fork")
    both.put(made)  # compiles
    consume_one(both)
    seconds, plain, stored = 0.0, 0.0, 0
    for first in range(1, groups + 1, ROUND):
        part = range(first, min(first + ROUND, groups + 1))
        pipe, other = context.Pipe()
        producer = context.Process(target=produce, args=(both, made, part, other))
        producer.start()
        other.close()
        pipe.recv()
        with counting_fsyncs() as fsyncs:
            start = time.perf_counter()
            pipe.send("begin")
            consume(both, len(part), pipe)
            seconds += time.perf_counter() - start
        fsyncs = fsyncs[0] + pipe.recv()
        producer.join()
        data = b"".join(stored_bytes(both, group) for group in part)
        plain += plain_seconds(folder / "plain", data, fsyncs)
        stored += len(data)
        both.queue.retire(both.step)
    return stored / 1e6 / seconds, stored / 1e6 / plain


def bandwidth(folder: Path, groups: int) -> list[dict]:
    with codec_for_nothing():
        apart = put_and_get(folder / "apart", groups)
    whole = put_and_get(folder / "whole", groups)
    return [figure(f"put + get, {name}", "MB/s", value, plain, plain, least=0.7, of_ratio=True)
            for name, (value, plain) in (("codec of the routes apart", apart), ("with the codec", whole))]


def child(folder: Path, steps: int) -> None:
    """What strace looks at. Phases are told apart by calls with names that say so."""
    storage.PARTS_BYTES = storage.PARTS_BYTES * 5 // 1000  # as many of these small groups in a segment as it holds large ones
    both, made = Both(make_run(folder)), samples(tokens=64, layers=1)

    def phase(name: str) -> None:
        os.access(both.run.path / f"phase-{name}", os.F_OK)

    for step in range(steps):
        phase("stored")
        for group in range(step * STEP, (step + 1) * STEP):
            both.put(numbered(made, group))
        phase("taken")
        taken = both.take(STEP)
        phase("read")
        for group in taken:
            both.read(group)
        phase("trained")
        both.close(taken)
        phase("retired")
        both.queue.retire(both.step)
    phase("end")


def metadata_calls(folder: Path, steps: int) -> Counter:
    """(phase, call) -> how many, of `steps` steps."""
    work = folder / f"traced{steps}"
    trace = folder / f"trace{steps}"
    subprocess.run(["strace", "-f", "-qq", "-s", "512", "-o", trace, "-e", f"trace={CALLS}", sys.executable, __file__, "--child", work, str(steps)], check=True)
    seen, phase = Counter(), "end"
    for line in trace.read_text(errors="replace").splitlines():
        found = re.search(r'^\d+\s+(\w+)\(.*"' + re.escape(str(work)) + r'/([^"]*)"', line)
        if not found:
            continue
        if mark := re.search(r"/phase-(\w+)$", found[2]):
            phase = mark[1]
        elif phase != "end":
            seen[phase, found[1]] += 1
    return seen


def metadata(folder: Path) -> list[dict]:
    stored, life = "metadata calls of a group until it is ready", "metadata calls of a group, all its life"
    if not shutil.which("strace"):
        return [figure(name, "", None, plain, plain, most=6, missing="strace is not installed") for name, plain in ((stored, 1), (life, 3))]
    many, few = metadata_calls(folder, 1 + STEPS), metadata_calls(folder, 1)
    each = {key: (many[key] - few[key]) / (STEPS * STEP) for key in many}
    by_phase = Counter()
    for (phase, _), count in each.items():
        by_phase[phase] += count
    return [figure(stored, "", by_phase["stored"], 1, 1, most=6), figure(life, "", sum(by_phase.values()), 3, 3, most=6, **by_phase)]


def write_parts(run: RunDir, epoch: int, made: list[Trajectory], first: int, groups: int, start) -> None:
    write_part(run, epoch, [replace(made[0], group_id=0)])  # warm
    start.wait()
    for group in range(first, first + groups):
        for t in made:
            write_part(run, epoch, [replace(t, group_id=group)])


def writers(folder: Path, groups_each: int) -> list[dict]:
    context, made, rates = multiprocessing.get_context("fork"), samples(), []
    for count in (1, WRITERS):
        run = make_run(folder)
        epoch, start = run.new_epoch(Role.ROLLOUT), context.Barrier(count + 1)
        each = groups_each * WRITERS // count
        processes = [context.Process(target=write_parts, args=(run, epoch, made, 1 + n * each, each, start)) for n in range(count)]
        for p in processes:
            p.start()
        start.wait()
        begin = time.perf_counter()
        for p in processes:
            p.join()
        seconds = time.perf_counter() - begin
        if any(p.exitcode for p in processes):
            raise SystemExit("a writer failed")
        found = Parts(run.buffer_dir).groups
        parts = [p for g in range(1, 1 + groups_each * WRITERS) for p in found[g].values()]
        if len(parts) != groups_each * WRITERS * SAMPLES:
            raise SystemExit(f"{len(parts)} parts, of {groups_each * WRITERS * SAMPLES}")
        rates.append(sum(p.place.size for p in parts) / 1e6 / seconds)
        shutil.rmtree(run.path)
    return [figure(f"parts by {WRITERS} writers, against one", "MB/s", rates[1], rates[0], min(WRITERS, os.cpu_count()) * rates[0], least=1.0, of_ratio=True)]


def history(folder: Path, groups: int) -> Both:
    """A run in which `groups` groups were trained, all still on disk (in segments that hold nothing, a sealed one for each 300), and 32 wait."""
    run = make_run(folder, "buffer.keep_trained_gb=1")
    facts = {"task": "t", "trajectories": 8, "samples": 8, "oldest_version": 1, "tokens": 100, "reward_mean": 0.5}
    ids = range(groups)
    made = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.ROLLOUT, run.new_epoch(Role.ROLLOUT)))
    made.append(*({"kind": "start", "group": g, "task": "t"} for g in ids),
                *({"kind": "ready", "group": g, **facts, "sealed": [f"e000001.bench.1.{g // 300:04d}.seg", 0, 1]} for g in ids))
    made.close()
    used = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.TRAINER, run.new_epoch(Role.TRAINER)))
    used.append(*({"kind": "trained", "groups": [g], "step": 0, "version": 1} for g in ids[:-32]))
    used.close()
    for n in range(-(-groups // 300)):
        (groups_dir(run.buffer_dir) / f"e000001.bench.1.{n:04d}.seg").touch()
    both = Both(run)
    both.queue.retire(0)
    return both


def flat(folder: Path, groups: int, repeats: int) -> list[dict]:
    runs, made = [history(folder, n) for n in (1000, groups)], samples(tokens=64, layers=1)
    seconds: dict[str, tuple[list[float], list[float]]] = {k: ([], []) for k in ("put", "poll", "take", "counts", "retire")}
    first = groups + 1
    for n in range(repeats):
        for side in (0, 1) if n % 2 else (1, 0):
            both = runs[side]

            def timed(name, call, side=side):
                start = time.perf_counter()
                call()
                seconds[name][side].append(time.perf_counter() - start)

            group = numbered(made, first + n)
            timed("put", lambda both=both, group=group: both.put(group))
            timed("poll", both.queue.poll)
            taken = []
            timed("take", lambda both=both, taken=taken: taken.extend(both.take()))
            timed("counts", both.queue.state.counts)
            both.close(taken)
            timed("retire", lambda both=both: both.queue.retire(both.step))
    medians = {name: [1e6 * statistics.median(side) for side in sides] for name, sides in seconds.items()}
    return [figure(f"{name}, {groups:,} groups against 1,000", "us", many, few, few, most=1.25, of_ratio=True) for name, (few, many) in medians.items()]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="16 groups instead of 1,000, 20,000 in the journals instead of 100,000")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="miles-bench-buffer-") as name:
        folder = Path(name)
        figures = bandwidth(folder, 16 if args.quick else 1000)
        figures += metadata(folder)
        figures += writers(folder, 1 if args.quick else 8)
        figures += flat(folder, 20_000 if args.quick else 100_000, 40 if args.quick else 200)
    return tell("buffer", figures, args.json)


if __name__ == "__main__":
    sys.exit(main())
