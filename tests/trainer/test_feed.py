"""What a rank reads of the buffer."""

import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct
from test_loop import trajectory

from miles.buffer import BufferWriter, TrainerQueue, write_part
from miles.buffer.storage import parts_dir
from miles.config import load_config
from miles.core import ConfigError, EnvironmentFault
from miles.rundir import RunDir, patience
from miles.trainer.batching import BatchPlan, held_rows
from miles.trainer.feed import MOST_UNREADABLE, Feed, Plan
from tests.buffer.parts import sealed_of


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "trainer.groups_per_step=2")))


def feed(run, layers, shape=(6, 2), cp=1, cp_rank=0, replay=True):
    """The feed of a rank of a pipeline stage with these MoE layers of a model that records `shape` = (MoE layers, K)."""
    step = SimpleNamespace(layers=layers, routes_shape=shape, routing_replay=replay and shape is not None, held_rows=lambda fed: held_rows(fed, cp, cp_rank))
    return Feed(run, None, step, None, None, None, None, None, None, None)


def put(run, routes):
    epoch = run.new_epoch("rollout")
    writer = BufferWriter(run, epoch)
    writer.start(0, "t")
    t = trajectory(0, 0, 1)
    write_part(run, epoch, [replace(t, routes=None if routes is None else routes[: len(t.tokens) - 1])])
    writer.seal(0, [0])


def test_a_rank_gets_the_routes_of_the_layers_of_its_stage_at_its_rows(run):
    routes = np.random.default_rng(0).random((60, 6, 8)).argsort(-1)[..., :2].astype(np.uint8)
    put(run, routes)
    for layers in ([0, 1, 2], [3, 4, 5], [2]):
        items = feed(run, layers)._items(sealed_of(run, 0))
        (s,), bad = feed(run, layers)._sequences(Plan(1, 1, items), items)
        assert np.array_equal(s.routes, np.sort(routes, -1)[: s.fed, layers]) and not bad
    for rank in range(2):
        (s,), bad = feed(run, [2, 3], cp=2, cp_rank=rank)._sequences(Plan(1, 1, items), items)
        held = [row for part in held_rows(s.fed, 2, rank) for row in range(*part)]
        assert len(held) < s.fed and np.array_equal(s.routes, np.sort(routes, -1)[held][:, [2, 3]]) and not bad
    (s,), _ = feed(run, [])._sequences(Plan(1, 1, items), items)
    assert s.routes is None  # a stage of dense layers


def test_a_damaged_sample_leaves_the_others_and_names_its_group(run):
    epoch = run.new_epoch("rollout")
    writer = BufferWriter(run, epoch)
    for group in range(2):
        writer.start(group, "t")
        for sample in range(2):
            write_part(run, epoch, [trajectory(group, sample, 1)])
        writer.seal(group, [0, 1])
    stage = feed(run, [0], shape=(2, 2))
    items = [i for g in range(2) for i in stage._items(sealed_of(run, g))]
    place = sealed_of(run, 1).places[0]
    with open(parts_dir(run.buffer_dir) / place.segment, "r+b") as f:
        f.seek(place.body)
        f.write(b"\xff\xff\xff\xff")
    sequences, bad = stage._sequences(Plan(1, 1, items), items)
    assert bad == {1} and [s.rollout for s in sequences] == [0, 1, 3]


@pytest.mark.parametrize("shape", [None, (5, 2), (6, 4)])
def test_routes_of_another_model_or_none_end_the_run_with_advice(run, shape):
    put(run, None if shape is None else np.zeros((60, *shape), np.uint8))
    with pytest.raises(ConfigError, match=r"(?s)\[6, 2\] for this model.*routing_replay = false") as e:
        feed(run, [0])._items(sealed_of(run, 0))
    assert e.value.exit_code == 2, "the step is not started again"
    free = feed(run, [0], replay=False)
    items = free._items(sealed_of(run, 0))
    (s,), bad = free._sequences(Plan(1, 1, items), items)
    assert not items[0].routed and s.routes is None and not bad  # there they are only compared


def test_without_replay_routes_are_read_where_all_of_a_step_have_some(run):
    put(run, np.zeros((60, 6, 2), np.uint8))
    free = feed(run, [0, 1], replay=False)
    items = free._items(sealed_of(run, 0))
    for others, layers in (([], 2), ([replace_struct(items[0], routed=False)], None)):
        (s,), _ = free._sequences(Plan(1, 1, [*items, *others]), items)
        assert (s.routes.shape[1] if layers else s.routes) == layers


class Alone:
    leader = True

    def broadcast_bytes(self, data):
        return data


def leader_alone(run, version=lambda: 1, late=lambda: False, republish=None):
    """The feed of the only rank, of a model without routes. `version`: the newest."""
    link = SimpleNamespace(tick=lambda: None, wake=lambda: None, woken=lambda: True)
    step = SimpleNamespace(routes_shape=None, routing_replay=False, layers=[], data_rank=0, held_rows=None, plan=lambda n: BatchPlan(((tuple(range(len(n))),),)))
    queue = TrainerQueue(run, run.new_epoch("trainer"), restored_step=0, frontier=None)
    return Feed(run, Alone(), step, queue, link, lambda: "", lambda: False, version, late, republish)


def sealer(run):
    """Seals groups of one sample."""
    epoch = run.new_epoch("rollout")
    writer = BufferWriter(run, epoch)

    def seal(group, version=1):
        writer.start(group, "t")
        write_part(run, epoch, [replace(trajectory(group, 0, version), routes=None)])
        writer.seal(group, [0])

    return seal


def test_what_a_step_has_taken_is_dropped_when_the_version_rises_beyond_the_limit_before_it_is_complete(tmp_path):
    """Limit 1. Groups 0 and 1 are taken at version 5; 1 is damaged, and while the step waits for another, late engines are served by 6 and 7."""
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "trainer.groups_per_step=2", "buffer.max_staleness=1")))
    seal, newest, reads = sealer(run), [5], []
    seal(0, 4)
    seal(1, 4)
    f = leader_alone(run, lambda: newest[0])

    def read(plan, bins):
        reads.append((plan.version, sorted(i.group for i in plan.items)))
        if len(reads) > 1:
            return [], set()
        newest[0] = 7
        seal(2, 6)
        seal(3, 7)
        return [], {1}

    f._read = read
    batch = f.next(1)
    assert reads == [(5, [0, 1]), (7, [2, 3])] and batch.groups == [2, 3]
    assert f._queue.state.dropped_by_reason() == {"stale": 1, "digest": 1} and batch.plan.dropped_stale == 1


def test_an_engine_without_weights_is_given_them_by_all_ranks_before_the_groups_it_is_waited_for(run):
    """The step wants two groups and has one: the other comes only when the late engine has weights. What was taken stays taken."""
    seal = sealer(run)
    seal(0)
    late, told = iter([False, True]), []  # the second look comes after group 0 was taken

    def republish():
        told.append("weights")
        seal(1)

    f = leader_alone(run, late=lambda: next(late, False), republish=republish)
    f._read = lambda plan, bins: ([], set())
    batch = f.next(1)
    assert told == ["weights"] and batch.groups == [0, 1] and not batch.plan.republish


@pytest.fixture
def quick(monkeypatch):
    """Pauses of no length, counted."""
    slept = []
    monkeypatch.setattr(patience.time, "sleep", slept.append)
    return slept


def failing(monkeypatch, error, times, name=".seg"):
    """So many openings of files of that name fail."""
    real, left = os.open, iter(range(times))

    def open_(path, *args, **more):
        if str(path).endswith(name) and next(left, None) is not None:
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", open_)


def with_one_group(run):
    """(a leader's feed, the items of the one group that is ready)"""
    sealer(run)(0)
    f = leader_alone(run)
    f._queue.poll()
    return f, f._items_or_drop(f._queue.state.groups[0])


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOENT])
def test_a_file_that_cannot_be_opened_for_a_moment_is_no_damage(run, monkeypatch, quick, error):
    """ENOENT too: it is believed when it is said twice."""
    f, items = with_one_group(run)
    failing(monkeypatch, error, times=1 if error == errno.ENOENT else 3)
    sequences, bad = f._sequences(Plan(1, 1, items), items)
    assert len(sequences) == 1 and not bad and len(quick) == (1 if error == errno.ENOENT else 3)


def test_a_file_system_that_gives_no_answer_ends_the_step_and_no_group_is_dropped(run, monkeypatch, quick):
    seal = sealer(run)
    for group in range(4):
        seal(group)
    f = leader_alone(run)
    failing(monkeypatch, errno.EIO, times=1000)
    with pytest.raises(patience.UnreadableNow, match="cannot be read: .*Input/output error") as e:
        f.next(1)
    assert e.value.exit_code == 1, "the step is started again"
    assert tuple(quick)[-3:] == patience.PAUSES_S and f._queue.state.dropped_by_reason() == {}


def test_what_is_gone_is_believed_at_the_second_look_and_said_with_its_file(run, monkeypatch, quick, capfd):
    f, items = with_one_group(run)
    segment = next(parts_dir(run.buffer_dir).glob("*.seg"))
    segment.unlink()
    assert f._sequences(Plan(1, 1, items), items) == ([], {0}) and quick == [patience.PAUSES_S[0]]
    assert segment.name in capfd.readouterr().out


@pytest.mark.parametrize("good, stops", [(range(0), True), (range(0, 40, 8), False)])
def test_many_damaged_groups_in_a_row_stop_the_trainer_and_are_not_all_dropped(tmp_path, quick, good, stops):
    """Steps of two of 40 groups. With every eighth whole, there are never more than seven in a row, and each is replaced."""
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "trainer.groups_per_step=2", "buffer.capacity_groups=50")))
    seal = sealer(run)
    for group in range(40):
        seal(group)
    f = leader_alone(run)
    f._read = lambda plan, bins: ([], {i.group for i in plan.items} - set(good))
    if stops:
        with pytest.raises(EnvironmentFault, match="8 groups in a row are damaged or gone"):
            f.next(1)
        assert f._queue.state.dropped_by_reason() == {"digest": MOST_UNREADABLE - 2}
    else:
        assert f.next(1).groups == [0, 8]
        assert f._queue.state.dropped_by_reason() == {"digest": 7}


def test_the_leaves_of_a_rollout_have_one_number_in_the_step_and_its_advantage(run, world):
    """Two groups: in group 3, sample 1 (reward 1) has two leaves and sample 0 (reward 0) one; group 8 has one leaf of each."""
    epoch = run.new_epoch("rollout")
    writer = BufferWriter(run, epoch)
    for group, leaves in ((3, {0: 1, 1: 2}), (8, {0: 1, 1: 1})):
        writer.start(group, "t")
        for sample, count in leaves.items():
            write_part(run, epoch, [replace(trajectory(group, sample, 1), leaf=n) for n in range(count)])
        writer.seal(group, sorted(leaves))
    f = feed(run, [], shape=None)
    items = f._with_advantages([i for g in (3, 8) for i in f._items(sealed_of(run, g))])
    half = 0.5 / (0.5 + 1e-6)
    assert [(i.group, i.sample, i.stored.leaf, i.reward) for i in items] == [(3, 0, 0, 0), (3, 1, 0, 1), (3, 1, 1, 1), (8, 0, 0, 0), (8, 1, 0, 1)]
    assert [i.advantage for i in items] == pytest.approx([-half, half, half, -half, half])
    plan = Plan(step=1, version=1, items=items)
    assert [(key, [i.stored.leaf for i in leaves]) for key, leaves in plan.rollouts.items()] == [((3, 0), [0]), ((3, 1), [0, 1]), ((8, 0), [0]), ((8, 1), [0])]
    f._train_step.data_rank = 0
    sequences, bad = f._read(plan, BatchPlan((((4, 2), (1, 0)),)))
    assert bad == set() and [s.rollout for s in sequences] == [3, 1, 1, 0]
