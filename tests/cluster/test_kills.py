"""The real job, every part real, while its processes are killed one after the other."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from miles.cluster import slurm, submit
from miles.cluster.progress import read_steps
from miles.config import load_config
from miles.models import prepare
from miles.report import report
from miles.rundir import RunDir
from miles.weights.acks import read_acks
from miles.weights.store import WeightStore
from tests.cluster.crash_checks import check_ends, check_journals, check_lineage, check_versions
from tests.cluster.stubs import StubRun

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(1500)]
CONFIG = "configs/tiny_async.toml"


def engine_pid(run: RunDir, epoch: int, rank: int) -> int | None:
    """The SGLang server below one rollout rank, its only child of that name; None while there is none."""
    records = StubRun(run).records(1, "rollout", epoch)
    if len(records) <= rank:
        return None
    rank_pid = records[rank]["pid"]
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                words = (proc / "cmdline").read_bytes()
                parent = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == rank_pid and b"miles.engine.launch" in words:
                return int(proc.name)
    return None


@pytest.mark.parametrize("seed", [1])
def test_a_run_survives_random_kills_of_its_processes(devcluster, tmp_path, seed):
    """Five and more, at random times: every kind of process once, an engine first (while all is at work), and two of any kind."""
    steps, rng = 16, random.Random(seed)
    config = load_config(CONFIG, (f"run.root={tmp_path}", f"run.steps={steps}", "checkpoint.every_steps=2", "weights.keep_keyframes=1000"))
    prepare(config)
    run = RunDir.create(config)
    watch = StubRun(run)
    job = submit.submit(run, CONFIG)
    kinds = ["trainer", "rollout", *(rng.choice(["trainer", "rollout", "engine"]) for _ in range(2))]
    rng.shuffle(kinds)
    kinds = ["engine", *kinds]
    done = 0

    def kill(kind: str) -> None:
        epoch = run.current_epoch("trainer" if kind == "trainer" else "rollout")
        rank = rng.randrange(2)
        if kind == "engine":
            watch.wait_for(lambda: engine_pid(run, run.current_epoch("rollout"), rank), 200)
            pid = engine_pid(run, run.current_epoch("rollout"), rank)
        else:
            watch.wait_for(lambda: len(watch.records(1, kind, epoch)) == 2, 100)
            pid = watch.records(1, kind, epoch)[rank]["pid"]
        os.kill(pid, signal.SIGKILL)

    try:
        for kind in kinds:
            watch.wait_for(lambda: (rows := read_steps(run)) and rows[-1]["step"] >= done + 2, 400)
            time.sleep(rng.uniform(0, 5))
            kill(kind)
            done = read_steps(run)[-1]["step"]
            time.sleep(rng.uniform(0, 10))
        watch.wait_for(lambda: job.done(force_check=True), 900)
    finally:
        print(f"seed {seed}: {kinds}")
        if not job.done(force_check=True):
            slurm.cancel(job.job_id)

    assert run.finished and watch.exit(1)["outcome"] == "finished"
    assert run.current_epoch("trainer") == 1 + kinds.count("trainer") and run.current_epoch("rollout") == 1 + kinds.count("rollout")
    check_ends(run)
    check_lineage(run)
    check_versions(run)
    check_journals(run)
    figures = report(run.path)
    assert figures["trajectories"]["moved"] > 0, "trajectories under a killed engine go on with the other"
    assert figures["staleness"]["max"] <= config.buffer.max_staleness
    assert watch.living() == []


def test_a_requeued_job_goes_on_from_its_checkpoint_with_the_newest_weights(devcluster, tmp_path):
    config = load_config(CONFIG, (f"run.root={tmp_path}", "run.steps=6", "trainer.groups_per_step=2", "buffer.capacity_groups=4", "checkpoint.every_steps=2"))
    prepare(config)
    run = RunDir.create(config)
    watch = StubRun(run)
    job = submit.submit(run, CONFIG)
    try:
        watch.wait_for(lambda: (rows := read_steps(run)) and rows[-1]["step"] >= 3, 400)
        slurm.command(["scontrol", "requeue", job.job_id])
        watch.wait_for(lambda: run.attempts() == [1, 2], 120)
        watch.wait_for(lambda: run.finished and job.done(force_check=True), 400)
    finally:
        if not job.done(force_check=True):
            slurm.cancel(job.job_id)
    figures = report(run.path)
    assert (figures["steps"], figures["attempts"], figures["groups_trained_twice"], figures["tokens"]["unaccounted"]) == (6, 2, 0, 0)
    store = WeightStore(run)
    last = store.manifest(store.newest())
    assert last.step == 6
    again = next(m for m in map(store.manifest, store.versions()) if m.epoch == 2)  # the first version of the second attempt
    assert again.encoding == "keyframe" and again.step >= 2  # a checkpoint: that of step 2, or of the stop
    assert run.current_epoch("trainer") == run.current_epoch("rollout") == 2  # both steps came up at the first try
    acks = read_acks(run, run.current_epoch("rollout"))
    assert all(a.version >= again.version and not a.error for a in acks.values()) and len(acks) == 2
    assert watch.living() == []
