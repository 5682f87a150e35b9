"""A small synthetic run: four steps in two trainer epochs. Epoch 1 trains steps 1-3, dies; epoch 2 restores the checkpoint of step 2
and trains 3 (again) and 4."""

import json

import pytest

from miles.config import load_config
from miles.core import Role
from miles.rundir import RunDir
from tests.report.synthetic import journal, queue_row, ready, step_row, trajectory_row, truth_row, weight_row, write_log


@pytest.fixture
def empty(tmp_path):
    """A run directory in which nothing has happened."""
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))


@pytest.fixture
def run(empty):
    run = empty
    for n in (1, 2):
        assert run.new_attempt() == n
        (run.attempt_dir(n) / "attempt.json").write_text(json.dumps({"launcher": "local", "job_id": None, "started": 1000.0 * n}))
    (run.attempt_dir(1) / "exit.json").write_text(json.dumps({"outcome": "requeue", "text": "time limit", "ended": 1500.0}))
    for role, epochs in ((Role.TRAINER, 2), (Role.ROLLOUT, 1)):
        for _ in range(epochs):
            run.new_epoch(role)
    journal(
        run,
        Role.ROLLOUT,
        1,
        *(ready(g, oldest) for g, oldest in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 3))),
        ready(6, 0, reward=0.0, tokens=300),
    )
    trained = [{"kind": "trained", "groups": [g], "step": s, "version": s - 1} for g, s in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 4))]
    journal(run, Role.TRAINER, 1, {"kind": "restore", "step": 0}, *trained[:3])
    stale = {"kind": "stale", "group": 6, "step": 4, "version": 3, "oldest_version": 0, "tokens": 300, "reward_mean": 0.0}
    journal(run, Role.TRAINER, 2, {"kind": "restore", "step": 2}, trained[3], stale, trained[4])
    write_log(
        run,
        1,
        "trainer",
        0,
        1,
        steps=[
            step_row(1, 1, step_s=30.0, exact_tokens=0, exact_logprob_diff_mean=0.0, exact_logprob_diff_max=0.0),
            step_row(2, 1, exact_tokens=30),
            step_row(3, 1, reward_mean=0.9, staleness_max=9),
        ],
        truth=[truth_row(1, 0, 40), truth_row(2, 0, 30), truth_row(2, 1, 10), truth_row(3, 3, 1000)],
    )
    write_log(
        run,
        2,
        "trainer",
        0,
        2,
        steps=[
            step_row(3, 2, exact_logprob_diff_mean=5e-5, exact_logprob_diff_max=3e-4, staleness_mean=1.5, staleness_max=2, trajectories=6),
            step_row(4, 2, step_s=6.0, wait_s=5.0, exact_tokens=0),
        ],
        truth=[truth_row(3, 1, 30, logprob_diff_mean=6e-3, ess=0.91), truth_row(3, 3, 10), truth_row(4, 0, 40, logprob_diff_p99=7e-3)],
    )
    write_log(
        run,
        1,
        "rollout",
        0,
        1,
        trajectories=[
            *(trajectory_row(g, s, oldest_version=o) for g, o in ((1, 0), (2, 0), (4, 1), (5, 3)) for s in (0, 1)),
            trajectory_row(7, 0, status="retried:engine", tokens=0, reward=float("nan"), leaves=0),
        ],
        mismatches=[
            {"group_id": g, "sample": s, "kind": kind, "cause": cause, "count": n}
            for g, s, kind, cause, n in (
                (1, 0, "branched", "content", 2),
                (1, 1, "branched", "rewind", 1),
                (2, 0, "branched", "content", 3),
                (2, 0, "refused", "history:tools", 1),
            )
        ],
        weights=[weight_row(0, pull_s=60.0, total_s=62.0), weight_row(1, pull_s=0.7, total_s=1.6), weight_row(2, ok=False), weight_row(3)],
        queue=[queue_row(0, 0, 0), queue_row(24, 1, 0), queue_row(20, 2, 0, 0.5, 1), queue_row(10, 8, 1, 1.5, 3), queue_row(24, 3, 0, 1.0, 2)],
        engine=[{"rank": 0, "active": 8, "version": 1, "generated_tokens": 500, "restarts": r} for r in (0, 1, 1)],
    )
    write_log(
        run,
        1,
        "rollout",
        1,
        1,
        trajectories=[
            trajectory_row(3, 0, rank=1, oldest_version=1, cached_tokens=50, reused_tokens=30, prompt_tokens=90, sampled_tokens=40),
            trajectory_row(3, 1, rank=1, oldest_version=1, cached_tokens=0, reused_tokens=0, leaves=3),
        ],
    )
    return run
