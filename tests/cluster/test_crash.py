"""Kills at random: after any number of them, of any process, a run has trained what it would have trained undisturbed, down to the last bit.

Ten kills by default; with --long more than two hundred, over seeds, both sizes of the trainer and both orders of the buffer. A failure names its seed:
`pytest tests/cluster/test_crash.py --long -k seed7` plays the same kills again (their times are the machine's).
"""

from functools import cache

import pytest

from tests.cluster.crash import Killer, make_run, make_tasks, processes
from tests.cluster.crash_checks import check, outcome
from tests.engine.tiny import make_model

pytestmark = pytest.mark.timeout(1500)
STEPS, KILLS = 30, 10


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """play(seed, kills, *overrides): the checked run directory of a finished run."""
    root = tmp_path_factory.mktemp("crash")
    model, tasks = make_model(root / "model", "llama"), make_tasks(root / "tasks", 7)

    def play(seed: int, kills: int, *overrides: str):
        run = make_run(root, model, tasks, STEPS, *overrides)
        killer = Killer(run, seed, kills)
        killer.play()
        print(f"seed {seed}: {killer.kills}")
        check(run)
        assert not any(processes(run).values())
        return run

    return play


@pytest.fixture(scope="module")
def undisturbed(play):
    return cache(lambda ranks: outcome(play(0, 0, *of_ranks(ranks))))


def of_ranks(ranks: int) -> tuple[str, ...]:
    return (f"cluster.trainer.ranks_per_node={ranks}", f"cluster.trainer.gpus_per_node={ranks}")


def test_killed_ten_times_a_run_ends_with_the_weights_of_an_undisturbed_one(play, undisturbed):
    found, expected = outcome(play(1, KILLS, *of_ranks(1))), undisturbed(1)
    places = [place for step in sorted(expected.steps) for place, _ in expected.steps[step]]
    assert places == list(range(2 * STEPS)), "in order: every prompt once"
    assert found == expected


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 21), ids="seed{}".format)
def test_long_whatever_is_killed_when_the_weights_are_the_same(play, undisturbed, seed):
    ranks = 1 + seed % 2
    assert outcome(play(seed, KILLS, *of_ranks(ranks))) == undisturbed(ranks)


@pytest.mark.long
def test_long_with_more_steps_between_checkpoints_than_a_group_may_be_old_the_weights_are_the_same(play, undisturbed):
    """A restart undoes up to seven versions: what was sampled by those farther than two steps from the checkpoint is sampled again, and the rest is trained."""
    assert outcome(play(7, KILLS, *of_ranks(1), "checkpoint.every_steps=7", "buffer.max_staleness=2")) == undisturbed(1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(101, 103), ids="seed{}".format)
def test_long_first_sealed_first_trained_every_prompt_is_trained_once(play, seed):
    found = outcome(play(seed, KILLS, *of_ranks(1), "buffer.order=sealed"))
    assert sorted(place for groups in found.steps.values() for place, _ in groups) == list(range(2 * STEPS))


@pytest.mark.long
def test_long_two_undisturbed_runs_are_equal(play, undisturbed):
    assert all(outcome(play(0, 0, *of_ranks(ranks), "rollout.in_flight=3")) == undisturbed(ranks) for ranks in (1, 2))
