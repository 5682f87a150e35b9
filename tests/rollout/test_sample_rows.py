"""What a rank logs of a sample with several leaves."""

import math
from types import SimpleNamespace

import numpy as np

from miles.core import NO_VERSION, Trajectory
from miles.rollout.worker import Worker


def leaf(number, mask, versions, turns, prompt, cached, cacheable, reused):
    mask = np.array(mask, np.uint8)
    at = np.full(len(mask), NO_VERSION, np.int32)
    at[mask == 1] = versions
    return Trajectory(
        group_id=2, sample=1, leaf=number, task_id="t", tokens=np.zeros(len(mask), np.int32), loss_mask=mask, logprobs=np.zeros(len(mask), np.float32),
        versions=at, routes=None, reward=0.5, finish_reason="done", turns=turns, exact=False, cached_tokens=cached, cacheable_tokens=cacheable,
        prompt_tokens=prompt, meta={"reused_tokens": reused, "engine_s": 3.0, "env_s": 1.5, "refused_requests": {"history:tools": 1},
                                    "branched_requests": {"content": 2, "rewind": 1}})


def logged(leaves, cause):
    rows = []
    worker = Worker.__new__(Worker)  # without its engine
    worker._rank, worker._log = 4, SimpleNamespace(row=lambda table, **values: rows.append((table, values)))
    worker._log_trajectory(2, 1, SimpleNamespace(name="t"), leaves, cause, 9.0)
    return rows


def test_a_sample_is_one_row_with_the_sums_of_its_leaves_and_a_row_for_each_cause():
    rows = logged([leaf(0, [0, 1, 1, 0, 1], [3, 3, 4], 2, 10, 4, 3, 3), leaf(1, [0, 0, 0, 1], [6], 1, 7, 2, 2, 1)], None)
    assert rows[0] == ("trajectories", {
        "group_id": 2, "sample": 1, "task_id": "t", "rank": 4, "reward": 0.5, "leaves": 2, "turns": 3, "tokens": 9, "sampled_tokens": 4, "prompt_tokens": 17,
        "cached_tokens": 6, "cacheable_tokens": 5, "reused_tokens": 4, "engine_s": 3.0, "env_s": 1.5, "oldest_version": 3, "newest_version": 6,
        "finish": "done", "seconds": 9.0, "status": "ok"})
    assert [(table, r["kind"], r["cause"], r["count"]) for table, r in rows[1:]] == [
        ("mismatches", "branched", "content", 2), ("mismatches", "branched", "rewind", 1), ("mismatches", "refused", "history:tools", 1)]


def test_a_sample_that_did_not_finish_has_a_row_of_the_same_columns():
    (_, row), = logged([], "dropped:assembly:prefix")
    assert set(row) == set(logged([leaf(0, [0, 1], [3], 1, 1, 0, 0, 0)], None)[0][1])
    assert math.isnan(row["reward"]) and (row["leaves"], row["tokens"], row["oldest_version"], row["status"]) == (0, 0, -1, "dropped:assembly:prefix")
