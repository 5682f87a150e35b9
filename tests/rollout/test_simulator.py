"""The schedule in virtual time, with times worked by hand."""

import math

import pytest

from miles.rollout.scheduler import Rules
from miles.rollout.simulator import Cluster, Simulation


def simulate(works, *, steps=3, engines=1, in_flight=4, speed=lambda n: 1.0, sync=False, capacity=100, sample_s=math.inf, max_staleness=4, **cluster):
    """`works`: seconds of work of the trajectories in the order in which they begin, over and over."""
    it = iter(works * 1000)
    c = Cluster(engines, speed, lambda _: next(it), **{"train_s": 5.0, "publish_s": 0.0, "groups_per_step": 2, **cluster})
    rules = Rules(in_flight=in_flight, group_size=2, capacity_groups=capacity, total_groups=2 * steps, groups_per_version=2 if sync else None,
                  sample_s=sample_s, max_staleness=max_staleness)
    return Simulation(rules, c).run()


def test_rollouts_go_on_while_the_trainer_trains():
    """Four at a time take 10 s and make two groups, a step takes 5 s: steps end at 15, 25, 35."""
    out = simulate([10.0])
    assert out.step_ends == [15.0, 25.0, 35.0] and out.trained == [4, 4, 4]
    assert out.per_minute(skip=1) == 60 * 8 / 20


def test_synchronous_mode_waits_for_the_new_weights():
    assert simulate([10.0], sync=True).step_ends == [15.0, 30.0, 45.0]
    assert simulate([10.0], sync=True, publish_s=2.0).step_ends == [15.0, 32.0, 49.0]


def test_a_slot_is_refilled_at_once_whatever_the_others_do():
    """One trajectory of 30 s among those of 10 s: synchronous steps wait for it, asynchronous ones train on what is complete."""
    works = [30.0, *[10.0] * 7]
    assert simulate(works, sync=True, steps=2).step_ends == [35.0, 50.0]  # the second batch has no long one
    asynchronous = simulate(works, steps=2)
    assert asynchronous.step_ends[0] == 25.0  # (2, 3) at 10, (4, 5) at 20
    assert asynchronous.mean_in_flight(0.0, 20.0) == 4.0


def test_an_engine_shares_its_speed_between_its_trajectories():
    """Four of 10 s each at a quarter of the speed: 40 s."""
    assert simulate([10.0], steps=1, speed=lambda n: 1 / n).step_ends == [45.0]
    assert simulate([10.0], steps=1, engines=2, speed=lambda n: 1 / n).step_ends == [25.0]


def test_a_new_version_pauses_engines_and_makes_what_they_hold_older():
    out = simulate([10.0], steps=3, publish_s=1.0, pause_s=2.0)
    # v1 at 16 holds back those that began at 10 until 18: they end at 22, and are trained by 27 as one version old
    assert out.step_ends[:2] == [15.0, 27.0] and out.staleness == [0, 0, 1, 1, 1, 1]


def test_what_is_too_old_is_dropped_and_counted():
    out = simulate([10.0, 10.0, 10.0, 10.0, 35.0, 35.0, 10.0, 10.0], steps=6, max_staleness=1)
    assert out.stale_groups > 0 and max(out.staleness) <= 1 and len(out.step_ends) == 6


@pytest.mark.parametrize("sync", [False, True])
def test_a_frozen_rank_costs_the_deadline_of_its_samples_and_nothing_after(sync):
    """Two engines with two each; the second freezes at 3 s. Its samples, one of each group, begin again at 30 s with the first, and end at 40 s."""
    out = simulate([10.0], steps=2, engines=2, sync=sync, capacity=2, sample_s=30.0, frozen={1: 3.0})
    assert out.overdue == 2 and out.step_ends[0] == 45.0
    assert out.step_ends[1] == (60.0 if sync else 55.0)  # all four slots are the first one's now; asynchronous ones refill when the buffer is emptied, at 40 s
    with pytest.raises(IndexError):  # without a deadline nothing happens any more
        simulate([10.0], steps=2, engines=2, sync=sync, capacity=2, frozen={1: 3.0})


@pytest.mark.parametrize("sync", [False, True])
def test_the_same_seed_gives_the_same_run(sync):
    runs = [Simulation(Rules(16, 4, 8, 40, groups_per_version=4 if sync else None, seed=3),
                       Cluster(4, lambda n: 1 / (1 + n), lambda rng: rng.uniform(1, 10), train_s=3.0, publish_s=0.5)).run() for _ in range(2)]
    assert runs[0].step_ends == runs[1].step_ends and runs[0].in_flight == runs[1].in_flight
