import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.buffer import BufferState
from miles.rollout.scheduler import Assign, Drop, Release, Rules, Scheduler, Seal, Start


def ready(group, task="t"):
    return {"kind": "ready", "group": group, "task": task, "trajectories": 2, "samples": 2, "oldest_version": 0, "tokens": 1, "reward_mean": 0.0}


class Sim:
    """Applies actions to the journal state, as the leader does."""

    def __init__(self, rules, tasks=("a", "b", "c"), state=None, parts=None, engines=2, holders=()):
        self.state = state or BufferState()
        self.s = Scheduler(rules, tasks, self.state, parts, holders)
        for r in range(engines):
            self.s.engine_up(r, 0)
        self.assigned: list[Assign] = []
        self.log = []

    def step(self):
        acts = self.s.actions()
        for a in acts:
            match a:
                case Start():
                    self.state.apply({"kind": "start", "group": a.group_id, "task": a.task_id, "retry_of": a.retry_of})
                case Seal():
                    self.state.apply(ready(a.group_id, self.state.groups[a.group_id].task_id))
                case Drop():
                    self.state.apply({"kind": "drop", "group": a.group_id, "reason": a.reason})
                case Assign():
                    self.assigned.append(a)
        self.log += acts
        return acts


def rules(**kw):
    return Rules(**{"in_flight": 4, "group_size": 2, "capacity_groups": 8, "total_groups": 100, **kw})


def trains(sim, rng):
    """The trainer takes a group that is ready, or none. Returns how many it has trained."""
    for g in sim.state.ready_in_order()[: rng.randrange(2)]:
        sim.state.apply({"kind": "trained", "groups": [g.group_id], "step": 1, "version": 0})
    return sim.state.counts()["trained"]


def ends(sim):
    """How often each group has ended."""
    return Counter(a.group_id for a in sim.log if isinstance(a, (Seal, Drop)))


def test_slots_fill_to_the_cap_and_spread_over_the_least_active_engines():
    sim = Sim(rules(in_flight=4), engines=2)
    sim.step()
    assert [(a.group_id, a.sample, a.rank) for a in sim.assigned] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]


def test_one_finished_trajectory_is_replaced_at_once_on_the_engine_that_became_free():
    sim = Sim(rules())
    sim.step()
    sim.s.finished(0, 1)
    new = [a for a in sim.step() if isinstance(a, Assign)]
    assert [(a.group_id, a.sample, a.rank) for a in new] == [(2, 0, 1)]


def restarted(**kw):
    """A schedule after a restart: sample 0 of group 0 is on disk, sample 1 is not."""
    state = BufferState()
    state.apply({"kind": "start", "group": 0, "task": "a"})
    return Sim(rules(in_flight=2, held_s=60.0), state=state, parts={0: [0]}, **kw)


def test_after_a_restart_nothing_is_given_out_before_every_rank_has_said_what_it_holds():
    """A pool's engine is there at once; rank 1, which has the sample's turns, is slow."""
    sim = restarted(engines=1, holders=range(2))
    sim.s.engine_up(1000, 0, slots=2)
    sim.s.told_held(0)
    assert sim.step() == []
    assert sim.s.held(1, 0, 1, turns=3)
    sim.s.told_held(1)
    assert sim.step()[0] == Assign(0, 1, "a", 0, held_by=1)


def test_a_rank_that_does_not_say_what_it_holds_is_not_waited_for_for_ever():
    sim = restarted(engines=1, holders=range(2))
    sim.s.told_held(0), sim.s.expire(59.0)
    assert sim.step() == []
    sim.s.expire(60.0)
    assert sim.step()[0] == Assign(0, 1, "a", 0)
    assert not sim.s.held(1, 0, 1, turns=3)


def test_a_run_that_begins_waits_for_nobody_s_turns():
    assert Sim(rules(), holders=range(2)).step() != []


@given(data=st.data())
def test_whatever_order_ranks_come_up_in_no_turn_on_disk_is_thrown_away(data):
    """Each of three ranks says what it holds, and then at some time its engine is up; a pool's is up from the beginning."""
    state = BufferState()
    for group in (0, 1):
        state.apply({"kind": "start", "group": group, "task": "a"})
    turns = {r: data.draw(st.dictionaries(st.sampled_from([(g, s) for g in (0, 1) for s in (0, 1)]), st.integers(0, 9))) for r in range(3)}
    sim = Sim(rules(in_flight=4, total_groups=2), state=state, engines=0, holders=range(3))
    sim.s.engine_up(1000, 0, slots=4)
    told = set()
    for event in data.draw(st.permutations(["held", "up"] * 3)):
        rank = data.draw(st.sampled_from(sorted({0, 1, 2} - told if event == "held" else told))) if event == "held" or told else None
        if event == "held":
            assert all(sim.s.held(rank, g, s, n) for (g, s), n in turns[rank].items()), "nothing that is held is useless"
            sim.s.told_held(rank)
            told.add(rank)
        elif rank is not None:
            sim.s.engine_up(rank, 0)
        sim.step()
    most = {s: max(((n, r) for r, of in turns.items() if (n := of.get(s)) is not None), default=(0, None))[1] for s in [(0, 0), (0, 1), (1, 0), (1, 1)]}
    assert {(a.group_id, a.sample): a.held_by for a in sim.assigned} == most


def test_a_sample_that_was_begun_goes_to_the_rank_that_has_its_turns_and_another_one_to_the_emptiest():
    sim = restarted(engines=2)
    assert sim.s.held(1, 0, 1, turns=3)
    sim.step()
    assert sim.assigned == [Assign(0, 1, "a", 1, held_by=1), Assign(1, 0, sim.assigned[1].task_id, 0)]


def test_while_that_rank_has_no_engine_the_sample_goes_elsewhere_and_is_told_where_its_turns_are():
    sim = restarted(engines=1)
    sim.s.held(7, 0, 1, turns=3)
    sim.step()
    assert sim.assigned[0] == Assign(0, 1, "a", 0, held_by=7)


def test_of_two_ranks_that_have_turns_of_a_sample_the_one_with_more_is_asked():
    sim = restarted(engines=3)
    for rank, turns in ((1, 2), (2, 4), (0, 3)):
        sim.s.held(rank, 0, 1, turns)
    sim.step()
    assert sim.assigned[0] == Assign(0, 1, "a", 2, held_by=2)


def test_ranks_that_hold_a_sample_let_it_go_when_it_has_ended_wherever_it_was_played_and_a_retry_does_not_go_on_from_them():
    sim = restarted(engines=1)
    for rank, turns in ((1, 2), (2, 4)):
        sim.s.held(rank, 0, 1, turns)
    assert sim.step()[0] == Assign(0, 1, "a", 0, held_by=2)  # which may read them as long as it runs
    sim.s.finished(0, 1, "dropped:assembly:prefix")
    assert sim.step()[:3] == [Release(0, 1, 1), Release(0, 1, 2), Assign(0, 1, "a", 0)]
    sim.s.finished(0, 1)
    assert sim.step()[0] == Seal(0, (0, 1))


def test_a_sample_that_its_pool_gave_up_goes_on_from_there_and_older_turns_are_let_go_at_its_end():
    sim = restarted(engines=1)
    sim.s.held(0, 0, 1, turns=9)
    sim.s.engine_down(0), sim.s.engine_up(1000, 0, slots=1)
    assert sim.step()[0] == Assign(0, 1, "a", 1000, held_by=0)
    sim.s.engine_down(1000), sim.s.released(0, 1, 1000), sim.s.engine_up(0, 0)
    assert sim.step()[0] == Assign(0, 1, "a", 0, held_by=1000)
    sim.s.finished(0, 1)
    assert sim.step()[:2] == [Release(0, 1, 0), Seal(0, (0, 1))]


def test_turns_of_a_sample_that_nobody_waits_for_are_of_no_use():
    sim = restarted(engines=2)
    assert not sim.s.held(0, 0, 0, turns=2)  # its part is there
    assert not sim.s.held(0, 5, 0, turns=2)  # its group is closed, or was never begun


def test_refill_by_group_waits_for_room_for_a_whole_group():
    sim = Sim(rules(refill="group"))
    sim.step()
    sim.s.finished(0, 0)
    assert not [a for a in sim.step() if isinstance(a, Assign)]
    sim.s.finished(0, 1)
    assert [a.group_id for a in sim.step() if isinstance(a, Assign)] == [2, 2]


def test_a_complete_group_is_sealed():
    sim = Sim(rules())
    sim.step()
    sim.s.finished(0, 0)
    sim.s.finished(0, 1)
    assert Seal(0, (0, 1)) in sim.step()


def test_a_failed_sample_is_tried_again_first_then_its_group_closes_short():
    sim = Sim(rules(group_size=3, in_flight=3, retries=1))
    sim.step()
    sim.s.finished(0, 0)
    sim.s.finished(0, 1)
    sim.s.finished(0, 2, cause="engine")
    assert [(a.group_id, a.sample) for a in sim.step() if isinstance(a, Assign)][0] == (0, 2)
    sim.s.finished(0, 2, cause="engine")
    assert Seal(0, (0, 1)) in sim.step()


def test_a_group_with_fewer_than_two_samples_is_dropped_with_its_cause():
    sim = Sim(rules(retries=0))
    sim.step()
    sim.s.finished(0, 0)
    sim.s.finished(0, 1, cause="sandbox")
    assert Drop(0, "sandbox") in sim.step()


@pytest.mark.parametrize(("least", "end"), [(2, Seal(0, (0, 1))), (3, Drop(0, "engine"))])
def test_a_group_that_is_to_have_more_samples_is_dropped_instead_of_closing_short(least, end):
    sim = Sim(rules(group_size=3, in_flight=3, retries=0, min_samples=least))
    sim.step()
    sim.s.finished(0, 0)
    sim.s.finished(0, 1)
    sim.s.finished(0, 2, cause="engine")
    assert end in sim.step()


def test_a_full_buffer_opens_no_group():
    sim = Sim(rules(capacity_groups=2))
    sim.step()
    for g in (0, 1):
        for s in (0, 1):
            sim.s.finished(g, s)
    assert not [a for a in sim.step() if isinstance(a, Start)] and sim.s.blocked
    sim.state.apply({"kind": "taken", "groups": [0], "step": 1, "version": 0})
    assert [a.group_id for a in sim.step() if isinstance(a, Start)] == [2]


def test_no_more_groups_are_opened_than_the_run_trains():
    sim = Sim(rules(total_groups=1))
    sim.step()
    assert [a.group_id for a in sim.log if isinstance(a, Start)] == [0]


def test_a_stale_group_is_replaced_by_its_own_task_when_configured():
    sim = Sim(rules(retry_stale=True, in_flight=2))
    sim.step()
    task = sim.assigned[0].task_id
    sim.s.finished(0, 0), sim.s.finished(0, 1)
    sim.step()
    sim.state.apply({"kind": "stale", "group": 0, "step": 1})
    for s in (0, 1):
        sim.s.finished(1, s)
    start = [a for a in sim.step() if isinstance(a, Start)][0]
    assert (start.task_id, start.retry_of) == (task, 0)


def test_synchronous_mode_makes_one_batch_per_version():
    sim = Sim(rules(groups_per_version=1))
    sim.step()
    assert Counter(type(a) for a in sim.log) == {Start: 1, Assign: 2}
    sim.s.finished(0, 0), sim.s.finished(0, 1)
    sim.step()
    sim.state.apply({"kind": "taken", "groups": [0], "step": 1, "version": 0})
    assert sim.step() == []
    sim.s.version_published(1)
    sim.state.apply({"kind": "trained", "groups": [0], "step": 1, "version": 0})
    assert sim.step() == []  # published, but no engine serves it yet
    sim.s.engine_up(0, 1), sim.s.engine_up(1, 1)
    assert [a.group_id for a in sim.step() if isinstance(a, Start)] == [1]


def test_synchronous_mode_replaces_a_group_that_is_found_damaged_after_it_was_taken():
    """The trainer holds one of the batch and waits for another: nothing is trained, so no new version would come."""
    sim = Sim(rules(groups_per_version=2))
    sim.step()
    for group in (0, 1):
        sim.s.finished(group, 0), sim.s.finished(group, 1)
    sim.step()
    sim.state.apply({"kind": "taken", "groups": [0, 1], "step": 1, "version": 0})
    assert sim.step() == []
    sim.state.apply({"kind": "drop", "group": 1, "reason": "digest"})
    assert [a.group_id for a in sim.step() if isinstance(a, Start)] == [2]


def test_after_a_restart_open_groups_come_first_and_finished_samples_are_kept():
    state = BufferState()
    for g in (0, 1):
        state.apply({"kind": "start", "group": g, "task": "t"})
    state.apply(ready(0))
    sim = Sim(rules(), state=state, parts={1: [1]})
    acts = sim.step()
    assert isinstance(acts[0], Assign) and (acts[0].group_id, acts[0].sample) == (1, 0)
    assert [a.group_id for a in acts if isinstance(a, Start)] == [2, 3]
    sim.s.finished(1, 0)
    assert Seal(1, (0, 1)) in sim.step()


def test_no_work_for_an_engine_that_is_down():
    sim = Sim(rules(in_flight=2))
    sim.s.engine_down(0)
    sim.step()
    assert {a.rank for a in sim.assigned} == {1}


def test_each_pass_over_the_tasks_is_a_permutation_and_depends_only_on_seed_and_cursor():
    a, b = (Scheduler(rules(seed=5), "abcd", BufferState()) for _ in range(2))
    first = [a.task_at(i) for i in range(8)]
    assert sorted(first[:4]) == sorted(first[4:]) == list("abcd") and first == [b.task_at(i) for i in range(8)]
    assert first == [b.task_at(i) for i in reversed(range(8))][::-1] and "".join(first) == "bacdcbda", "in whatever order they are asked, of whatever version of Miles"


def test_the_tasks_of_a_pass_are_shuffled_once(monkeypatch):
    shuffled = []
    monkeypatch.setattr(random.Random, "shuffle", lambda self, tasks: shuffled.append(len(tasks)))
    s = Scheduler(rules(), "abcd", BufferState())
    assert [s.task_at(i) for i in range(12)] == list("abcd") * 3 and shuffled == [4, 4, 4]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_whatever_fails_each_group_ends_exactly_once_and_the_cap_holds(seed):
    rng = random.Random(seed)
    sim = Sim(rules(total_groups=12, in_flight=5, group_size=3, capacity_groups=4, retries=1))
    for _ in range(2000):
        sim.step()
        assert sim.s.in_flight <= 5
        running = [a for a in sim.assigned if sim.s._running.get((a.group_id, a.sample)) is not None]
        if rng.random() < 0.1:
            sim.s.engine_down(1)
        elif rng.random() < 0.2:
            sim.s.engine_up(1, 0)
        if running:
            a = rng.choice(running)
            sim.s.finished(a.group_id, a.sample, cause="x" if rng.random() < 0.3 else None)
        if trains(sim, rng) == 12:
            break
    assert set(ends(sim).values()) == {1} and sim.state.counts()["trained"] == 12


@settings(max_examples=60)
@given(events=st.lists(st.tuples(st.sampled_from(["finish", "fail", "down", "up", "move"]), st.integers(0, 99), st.integers(0, 3)), max_size=60))
def test_whatever_happens_each_trajectory_goes_to_an_engine_with_the_fewest(events):
    sim = Sim(rules(in_flight=10, group_size=3, total_groups=10_000, capacity_groups=10_000), engines=4)
    where, living = {}, {0, 1, 2, 3}  # what an onlooker knows: sample -> rank

    def act():
        for a in sim.s.actions():
            if isinstance(a, Start):
                sim.state.apply({"kind": "start", "group": a.group_id, "task": a.task_id, "retry_of": a.retry_of})
            elif isinstance(a, Assign):
                load = Counter(where.values())
                assert a.rank in living and load[a.rank] == min(load[r] for r in living)
                where[a.group_id, a.sample] = a.rank

    act()
    for kind, pick, rank in events:
        if kind in ("finish", "fail", "move") and where:
            sample = sorted(where)[pick % len(where)]
            if kind == "move":
                sim.s.moved(*sample, rank)
                where[sample] = rank
            else:
                del where[sample]
                sim.s.finished(*sample, None if kind == "finish" else "engine")
        elif kind == "down" and len(living) > 1:
            living.discard(rank)
            sim.s.engine_down(rank)
        elif kind == "up":
            living.add(rank)
            sim.s.engine_up(rank, 0)
        act()


def finish_group(sim, group):
    sim.s.finished(group, 0), sim.s.finished(group, 1)
    sim.step()


def test_a_group_that_the_trainer_took_and_dropped_is_replaced_within_its_batch():
    sim = Sim(rules(groups_per_version=2))
    sim.step()
    finish_group(sim, 0), finish_group(sim, 1)
    sim.state.apply({"kind": "taken", "groups": [0, 1], "step": 1, "version": 0})
    assert sim.step() == []
    sim.state.apply({"kind": "drop", "group": 1, "reason": "digest"})
    assert [a.group_id for a in sim.step() if isinstance(a, Start)] == [2]
    finish_group(sim, 2)
    assert sim.step() == []  # one taken, one ready: two


def test_on_shared_gpus_the_turn_is_over_when_the_batch_is_complete_and_stays_so_until_a_newer_version():
    sim = Sim(rules(groups_per_version=2))
    sim.step()
    assert sim.s.turn_over() == -1
    finish_group(sim, 0)
    assert sim.s.turn_over() == -1  # one group runs
    finish_group(sim, 1)
    assert sim.s.turn_over() == 0
    sim.state.apply({"kind": "taken", "groups": [0, 1], "step": 1, "version": 0})
    sim.state.apply({"kind": "trained", "groups": [0, 1], "step": 1, "version": 0})
    assert sim.step() == [] and sim.s.turn_over() == 0  # trained, and the version that gives the turn is not there yet
    sim.s.version_published(1)
    assert sim.s.turn_over() == 0
    sim.s.engine_up(0, 1), sim.s.engine_up(1, 1)
    assert [a.group_id for a in sim.step() if isinstance(a, Start)] == [2, 3]


def test_a_turn_without_anything_to_do_is_over_at_once():
    sim = Sim(rules(groups_per_version=1, total_groups=1))
    sim.step()
    finish_group(sim, 0)
    sim.state.apply({"kind": "trained", "groups": [0], "step": 1, "version": 0})
    sim.s.version_published(1)
    assert sim.s.turn_over() == 1  # the run needs no more groups


def test_the_end_of_the_job_ends_the_turn_and_nothing_more_is_given_out():
    sim = Sim(rules(groups_per_version=2))
    sim.step()
    sim.s.end_turn()
    sim.s.finished(0, 0, "retried:engine")
    assert sim.step() == [] and sim.s.turn_over() == 0


# -- pools -------------------------------------------------------------------------------------------------------------------
def test_an_engine_of_a_pool_brings_slots_and_has_no_more_than_these():
    sim = Sim(rules(in_flight=4), engines=2)
    sim.s.engine_up(1000, 0, slots=1)
    sim.step()
    assert Counter(a.rank for a in sim.assigned) == {0: 2, 1: 2, 1000: 1}
    sim.s.engine_down(0)
    sim.s.engine_down(1)
    sim.s.finished(0, 0)
    assert [a for a in sim.step() if isinstance(a, Assign)] == [] and not sim.s.blocked, "its slot is taken, and no other engine lives"
    (on_pool,) = (a for a in sim.assigned if a.rank == 1000)
    sim.s.finished(on_pool.group_id, on_pool.sample)
    assert [a.rank for a in sim.step() if isinstance(a, Assign)] == [1000]


def test_slots_of_a_pool_whose_engine_is_down_are_not_given_to_others():
    sim = Sim(rules(in_flight=2), engines=1)
    sim.s.engine_up(1000, 0, slots=2)
    sim.s.engine_down(1000)
    sim.step()
    assert Counter(a.rank for a in sim.assigned) == {0: 2}


def test_a_sample_that_was_given_up_with_its_pool_is_next_and_not_a_retry():
    sim = Sim(rules(in_flight=2, retries=0), engines=1)
    sim.s.engine_up(1000, 0, slots=2)
    sim.step()
    lost = [a for a in sim.assigned if a.rank == 1000]
    assert [(a.group_id, a.sample) for a in lost] == [(0, 1), (1, 1)]
    sim.s.engine_down(1000)
    for a in lost:
        sim.s.released(a.group_id, a.sample, 1000)
    sim.s.finished(0, 0)
    assert sim.step() == [Assign(1, 1, lost[1].task_id, 0, held_by=1000)]  # its first turns are in the session file of rank 1000
    sim.s.finished(1, 1)
    sim.s.finished(1, 0)
    assert [a for a in sim.step() if isinstance(a, (Seal, Drop))] == [Seal(1, (0, 1))]


def test_an_adopted_sample_is_not_started_again():
    state = BufferState()
    state.apply({"kind": "start", "group": 0, "task": "a"})
    sim = Sim(rules(in_flight=1), state=state, engines=1)
    assert sim.s.adopt(0, 1, 1000, slots=1) and not sim.s.adopt(0, 1, 1000, slots=1) and not sim.s.adopt(7, 0, 1000, slots=1)
    assert [(a.group_id, a.sample, a.rank) for a in sim.step()] == [(0, 0, 0)]  # it has a slot of its pool, and none of the run
    sim.s.engine_up(1000, 0, slots=1)
    assert sim.step() == [] and sim.s.in_flight == 2
    sim.s.finished(0, 1)
    sim.s.finished(0, 0)
    assert Seal(0, (0, 1)) in sim.step()


def test_a_sample_goes_to_a_pool_s_rank_that_has_its_first_turns_only_while_that_has_a_slot():
    state = BufferState()
    state.apply({"kind": "start", "group": 0, "task": "a"})
    sim = Sim(rules(in_flight=1, group_size=4, total_groups=1), state=state, engines=1)
    sim.s.engine_up(1000, 0, slots=2)
    for sample in (1, 2, 3):
        assert sim.s.held(1000, 0, sample, turns=2)
    assert [(a.sample, a.rank, a.held_by) for a in sim.step()] == [(0, 0, None), (1, 1000, 1000), (2, 1000, 1000)]
    sim.s.finished(0, 0)
    assert [(a.sample, a.rank, a.held_by) for a in sim.step()] == [(3, 0, 1000)]


# -- ranks that do not answer ------------------------------------------------------------------------------------------------
