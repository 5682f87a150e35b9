"""A rank, or an engine, that stops without ending: real roles, MPI and files, SGLang's stand-in as the engine."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles.report import report
from tests.cluster.crash import make_run, make_tasks, processes, steps_trained, supervise
from tests.cluster.crash_checks import check
from tests.cluster.stubs import StubRun
from tests.engine.tiny import make_model

pytestmark = pytest.mark.timeout(900)
STEPS, FROZEN_STEPS = 16, 8  # trained while the rank is frozen: more than what was ready and in flight when it froze


@pytest.fixture
def started(tmp_path):
    """started(steps, *overrides): a run of two rollout ranks, `wait_for(steps)` and its supervisor. What a test has stopped goes on at its end."""
    processes_of = []

    def start(steps, *overrides):
        run = make_run(tmp_path, make_model(tmp_path / "model", "llama"), make_tasks(tmp_path / "tasks", 5, tests_s=5.0), steps, "rollout.deadline_s=20",
                       "tasks.command_timeout_s=5", "cluster.trainer.ranks_per_node=1", "cluster.trainer.gpus_per_node=1", *overrides)
        process = supervise(run)
        processes_of.append((run, process))

        def wait_for(steps, seconds=300):
            deadline = time.monotonic() + seconds
            while steps_trained(run) < steps:
                assert process.poll() is None and time.monotonic() < deadline, (run.path / "supervise.out").read_text()[-4000:]
                time.sleep(0.1)

        return SimpleNamespace(run=run, process=process, wait_for=wait_for)

    yield start
    for run, process in processes_of:
        for pid in (pid for pids in processes(run).values() for pid in pids):
            os.kill(pid, signal.SIGCONT)
        process.kill()
        process.wait()


def test_a_frozen_rollout_rank_costs_the_deadline_of_its_samples_and_the_run_goes_on(started):
    r = started(STEPS)
    r.wait_for(3)
    frozen = StubRun(r.run).records(1, "rollout", 1)[1]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    r.wait_for(3 + FROZEN_STEPS)
    os.kill(frozen, signal.SIGCONT)
    assert r.process.wait(timeout=300) == 0 and r.run.finished
    check(r.run)
    assert report(r.run.path)["trajectories"]["status"]["retried:overdue"] >= 1
    assert r.run.current_epoch("rollout") == 1, "no restart was needed"


def test_a_frozen_leader_and_a_frozen_trainer_rank_are_killed_and_their_steps_started_again(started):
    """Nobody waits for them in vain: neither the trainer for the rollout leader, nor ranks for their leader, nor the leader for one of its ranks."""
    r = started(12, "cluster.trainer.ranks_per_node=2", "cluster.trainer.gpus_per_node=2", "cluster.frozen_s=20")
    for number, (role, rank, epoch) in enumerate([("trainer", 1, 1), ("trainer", 0, 2), ("rollout", 0, 1)], 1):
        r.wait_for(3 * number)
        frozen = StubRun(r.run).records(1, role, epoch)[rank]
        os.kill(frozen["pid"], signal.SIGSTOP)
        StubRun(r.run).wait_for(lambda role=role, epoch=epoch: r.run.current_epoch(role) == epoch + 1, 120)
        (text,) = (line for line in (r.run.attempt_dir(1) / "supervisor.log").read_text().splitlines() if f"{role} step of epoch {epoch} is over" in line)
        killed = f"on {frozen['host']} gave no sign of life for cluster.frozen_s and was killed; its state was"
        # One that waits for the stopped one in a collective is as silent, and 20 s are less than torch.distributed waits: either may be found first.
        assert f"{role} rank {rank} {killed} T (stopped)" in text or f"{role} rank {1 - rank} {killed}" in text
        StubRun(r.run).wait_for(lambda pid=frozen["pid"]: not Path(f"/proc/{pid}").exists(), 60)
    assert r.process.wait(timeout=300) == 0 and r.run.finished
    check(r.run)
    assert (r.run.current_epoch("trainer"), r.run.current_epoch("rollout")) == (3, 2)


def test_an_engine_that_hangs_is_killed_after_a_turn_passed_its_deadline_and_started_again(started):
    r = started(8, "rollout.turn_deadline_s=15", "rollout.deadline_s=90")
    r.wait_for(2)
    hung = processes(r.run)["engine"][0]
    os.kill(hung, signal.SIGSTOP)
    assert r.process.wait(timeout=300) == 0 and r.run.finished
    check(r.run)
    assert "the engine generates nothing; it is killed" in "".join(p.read_text() for p in r.run.path.glob("attempts/0001/rollout-*.log"))
    assert not Path(f"/proc/{hung}").exists() and r.run.current_epoch("rollout") == 1
