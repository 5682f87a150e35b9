"""The cut of a checkpoint through the buffer, and whether journals go on from it."""

import msgspec
import pytest

from miles.buffer import BufferState, Frontier, cut
from miles.buffer.frontier import check
from miles.core import EnvironmentFault

FIGURES = {"oldest_version": 1, "trajectories": 2, "samples": 2, "tokens": 10, "reward_mean": 0.5}


def start(group, **more):
    return {"kind": "start", "group": group, "task": f"t{group}", **more}


def ready(group):
    return {"kind": "ready", "group": group, "task": f"t{group}", **FIGURES}


RECORDS = [
    *(start(g) for g in range(5)), start(5, retry_of=4), *(ready(g) for g in range(4)), {"kind": "drop", "group": 4, "reason": "stale"},
    {"kind": "taken", "groups": [0], "step": 1}, {"kind": "trained", "groups": [0], "step": 1},
    {"kind": "taken", "groups": [1], "step": 2}, {"kind": "trained", "groups": [1], "step": 2}, {"kind": "taken", "groups": [2], "step": 3},
]


def fold(*records):
    state = BufferState()
    for r in records:
        state.apply(r)
    return state


def test_a_cut_says_what_every_group_is():
    f = cut(fold(*RECORDS), step=2, version=3, trainer_epoch=4, rollout_epoch=5)
    assert (f.step, f.version, f.trainer_epoch, f.rollout_epoch) == (2, 3, 4, 5)
    assert (f.cursor, f.trained, f.taken, f.ready, f.open) == (5, 2, [2], [3], {5: "t5"})  # the retry took no new prompt
    assert msgspec.json.decode(msgspec.json.encode(f), type=Frontier) == f


def test_a_run_that_went_on_and_was_restored_goes_on_from_the_cut():
    f = cut(fold(*RECORDS), 2, 3, 1, 1)
    later = [{"kind": "trained", "groups": [2], "step": 3}, start(6), ready(5), {"kind": "drop", "group": 3, "reason": "stale"}, {"kind": "restore", "step": 2}]
    check(f, fold(*RECORDS, *later))


@pytest.mark.parametrize("missing", [r for r in RECORDS if r["kind"] == "trained"])
def test_a_missing_record_of_training_is_noticed(missing):
    f = cut(fold(*RECORDS), 2, 3, 1, 1)
    with pytest.raises(EnvironmentFault, match="has trained 2 groups, the journals say 1"):
        check(f, fold(*(r for r in RECORDS if r is not missing)))


def test_other_groups_or_other_steps_are_not_the_same_training():
    f = cut(fold(*RECORDS), 2, 3, 1, 1)
    for other in ({"kind": "trained", "groups": [3], "step": 2}, {"kind": "trained", "groups": [1], "step": 1}):
        with pytest.raises(EnvironmentFault, match="has trained 2 groups, the journals say 2, or other ones"):
            check(f, fold(*(other if r == {"kind": "trained", "groups": [1], "step": 2} else r for r in RECORDS)))


def test_a_lost_rollout_journal_is_noticed():
    f = cut(fold(*RECORDS), 2, 3, 1, 1)
    with pytest.raises(EnvironmentFault, match=r"2 groups that were under way at step 2 are in no journal: \[3, 5\]"):
        check(f, fold(*(r for r in RECORDS if r["kind"] != "start" and r.get("group") != 3)))
