"""Pools without engines: what may be attached, and the supervisor of a pool with stub ranks under mpiexec."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from miles.cluster.attach import pool_facts, pool_rows
from miles.cluster.decide import Cause, Outcome
from miles.cluster.pool import after_end, when_told
from miles.cluster.slurm import scrubbed
from miles.config import load_config
from miles.core import ConfigError, Role
from miles.rundir import PoolDir, PoolFacts
from tests.cluster.stubs import PROJECT


# -- what may be attached ----------------------------------------------------------------------------------------------------
def config(*overrides):
    return load_config("configs/tiny_async.toml", overrides)


def test_a_pool_has_the_size_of_the_run_s_own_ranks_where_nothing_was_said():
    """24 trajectories over 2 engines: 12 for each of a pool of 3."""
    assert pool_facts(config(), 3, None, None) == PoolFacts(nodes=3, in_flight=36, time_limit="00:30:00")
    assert pool_facts(config(), 3, 9, "1-00:00:00") == PoolFacts(nodes=3, in_flight=9, time_limit="1-00:00:00")


@pytest.mark.parametrize(("changes", "asked", "message"), [
    ({"finished": True}, (1, None, None), "the run is finished"),
    ({"overrides": ("weights.transport=broadcast",)}, (1, None, None), "engines of its own job alone"),
    ({"overrides": ("weights.transport=p2p",)}, (1, None, None), "engines of its own job alone"),
    ({}, (0, None, None), "--nodes 0"),
    ({}, (1001, None, None), "at most 1000"),
    ({}, (3, 2, None), "--in-flight 2 for 3 engines"),
    ({}, (1, None, "4 hours"), "--time-limit 4 hours"),
])
def test_what_cannot_be_attached_is_refused_before_anything_is_submitted(changes, asked, message):
    with pytest.raises(ConfigError, match=message):
        pool_facts(config(*changes.get("overrides", ())), *asked, finished=changes.get("finished", False))


# -- the supervisor's decision -----------------------------------------------------------------------------------------------
def cause(code):
    return Cause(Role.ROLLOUT, code, "it ended")


def test_the_end_of_a_pool_s_ranks():
    assert after_end(cause(137), finished=False, restarts=4, most=5) is None
    assert after_end(cause(137), finished=False, restarts=5, most=5).kind == "failed"
    assert after_end(cause(137), finished=True, restarts=0, most=5) == Outcome("finished", 0, "the run is finished")
    assert after_end(cause(0), finished=False, restarts=0, most=5).kind == "left"
    assert (failed := after_end(cause(3), finished=False, restarts=0, most=5)).kind == "failed" and failed.exit_code == 3


def test_a_notice_requeues_the_job_of_a_pool_and_nothing_else_does():
    assert when_told(signal.SIGUSR2, 1) == Outcome("requeue", 75, "preempted, or its time is up: it joins again when Slurm starts it again")
    assert when_told(signal.SIGUSR2, 0).exit_code == 0 and when_told(signal.SIGUSR2, 0).kind == "left"
    assert when_told(signal.SIGTERM, 1) == Outcome("left", 143, "told to leave (SIGTERM)")


# -- the supervisor with real processes --------------------------------------------------------------------------------------
@pytest.fixture
def pool(make_run):
    run = make_run(10)
    return run, PoolDir.create(run.run, PoolFacts(nodes=2, in_flight=4, time_limit="01:00:00"))


@pytest.fixture
def start(pool):
    started = []

    def go():
        argv = [sys.executable, "-m", "miles.cluster.pool", str(pool[0].path), "1", "--launcher", "local", "--rollout", "tests.cluster.stub_rollout"]
        started.append(subprocess.Popen(argv, cwd=PROJECT, env={**scrubbed(os.environ), "OMP_NUM_THREADS": "1"}))
        return started[-1]

    yield go
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)


def ranks(pool, epoch):
    """Process ids of a pool's ranks when all of them run."""
    run, folder = pool
    records = sorted((folder.folder / "ranks").glob(f"rollout-100?.e{epoch:04d}.json"))
    logs = [folder.folder / f"rollout-{1000 + r}.e{epoch:04d}.log" for r in range(2)]
    return records if len(records) == 2 and all(p.exists() and f"epoch {epoch}" in p.read_text() for p in logs) else []


def pid(record):
    return json.loads(record.read_text())["pid"]


def test_a_pool_ends_with_the_run_and_hands_over_its_epoch(pool, start):
    run, folder = pool
    process = start()
    run.wait_for(lambda: ranks(pool, 1))
    run.run.finish("test")
    assert process.wait(timeout=60) == 0
    assert folder.current_epoch(Role.ROLLOUT) == 2 and run.living() == []
    (row,) = pool_rows(run.run)
    assert (row["state"], row["epoch"], row["nodes"], row["in_flight"]) == ("finished", 2, 2, 4)
    assert start().wait(timeout=60) == 0 and folder.current_epoch(Role.ROLLOUT) == 3, "a requeued job of a finished run starts no rank"


def test_ranks_that_die_are_started_again_with_a_new_epoch_and_a_notice_ends_the_pool(pool, start):
    run, folder = pool
    process = start()
    run.wait_for(lambda: ranks(pool, 1))
    os.kill(pid(ranks(pool, 1)[1]), signal.SIGKILL)
    run.wait_for(lambda: ranks(pool, 2))
    (row,) = pool_rows(run.run)
    assert row["state"] == "running"
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=60) == 0
    assert folder.current_epoch(Role.ROLLOUT) == 3 and run.living() == []
    assert [(r["state"], r["text"]) for r in pool_rows(run.run)] == [("left", "preempted, or its time is up")]


def test_a_killed_supervisor_takes_the_pool_with_it(pool, start):
    run, _ = pool
    process = start()
    run.wait_for(lambda: ranks(pool, 1))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while run.living() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.living() == [] and [r["state"] for r in pool_rows(run.run)] == ["lost"]
