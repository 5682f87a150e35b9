"""Engines that serve an older version than the newest: what is asked of them, and how long they are waited for."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from miles.buffer import BufferState
from miles.rollout.scheduler import Assign, Start
from tests.rollout.test_scheduler import Sim, ends, finish_group, rules, trains


def assigned(sim):
    return [a.rank for a in sim.step() if isinstance(a, Assign)]


def trained(sim, *groups):
    sim.state.apply({"kind": "trained", "groups": list(groups), "step": 1, "version": 0})


def after_one_batch(**kw):
    """Synchronous mode, one group for each version; that of v0 is trained, v1 is published, and only rank 0 serves it."""
    sim = Sim(rules(groups_per_version=1, behind_s=300.0, **kw), engines=2)
    sim.step()
    finish_group(sim, 0)
    trained(sim, 0)
    sim.s.expire(1000.0)
    sim.s.version_published(1)
    sim.s.engine_up(0, 1)
    return sim


def test_a_synchronous_batch_never_waits_for_an_engine_of_a_pool_and_gives_it_nothing_before_it_has_the_version():
    sim = Sim(rules(groups_per_version=1), engines=1)
    sim.s.engine_up(1000, 0, slots=4)
    sim.step()
    finish_group(sim, 0)
    trained(sim, 0)
    sim.s.version_published(1)
    sim.s.engine_up(0, 1)
    assert assigned(sim) == [0, 0]
    finish_group(sim, 1)
    trained(sim, 1)
    sim.s.version_published(2), sim.s.engine_up(1000, 2, slots=4), sim.s.engine_up(0, 2)
    assert assigned(sim) == [0, 1000]


def test_a_synchronous_batch_waits_for_an_engine_of_the_run_once_and_for_a_bounded_time():
    sim = after_one_batch()
    sim.s.expire(1299.0)
    assert sim.step() == [] and sim.s.behind() == {1: (0, 299.0)}
    sim.s.expire(1300.0)
    assert assigned(sim) == [0, 0], "it goes on with the others"
    finish_group(sim, 1)
    trained(sim, 1)
    sim.s.version_published(2), sim.s.engine_up(1, 0), sim.s.engine_up(0, 2)
    assert assigned(sim) == [0, 0], "and is not waited for again"


def test_an_engine_that_has_caught_up_is_waited_for_again():
    sim = after_one_batch()
    sim.s.engine_up(1, 1)
    assert assigned(sim) == [0, 1] and sim.s.behind() == {}
    finish_group(sim, 1)
    trained(sim, 1)
    sim.s.expire(2000.0)
    sim.s.version_published(2)
    sim.s.engine_up(0, 2)
    assert sim.step() == []


def test_a_sample_of_a_synchronous_batch_that_failed_goes_to_an_engine_of_the_newest_version():
    sim = Sim(rules(groups_per_version=1, in_flight=8), engines=2)
    sim.step()
    sim.s.version_published(1)  # the same weights once more, for an engine that was late
    sim.s.finished(0, 0, "x"), sim.s.finished(0, 1, "x")
    assert sim.step() == []
    sim.s.engine_up(1, 1)
    assert assigned(sim) == [1, 1]


def test_on_shared_gpus_a_turn_ends_with_the_batch_of_those_that_are_not_behind():
    sim = after_one_batch()
    sim.s.expire(1300.0)
    assert assigned(sim) == [0, 0] and sim.s.turn_over() == -1
    finish_group(sim, 1)
    assert sim.s.turn_over() == 1
    sim.s.engine_up(1, 1)  # late: it has loaded the version after all
    assert sim.step() == [] and sim.s.turn_over() == 1, "and gives its memory back at once"


def test_no_sample_for_an_engine_of_which_the_trainer_would_take_none_until_it_catches_up():
    sim = Sim(rules(in_flight=8, capacity_groups=100, max_staleness=2), engines=2)
    sim.s.engine_up(1000, 0, slots=2)
    sim.s.version_published(2)
    assert assigned(sim) == [0, 1, 1000, 0, 1, 1000, 0, 1, 0, 1], "two versions behind is what is allowed"
    for a in sim.assigned:
        sim.s.finished(a.group_id, a.sample)
    sim.s.engine_up(1, 1), sim.s.version_published(3)
    assert set(assigned(sim)) == {1} and sim.s.behind().keys() == {0, 1000}
    sim.s.engine_up(0, 3), sim.s.engine_up(1000, 3, slots=2)
    for a in sim.assigned:
        sim.s.finished(a.group_id, a.sample)
    assert set(assigned(sim)) == {0, 1, 1000} and sim.s.behind() == {}


def test_a_sample_whose_turns_an_engine_that_is_too_old_has_is_played_by_another_with_these():
    state = BufferState()
    state.apply({"kind": "start", "group": 0, "task": "a"})
    sim = Sim(rules(in_flight=1, max_staleness=2), state=state, parts={0: [0]}, engines=2)
    sim.s.held(1, 0, 1, turns=3)
    sim.s.engine_up(0, 3)
    assert sim.step()[0] == Assign(0, 1, "a", 0, held_by=1)


def test_with_refill_by_group_slots_of_a_pool_that_is_too_old_make_no_room():
    sim = Sim(rules(in_flight=2, group_size=2, refill="group", max_staleness=2), engines=1)
    sim.s.engine_up(1000, 0, slots=2), sim.s.engine_up(0, 3)
    assert [a.group_id for a in sim.step() if isinstance(a, Start)] == [0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), sync=st.booleans())
def test_however_engines_lag_none_is_asked_for_what_is_too_old_and_the_run_ends(seed, sync):
    """Three engines of the run and one of a pool take new versions at random times, rank 2 and the pool's never."""
    rng = random.Random(seed)
    sim = Sim(rules(total_groups=12, in_flight=6, group_size=3, capacity_groups=4, max_staleness=2, behind_s=20.0, groups_per_version=2 if sync else None), engines=3)
    serves, newest, running, seen = {0: 0, 1: 0, 2: 0, 1000: 0}, 0, [], 0
    for second in range(4000):
        for rank in (0, 1):
            if rng.random() < 0.1:
                serves[rank] = newest
        for rank, version in serves.items():
            sim.s.engine_up(rank, version, 2 if rank == 1000 else None)
        sim.s.expire(float(second))
        sim.step()
        for a in sim.assigned[seen:]:
            assert newest - serves[a.rank] <= (0 if sync else 2)
        running, seen = running + sim.assigned[seen:], len(sim.assigned)
        for a in [a for a in running if rng.random() < 0.4]:
            running.remove(a)
            sim.s.finished(a.group_id, a.sample, "x" if rng.random() < 0.1 else None, by=a.rank)
        if (done := trains(sim, rng)) // 2 > newest:
            newest = done // 2
            sim.s.version_published(newest)
        if done == 12:
            break
    assert set(ends(sim).values()) == {1} and sim.state.counts()["trained"] == 12
