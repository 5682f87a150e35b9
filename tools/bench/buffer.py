#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""The trajectory buffer against plain files, in one run: tools/bench/buffer.py [--quick] [--json]. Exit status 1 where a target is missed.

Input: groups of 8 trajectories of 4,096 tokens with routes of 24 layers x top-8 of 128 experts, uniform (1,000 groups; --quick: 16).

put + get       a group goes the way of a run: one process writes 8 parts and seals them, while another takes the groups that are ready, reads them back
                whole and closes them. Baseline: the same stored bytes written to one file, with the same number of fsyncs, in turns with it, every
                32 groups, which is the limit too. Both in MB of stored bytes a second. Once with the codec of the routes, which is processor time and in a run spread over
                all ranks, and once with a codec that remembers its results
metadata        calls that name a file of the run directory (open, stat, rename, link, unlink, mkdir, ...), whether they succeed or not, seen by strace in a
                child that puts, takes, reads, trains and retires steps of 8 groups as leaders and ranks do, with one rollout process that says where each sample
                is; of 41 steps less those of 1. Groups are small, and segments of parts by as much, so that those are begun and removed as often as with large
                ones. Baseline and limit: a file of its own for each group, created, opened to be read, and removed
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
SEALED = storage.SEALED_BYTES // 2800  # groups in a segment of sealed ones
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


class Rollout:
    """What the rollout leader and its ranks do, in one process."""

    def __init__(self, run: RunDir):
        self.run, self.epoch = run, run.new_epoch(Role.ROLLOUT)
        self.writer, self.view = BufferWriter(run, self.epoch), BufferView(run)
        self.view.own(self.writer.journal)

    def put(self, made: list[Trajectory]) -> None:
        group = made[0].group_id
        self.writer.start(group, "t")
        self.view.poll_own()
        for t in made:
            self.writer.told(group, t.sample, *write_part(self.run, self.epoch, [t]))
        self.writer.seal(group, list(range(len(made))))
        self.view.poll_own()


class Trainer:
    """What the trainer leader and its ranks do, in one process."""

    def __init__(self, run: RunDir):
        self.run, self.step = run, 0
        self.queue, self.reader = TrainerQueue(run, run.new_epoch(Role.TRAINER), 0), GroupReader(run.buffer_dir)

    def take(self, count: int = 1) -> list[GroupInfo]:
        self.step += 1
        self.queue.poll()
        return list(self.queue.take(count, 1, self.step).groups)

    def read(self, group: GroupInfo) -> None:
        self.reader.group(group.sealed)

    def close(self, groups: list[GroupInfo]) -> None:
        self.queue.trained([g.group_id for g in groups], 1, self.step)

    def retire(self) -> None:
        self.queue.retire(self.step)

    def turn(self) -> None:
        """The way of one group."""
        (taken,) = self.take()
        self.read(taken)
        self.close([taken])


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


def stored_bytes(trainer: Trainer, group: int) -> bytes:
    """What a group takes on disk."""
    folder, at = trainer.run.buffer_dir, trainer.queue.state.groups[group].sealed
    places = [(groups_dir(folder) / at.segment, at.offset, at.size)]
    places += [(parts_dir(folder) / p.segment, p.offset, p.size) for p in trainer.reader.sealed(at).places]
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


def produce(run: RunDir, groups: int, pipe) -> None:
    """The rollout's end, in a process of its own as in a run: says when each group is ready, and after each round how many fsyncs it took."""
    rollout, made = Rollout(run), samples()
    rollout.put(made)  # compiles
    pipe.send("ready")
    for first in range(1, groups + 1, ROUND):
        part = [numbered(made, group) for group in range(first, min(first + ROUND, groups + 1))]
        pipe.recv()
        with counting_fsyncs() as fsyncs:
            for group in part:
                rollout.put(group)
                pipe.send("ready")
        pipe.send(fsyncs[0])


def put_and_get(folder: Path, groups: int) -> tuple[float, float]:
    """(MB/s of the buffer, of plain files) in stored bytes."""
    run = make_run(folder)
    pipe, other = multiprocessing.Pipe()
    producer = multiprocessing.get_context("fork").Process(target=produce, args=(run, groups, other))
    producer.start()
    other.close()
    pipe.recv()
    trainer = Trainer(run)
    trainer.turn()  # compiles
    seconds, plain, stored = 0.0, 0.0, 0
    for first in range(1, groups + 1, ROUND):
        part = range(first, min(first + ROUND, groups + 1))
        with counting_fsyncs() as fsyncs:
            start = time.perf_counter()
            pipe.send("begin")
            for _ in part:
                pipe.recv()
                trainer.turn()
            seconds += time.perf_counter() - start
        fsyncs = fsyncs[0] + pipe.recv()
        data = b"".join(stored_bytes(trainer, group) for group in part)
        plain += plain_seconds(folder / "plain", data, fsyncs)
        stored += len(data)
        trainer.retire()
    producer.join()
    return stored / 1e6 / seconds, stored / 1e6 / plain


def bandwidth(folder: Path, groups: int) -> list[dict]:
    with codec_for_nothing():
        apart = put_and_get(folder / "apart", groups)
    whole = put_and_get(folder / "whole", groups)
    return [figure(f"put + get, {name}", "MB/s", value, plain, plain, least=0.7, of_ratio=True)
            for name, (value, plain) in (("codec of the routes apart", apart), ("with the codec", whole))]


def child(folder: Path, steps: int) -> None:
    """What strace looks at. Phases are told apart by calls with names that say so."""
    storage.PARTS_BYTES = storage.PARTS_BYTES * 32 // 10_000  # as many of these small groups in a segment as it holds large ones
    run = make_run(folder)
    rollout, trainer, made = Rollout(run), Trainer(run), samples(tokens=64, layers=1)

    def phase(name: str) -> None:
        os.access(run.path / f"phase-{name}", os.F_OK)

    for step in range(steps):
        phase("stored")
        for group in range(step * STEP, (step + 1) * STEP):
            rollout.put(numbered(made, group))
        phase("taken")
        taken = trainer.take(STEP)
        phase("read")
        for group in taken:
            trainer.read(group)
        phase("trained")
        trainer.close(taken)
        phase("retired")
        trainer.retire()
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


def history(folder: Path, groups: int) -> tuple[Rollout, Trainer]:
    """A run in which `groups` groups were trained, all still on disk (in segments of sealed groups that hold nothing), and 32 wait."""
    run = make_run(folder, "buffer.keep_trained_gb=1")
    facts = {"task": "t", "trajectories": 8, "samples": 8, "oldest_version": 1, "tokens": 100, "reward_mean": 0.5}
    ids = range(groups)
    made = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.ROLLOUT, run.new_epoch(Role.ROLLOUT)))
    made.append(*({"kind": "start", "group": g, "task": "t"} for g in ids),
                *({"kind": "ready", "group": g, **facts, "sealed": [f"e000001.bench.1.{g // SEALED:04d}.seg", 0, 1]} for g in ids))
    made.close()
    used = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.TRAINER, run.new_epoch(Role.TRAINER)))
    used.append(*({"kind": "trained", "groups": [g], "step": 0, "version": 1} for g in ids[:-32]))
    used.close()
    for n in range(-(-groups // SEALED)):
        (groups_dir(run.buffer_dir) / f"e000001.bench.1.{n:04d}.seg").touch()
    rollout, trainer = Rollout(run), Trainer(run)
    trainer.retire()
    return rollout, trainer


def flat(folder: Path, groups: int, repeats: int) -> list[dict]:
    runs, made = [history(folder, n) for n in (1000, groups)], samples(tokens=64, layers=1)
    seconds: dict[str, tuple[list[float], list[float]]] = {k: ([], []) for k in ("put", "poll", "take", "counts", "retire")}
    first = groups + 1
    for n in range(repeats):
        for side in (0, 1) if n % 2 else (1, 0):
            rollout, trainer = runs[side]

            def timed(name, call, side=side):
                start = time.perf_counter()
                call()
                seconds[name][side].append(time.perf_counter() - start)

            group = numbered(made, first + n)
            timed("put", lambda rollout=rollout, group=group: rollout.put(group))
            timed("poll", trainer.queue.poll)
            taken = []
            timed("take", lambda trainer=trainer, taken=taken: taken.extend(trainer.take()))
            timed("counts", trainer.queue.state.counts)
            trainer.close(taken)
            timed("retire", trainer.retire)
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
