"""A function of the user decides which ready groups a step takes."""

import sys
import types

import pytest
from test_buffer import put

from miles.buffer import BufferWriter, Status, TrainerQueue
from miles.buffer.order import load_order
from miles.config import load_config
from miles.core import ConfigError, EnvironmentFault
from miles.rundir import RunDir


@pytest.fixture
def users(monkeypatch):
    module = types.ModuleType("my_orders")
    monkeypatch.setitem(sys.modules, "my_orders", module)
    return module


@pytest.fixture
def waiting(tmp_path):
    """waiting(groups, capacity): the trainer's queue of a run in which groups 0, 1, ... of versions 0, 1, ... are ready."""
    def make(groups: int, capacity: int = 8):
        settings = (f"run.root={tmp_path}", "buffer.order=my_orders.take", "buffer.max_staleness=2", f"buffer.capacity_groups={capacity}", "trainer.groups_per_step=1")
        run = RunDir.create(load_config("configs/tiny_async.toml", settings))
        writer = BufferWriter(run, run.new_epoch("rollout"))
        for group in range(groups):
            put(run, writer, group, version=group)
        queue = TrainerQueue(run, run.new_epoch("trainer"), 0)
        queue.poll()
        return queue

    return make


def test_it_sees_the_groups_that_are_not_too_old_and_its_choice_is_taken_in_its_order(users, waiting):
    seen = []

    def take(groups, count):
        seen.append(([(g["group_id"], g["index"], g["staleness"]) for g in groups], count))
        return [g["group_id"] for g in sorted(groups, key=lambda g: g["staleness"])][:count]  # the freshest

    users.take = take
    queue = waiting(5)
    taken = queue.take(2, version=4, step=1)
    assert seen == [([(2, 2, 2), (3, 3, 1), (4, 4, 0)], 2)]
    assert [g.group_id for g in taken.groups] == [4, 3] and [g.group_id for g in taken.stale] == [0, 1]
    assert [g.group_id for g in queue.state.with_status(Status.TAKEN)] == [4, 3] and queue.state.groups[2].status is Status.READY


def test_with_fewer_than_a_step_takes_it_waits_and_nothing_is_taken(users, waiting):
    users.take = lambda groups, count: [g["group_id"] for g in groups if g["reward_mean"] > 2][:count]
    queue = waiting(2)
    assert queue.take(1, version=1, step=1) is None and queue.state.counts()["ready"] == 2


@pytest.mark.parametrize(("returned", "says"), [
    (lambda groups, count: 1 / 0, "failed: ZeroDivisionError"), (lambda groups, count: None, "failed: TypeError"), (lambda groups, count: [7], r"returned \[7\]"),
    (lambda groups, count: [0, 0], r"returned \[0, 0\]"), (lambda groups, count: [0, 1, 2], r"at most 2 of \[0, 1, 2\]"),
], ids=["raises", "returns nothing", "names another", "one twice", "too many"])
def test_what_is_no_choice_ends_the_run_with_advice_and_takes_nothing(users, waiting, returned, says):
    users.take = returned
    queue = waiting(3)
    with pytest.raises(EnvironmentFault, match=says):
        queue.take(2, version=2, step=1)
    assert queue.state.counts()["ready"] == 3


def test_to_wait_when_the_buffer_is_full_is_an_error_because_nothing_new_is_begun(users, waiting):
    users.take = lambda groups, count: []
    with pytest.raises(EnvironmentFault, match="takes 0 of 3 ready groups and waits for others, but the buffer is full"):
        waiting(3, capacity=3).take(2, version=2, step=1)


@pytest.mark.parametrize("name", ["no_such_package.module.f", "my_orders.absent"])
def test_a_name_without_a_function_is_refused(users, name):
    with pytest.raises(ConfigError, match="buffer.order"):
        load_order(name)
    assert load_order("sealed") is load_order("index") is None
