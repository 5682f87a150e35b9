"""Pools on a real Slurm cluster: their job with stub ranks, and one with real engines that is killed while it works."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from miles.buffer import BufferView, Status
from miles.cluster import slurm, submit
from miles.cluster.attach import pool_facts, pool_rows
from miles.cluster.render import render_pool
from miles.config import load_config, load_site
from miles.core import EnvironmentFault, Role
from miles.models import prepare
from miles.report import report
from miles.rollout.pool import read_state
from miles.rundir import PoolDir, PoolFacts, RunDir
from tests.cluster.stubs import PROJECT, StubRun

pytestmark = pytest.mark.cluster
SITE = load_site(PROJECT / "configs/sites/dev.toml").model_copy(update={"python": sys.executable})


@pytest.fixture
def queue(devcluster, monkeypatch):
    """Submits a pool with stub ranks, as Slurm options in its script say; cancelled after the test."""
    jobs = []

    def go(run, *options: str):
        def stubs(*args):
            text = render_pool(*args[:3], SITE.model_copy(update={"sbatch": options}))
            return text.replace("--launcher slurm", "--launcher slurm --rollout tests.cluster.stub_rollout")

        monkeypatch.setattr(submit, "render_pool", stubs)
        pool = PoolDir.create(run.run, PoolFacts(nodes=2, in_flight=4, time_limit="00:10:00"))
        jobs.append(submit.submit_pool(pool))
        return pool, jobs[-1]

    yield go
    for job in jobs:
        slurm.cancel(job.job_id)


def running(pool, epoch):
    return [p for p in pool.folder.glob(f"rollout-100?.e{epoch:04d}.log") if f"epoch {epoch}" in p.read_text()]


def test_a_pool_is_a_job_of_its_own_and_ends_with_the_run(queue, make_run):
    run = make_run(10)
    pool, job = queue(run)
    run.wait_for(lambda: len(running(pool, 1)) == 2, 60)
    records = [json.loads(p.read_text()) for p in sorted((pool.folder / "ranks").iterdir())]
    assert len({r["node"] for r in records}) == 2
    assert [(r["pool"], r["job_id"], r["state"], r["nodes"]) for r in pool_rows(run.run)] == [(1, job.job_id, "running", 2)]
    run.run.finish("test")
    run.wait_for(lambda: job.done(force_check=True), 60)
    assert slurm.squeue(job.job_id)[job.job_id].components == ("COMPLETED",)
    assert [r["state"] for r in pool_rows(run.run)] == ["finished"] and run.living() == []


def test_a_preempted_pool_hands_back_its_epoch_and_joins_again(queue, make_run):
    run = make_run(10)
    pool, job = queue(run, "--partition=low")
    run.wait_for(lambda: len(running(pool, 1)) == 2, 60)
    slurm.command(["sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"])
    run.wait_for(lambda: (pool.folder / "exit.json").exists(), 60)
    assert json.loads((pool.folder / "exit.json").read_text())["outcome"] == "requeue" and pool.current_epoch(Role.ROLLOUT) == 2
    run.wait_for(lambda: len(running(pool, 3)) == 2, 120)
    run.run.finish("test")
    run.wait_for(lambda: job.done(force_check=True), 60)
    assert run.living() == []


def test_a_pool_that_slurm_refuses_leaves_nothing(devcluster, make_run):
    run = make_run(5, "cluster.rollout.gpus_per_node=9")
    with pytest.raises(EnvironmentFault, match="sbatch refused the job"):
        submit.submit_pool(PoolDir.create(run.run, PoolFacts(nodes=1, in_flight=4, time_limit="00:10:00")))
    assert run.run.pools() == []


# -- everything real ---------------------------------------------------------------------------------------------------------
def processes_below(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry))
    found = [pid]
    for p in found:
        found += children.get(p, [])
    return found


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_a_run_loses_nothing_with_a_pool_that_is_killed_at_work(devcluster, tmp_path):
    steps = 8
    config = load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"run.steps={steps}", "rollout.pool_lease_s=8"))
    prepare(config)
    run = RunDir.create(config)
    watch = StubRun(run)
    pool = PoolDir.create(run, pool_facts(config, 1, None, None))
    jobs = [submit.submit(run, "configs/tiny_async.toml"), submit.submit_pool(pool)]

    def state():
        return read_state(pool.pool_epoch_dir(1, pool.current_epoch(Role.ROLLOUT)))[0]

    try:
        watch.wait_for(lambda: (pool.folder / "start.json").exists() and (s := state()).done and len(s.running) >= 4, 400)
        started = json.loads((pool.folder / "start.json").read_text())["pid"]
        ranks = [p for r in (pool.folder / "ranks").glob("*.json") for p in processes_below(json.loads(r.read_text())["pid"])]
        lost = state()
        for pid in [started, *ranks]:
            with contextlib.suppress(ProcessLookupError):  # it has gone with its parent
                os.kill(pid, signal.SIGKILL)
        watch.wait_for(lambda: jobs[0].done(force_check=True), 600)
    finally:
        for job in jobs:
            if not job.done(force_check=True):
                slurm.cancel(job.job_id)

    assert run.finished and watch.exit(1)["outcome"] == "finished"
    assert pool.current_epoch(Role.ROLLOUT) == 2 and len(lost.done) > 0, "the run's leader gave the pool up; its samples had been used"
    figures = report(run.path)
    assert figures["steps"] == steps and figures["groups_trained_twice"] == 0 and figures["tokens"]["unaccounted"] == 0
    assert figures["trajectories"]["status"]["retried:pool"] >= 1
    view = BufferView(run)
    view.poll()
    trained = view.state.with_status(Status.TRAINED)
    assert len(trained) == steps * config.trainer.groups_per_step and all(g.samples == config.rollout.group_size for g in trained)
    deadline = time.monotonic() + 20
    while watch.living() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert watch.living() == []
