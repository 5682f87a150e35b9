"""A rank that stops without ending: real roles, MPI and files, SGLang's stand-in as the engine."""

import os
import signal
import time

import pytest

from miles.report import report
from tests.cluster.crash import make_run, make_tasks, steps_trained, supervise
from tests.cluster.crash_checks import check
from tests.cluster.stubs import StubRun
from tests.engine.tiny import make_model

pytestmark = pytest.mark.timeout(900)
STEPS, FROZEN_STEPS = 16, 8  # trained while the rank is frozen: more than what was ready and in flight when it froze


def test_a_frozen_rollout_rank_costs_the_deadline_of_its_samples_and_the_run_goes_on(tmp_path):
    run = make_run(tmp_path, make_model(tmp_path / "model", "llama"), make_tasks(tmp_path / "tasks", 5, tests_s=5.0), STEPS, "rollout.deadline_s=20",
                   "tasks.command_timeout_s=5", "cluster.trainer.ranks_per_node=1", "cluster.trainer.gpus_per_node=1")
    process, frozen = supervise(run), None

    def wait_for(steps, seconds=300):
        deadline = time.monotonic() + seconds
        while steps_trained(run) < steps:
            assert process.poll() is None and time.monotonic() < deadline, (run.path / "supervise.out").read_text()[-4000:]
            time.sleep(0.1)

    try:
        wait_for(3)
        frozen = StubRun(run).records(1, "rollout", 1)[1]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        wait_for(3 + FROZEN_STEPS)
        os.kill(frozen, signal.SIGCONT)
        assert process.wait(timeout=300) == 0 and run.finished
    finally:
        if frozen is not None and process.poll() is None:
            os.kill(frozen, signal.SIGCONT)
        process.kill()
        process.wait()
    check(run)
    assert report(run.path)["trajectories"]["status"]["retried:overdue"] >= 1
    assert run.current_epoch("rollout") == 1, "no restart was needed"
