"""Trainer and engines in turns on the same (virtual) GPUs of a real Slurm job, everything real, while an engine and the trainer are killed."""

import os
import signal
from collections import Counter

import h5py
import pytest

from miles.buffer import BufferView, Status
from miles.cluster import slurm, submit
from miles.cluster.progress import read_steps
from miles.config import load_config
from miles.models import prepare
from miles.report import report
from miles.rundir import RunDir
from tests.cluster.stubs import StubRun
from tests.cluster.test_kills import engine_pid

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(900)]
CONFIG = "configs/tiny_colocated.toml"


def test_a_colocated_run_survives_the_kill_of_an_engine_and_of_the_trainer(devcluster, tmp_path):
    steps = 6
    config = load_config(CONFIG, (f"run.root={tmp_path}", f"run.steps={steps}", "checkpoint.every_steps=2", "rollout.group_size=4", "rollout.in_flight=8"))
    prepare(config)
    run = RunDir.create(config)
    watch = StubRun(run)
    job = submit.submit(run, CONFIG)

    def trained(step: int) -> None:
        watch.wait_for(lambda: (rows := read_steps(run)) and rows[-1]["step"] >= step, 300)

    try:
        trained(1)
        os.kill(engine_pid(run, 1, 0), signal.SIGKILL)
        trained(3)
        os.kill(watch.records(1, "trainer", 1)[1]["pid"], signal.SIGKILL)
        watch.wait_for(lambda: job.done(force_check=True), 300)
    finally:
        if not job.done(force_check=True):
            slurm.cancel(job.job_id)

    assert run.finished and watch.exit(1)["outcome"] == "finished"
    assert run.current_epoch("trainer") == 2
    records = [r for role in ("trainer", "rollout") for r in watch.records(1, role, run.current_epoch(role))]
    assert len({r["node"] for r in records}) == 1, "both steps are on the same node"
    figures = report(run.path)
    assert (figures["steps"], figures["groups_trained_twice"], figures["tokens"]["unaccounted"]) == (steps, 0, 0)
    assert figures["staleness"]["max"] <= 1, "0, but for what waited when the trainer was started again"
    assert figures["logprob_abs_diff"]["max"] < 1e-4
    assert figures["turns"]["engines"]["release_s"]["count"] >= steps and figures["turns"]["trainer"]["turn_s"]["count"] == steps
    view = BufferView(run)
    view.poll()
    assert Counter(g.step for g in view.state.with_status(Status.TRAINED)) == dict.fromkeys(range(1, steps + 1), 2)
    alternate(run)
    assert watch.living() == []


def alternate(run: RunDir) -> None:
    """By the clocks of the logs: no engine took memory again while the trainer trained."""
    trained, taken = [], []
    for path in sorted((run.path / "attempts").glob("*/logs/*.h5")):
        with h5py.File(path, "r") as f:
            if "tables/steps" in f:
                for r in f["tables/steps"][...]:
                    begin = r["start"] + r["wait_s"] + r["fetch_s"] + r["turn_s"]
                    trained.append((begin, begin + r["resume_s"] + r["train_s"]))
            if "tables/turns" in f:
                taken += [r["time"] - r["resume_s"] for r in f["tables/turns"][...]]
    assert trained and taken and not any(begin < t < end for begin, end in trained for t in taken)
