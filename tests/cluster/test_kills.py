"""The real job, every part real, while its processes are killed one after the other."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from miles.buffer import BufferView, Status
from miles.cluster import slurm, submit
from miles.cluster.progress import read_steps
from miles.config import load_config
from miles.models import prepare
from miles.report import report
from miles.rundir import RunDir
from miles.weights.acks import read_acks
from miles.weights.store import WeightStore
from tests.cluster.stubs import StubRun

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(1500)]
CONFIG = "configs/tiny_async.toml"


def engine_pid(run: RunDir, epoch: int, rank: int) -> int:
    """The SGLang server below one rollout rank: its only child of that name."""
    rank_pid = StubRun(run).records(1, "rollout", epoch)[rank]["pid"]
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                words = (proc / "cmdline").read_bytes()
                parent = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == rank_pid and b"miles.engine.launch" in words:
                return int(proc.name)
    raise AssertionError(f"rollout rank {rank} (process {rank_pid}) has no SGLang child")


def test_a_run_survives_the_kill_of_any_of_its_processes(devcluster, tmp_path):
    steps = 14
    config = load_config(CONFIG, (f"run.root={tmp_path}", f"run.steps={steps}", "checkpoint.every_steps=2"))
    prepare(config)
    run = RunDir.create(config)
    watch = StubRun(run)
    job = submit.submit(run, CONFIG)

    def trained(step: int) -> None:
        watch.wait_for(lambda: (rows := read_steps(run)) and rows[-1]["step"] >= step, 400)

    try:
        trained(3)
        os.kill(watch.records(1, "trainer", 1)[1]["pid"], signal.SIGKILL)
        trained(6)
        os.kill(engine_pid(run, 1, 0), signal.SIGKILL)
        time.sleep(2)
        trained(9)
        epoch = run.current_epoch("rollout")  # a rank may have given up on its engine meanwhile
        os.kill(watch.records(1, "rollout", epoch)[1]["pid"], signal.SIGKILL)
        watch.wait_for(lambda: job.done(force_check=True), 600)
    finally:
        if not job.done(force_check=True):
            slurm.cancel(job.job_id)

    assert run.finished and watch.exit(1)["outcome"] == "finished"
    assert run.current_epoch("trainer") == 2 and run.current_epoch("rollout") == epoch + 1
    figures = report(run.path)
    assert figures["steps"] == steps
    assert figures["groups_trained_twice"] == 0 and figures["tokens"]["unaccounted"] == 0
    view = BufferView(run)
    view.poll()
    by_step = Counter(g.step for g in view.state.with_status(Status.TRAINED))
    assert by_step == {step: config.trainer.groups_per_step for step in range(1, steps + 1)}
    assert figures["trajectories"]["moved"] > 0, "trajectories under the killed engine go on with the other"
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
