"""Samples without an answer, and ranks of which nothing is heard."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.scheduler import OVERDUE, Assign, Drop, Overdue, Seal
from tests.rollout.test_scheduler import Sim, ends, finish_group, rules, trains


def test_a_sample_without_an_answer_is_tried_with_another_rank_and_its_own_gets_nothing_until_it_speaks():
    sim = Sim(rules(total_groups=2, sample_s=100.0), engines=2)
    sim.step()
    assert [a.rank for a in sim.assigned] == [0, 1, 0, 1]
    sim.s.finished(0, 0, by=0), sim.s.finished(1, 0, by=0)
    assert sim.s.expire(99.0) == [] and sim.step() == []
    assert sim.s.expire(100.0) == [Overdue(0, 1, sim.assigned[1].task_id, 1), Overdue(1, 1, sim.assigned[3].task_id, 1)]
    assert {(a.group_id, a.sample, a.rank) for a in sim.step()} == {(0, 1, 0), (1, 1, 0)}
    sim.s.engine_up(1, 0)
    sim.s.finished(0, 1, "x", by=0)
    assert [(a.group_id, a.sample, a.rank) for a in sim.step()] == [(0, 1, 0)], "rank 1 was late with it before"


def test_what_a_rank_says_late_of_a_sample_that_another_one_plays_is_not_heard():
    sim = Sim(rules(in_flight=2, total_groups=1, sample_s=100.0, retries=1), engines=2)
    sim.step()
    sim.s.finished(0, 0, by=0)
    sim.s.expire(100.0)
    assert [(a.sample, a.rank) for a in sim.step()] == [(1, 0)]
    sim.s.engine_up(1, 0)
    for cause in ("retried:environment", None):
        sim.s.finished(0, 1, cause, by=1)
        sim.s.moved(0, 1, 1, by=1)
    assert sim.step() == [] and sim.s.engines() == {0: (0, 1), 1: (0, 0)} and sim.s.in_flight == 1
    sim.s.finished(0, 1, by=0)
    assert sim.step() == [Seal(0, (0, 1))]
    sim.s.finished(0, 1, by=1)  # of a group that is closed
    assert sim.step() == []


def test_a_sample_that_is_overdue_again_and_again_is_lost_like_any_other():
    sim = Sim(rules(in_flight=2, total_groups=1, sample_s=100.0, retries=1), engines=1)
    sim.step()
    sim.s.finished(0, 0)
    sim.s.expire(100.0)
    assert sim.step() == [], "the only rank says nothing"
    sim.s.engine_up(0, 0)
    assert [(a.sample, a.rank) for a in sim.step()] == [(1, 0)]  # there is no other
    sim.s.expire(200.0)
    assert sim.step() == [Drop(0, OVERDUE)]


def test_a_rank_of_which_nothing_is_heard_gets_no_new_samples_and_holds_up_no_batch():
    sim = Sim(rules(groups_per_version=1, total_groups=2, silent_s=60.0), engines=2)
    sim.step()
    finish_group(sim, 0)
    sim.s.expire(30.0)
    sim.s.version_published(1)
    sim.state.apply({"kind": "trained", "groups": [0], "step": 1, "version": 0})
    sim.s.engine_up(0, 1)
    assert sim.step() == []  # rank 1 has not said that it serves the new version
    sim.s.expire(60.0)
    assert [a.rank for a in sim.step() if isinstance(a, Assign)] == [0, 0]
    sim.s.engine_up(1, 1)
    assert sim.s.engines().keys() == {0, 1}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ordered=st.booleans())
def test_whoever_is_late_each_group_ends_once_and_no_answer_counts_for_another_s_sample(seed, ordered):
    """Ranks 1 and 2 freeze and wake up at random; then they answer what they were given, the last of each sample, whether it is still theirs or not."""
    rng = random.Random(seed)
    sim = Sim(rules(total_groups=12, in_flight=6, group_size=3, capacity_groups=4, retries=2, sample_s=10.0, silent_s=3.0, ordered=ordered), engines=3)
    given, frozen, frozen_at, seen = {0: [], 1: [], 2: []}, set(), {}, 0
    for second in range(4000):
        for rank in {0, 1, 2} - frozen:
            sim.s.engine_up(rank, 0)
        sim.s.expire(float(second))
        sim.step()
        for a in sim.assigned[seen:]:
            assert a.rank not in frozen or second - frozen_at[a.rank] < 3
            given[a.rank] = [s for s in given[a.rank] if s != (a.group_id, a.sample)] + [(a.group_id, a.sample)]
        seen = len(sim.assigned)
        assert sim.s.in_flight <= 6 and sum(n for _, n in sim.s.engines().values()) <= 6
        if not frozen or rng.random() < 0.05:
            frozen, frozen_at = set(rng.sample([1, 2], rng.randrange(3))), {1: second, 2: second}
        for rank in {0, 1, 2} - frozen:
            for sample in [s for s in given[rank] if rng.random() < 0.4]:
                given[rank].remove(sample)
                sim.s.finished(*sample, "x" if rng.random() < 0.1 else None, by=rank)
        if trains(sim, rng) == 12:
            break
    assert set(ends(sim).values()) == {1} and sim.state.counts()["trained"] == 12
