"""Groups that are not worth training: which, when, and what replaces them."""

import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_buffer import put, trajectory

from miles.buffer import BufferState, BufferView, BufferWriter, Status, stored_groups, write_part
from miles.buffer.filters import equal_rewards, load_filter
from miles.buffer.storage import sealed_in
from miles.config import load_config
from miles.core import ConfigError, EnvironmentFault
from miles.rollout.leader import rules_from_config
from miles.rollout.scheduler import Rules, Scheduler, Start
from miles.rundir import RunDir
from tests.buffer.parts import sealed_file


def make(tmp_path, *settings):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", *settings)))


def state_of(run):
    view = BufferView(run)
    view.poll()
    return view.state


@pytest.fixture
def users(monkeypatch):
    """A module `my_filters` of the user, to put functions into."""
    module = types.ModuleType("my_filters")
    monkeypatch.setitem(sys.modules, "my_filters", module)
    return module


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1))
def test_equal_rewards_drops_exactly_the_groups_without_a_difference(samples):
    summaries = [{"sample": s, "reward": r} for s, r in samples]
    assert equal_rewards(summaries) == ("" if any(r != samples[0][1] for _, r in samples) else "equal_rewards")


def test_a_group_with_equal_rewards_is_dropped_when_sealed_and_leaves_no_file(tmp_path):
    run = make(tmp_path, "buffer.filter=equal_rewards")
    writer = BufferWriter(run, run.new_epoch("rollout"))
    put(run, writer, 0)  # rewards 0 and 1
    writer.start(1, "u")
    for s in range(3):
        write_part(run, 1, [trajectory(1, s, version=4, reward=1.0, n=10)])
    writer.seal(1, [0, 1, 2])
    state = state_of(run)
    assert [state.groups[g].status for g in (0, 1)] == [Status.READY, Status.DROPPED]
    assert state.dropped_by_reason() == {"filter:equal_rewards": 1}
    g = state.groups[1]
    assert (g.trajectories, g.samples, g.tokens, g.reward_mean, g.oldest_version) == (3, 3, 30, 1.0, 4)  # what was dropped is known
    assert sealed_in(sealed_file(run, 0)) == {0} == set(stored_groups(run.buffer_dir, state))


def test_the_filter_decides_the_same_again_after_a_leader_died_before_its_record(tmp_path):
    run = make(tmp_path, "buffer.filter=equal_rewards")
    writer = BufferWriter(run, run.new_epoch("rollout"))
    writer.start(0, "t")
    for s in range(2):
        write_part(run, 1, [trajectory(0, s, reward=0.0)])
    BufferWriter(run, run.new_epoch("rollout")).seal(0, [0, 1])  # the first leader died before it sealed
    assert state_of(run).dropped_by_reason() == {"filter:equal_rewards": 1}


def test_a_users_function_sees_the_summaries_of_all_trajectories_and_names_the_reason(tmp_path, users):
    seen = []
    users.short = lambda summaries: seen.append([(s["sample"], s["reward"], s["length"], s["oldest_version"]) for s in summaries]) or "short"
    run = make(tmp_path, "buffer.filter=my_filters.short")
    put(run, BufferWriter(run, run.new_epoch("rollout")), 0, version=2)
    assert seen == [[(0, 0.0, 6, 2), (1, 1.0, 6, 2)]]
    assert state_of(run).dropped_by_reason() == {"filter:short": 1}


@pytest.mark.parametrize("name", ["no_such_package.module.f", "my_filters.absent", "my_filters.number"])
def test_a_filter_that_is_no_function_is_refused_before_work_begins(users, name):
    users.number = 3
    with pytest.raises(ConfigError, match="buffer.filter"):
        load_filter(name)


@pytest.mark.parametrize("function", [lambda s: 1 / 0, lambda s: None, lambda s: True])
def test_a_filter_that_fails_or_returns_no_text_is_an_error_not_a_decision(users, function):
    users.f = function
    with pytest.raises(EnvironmentFault, match="my_filters.f"):
        load_filter("my_filters.f")([])


@pytest.mark.parametrize("name", ["None", "equal", "a b.c"])
def test_names_that_are_no_dotted_path_are_refused_by_the_schema(tmp_path, name):
    with pytest.raises(ConfigError):
        make(tmp_path, f"buffer.filter={name}")


def schedule(state, **changes):
    s = Scheduler(Rules(in_flight=2, group_size=2, capacity_groups=4, total_groups=10, **changes), ["a", "b", "c"], state)
    s.engine_up(0, 0)
    return next(x for x in s.actions() if isinstance(x, Start))


def dropped(group, reason, retry_of=None):
    return [{"kind": "start", "group": group, "task": "hard", "retry_of": retry_of}, {"kind": "drop", "group": group, "reason": reason}]


@pytest.mark.parametrize("reason, rule", [("stale", "retry_stale"), ("filter:equal_rewards", "retry_filtered")])
def test_the_prompt_of_a_dropped_group_is_sampled_again_where_the_option_says_so(reason, rule):
    state = BufferState()
    for record in dropped(0, reason):
        state.apply(record)
    again = schedule(state, **{rule: True})
    assert (again.task_id, again.retry_of) == ("hard", 0)
    for other in ({}, {"retry_filtered" if rule == "retry_stale" else "retry_stale": True}):
        state.groups[0].retried = False
        assert schedule(state, **other).retry_of is None


def test_a_prompt_is_sampled_again_once_although_the_leader_restarts(tmp_path):
    run = make(tmp_path, "buffer.filter=equal_rewards", "buffer.on_filtered=retry")
    writer = BufferWriter(run, run.new_epoch("rollout"))
    for group, retry_of in ((0, None), (1, 0)):  # the second is filtered as well
        writer.start(group, "hard", retry_of)
        for s in range(2):
            write_part(run, 1, [trajectory(group, s, reward=0.0)])
        if group == 0:
            writer.seal(group, [0, 1])
            assert schedule(state_of(run), retry_filtered=True).retry_of == 0
    writer.seal(1, [0, 1])
    assert state_of(run).dropped_by_reason() == {"filter:equal_rewards": 2}
    assert schedule(state_of(run), retry_filtered=True).retry_of is None  # its prompt teaches nothing now; the next one is tried


def test_the_options_reach_the_schedule(tmp_path):
    config = make(tmp_path, "buffer.on_filtered=retry", "buffer.on_stale=drop").config
    rules = rules_from_config(config, tests_s=60.0)
    assert (rules.retry_filtered, rules.retry_stale) == (True, False)


def test_a_drop_of_too_little_left_knows_the_figures_of_what_was_there(tmp_path):
    run = make(tmp_path)
    writer = BufferWriter(run, run.new_epoch("rollout"))
    writer.start(0, "t")
    write_part(run, 1, [trajectory(0, 1, reward=1.0, n=8)])
    writer.drop(0, "environment")
    g = state_of(run).groups[0]
    assert (g.dropped, g.samples, g.tokens, g.reward_mean) == ("environment", 1, 8, 1.0)
