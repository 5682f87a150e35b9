"""Samples with several leaves in the buffer: one part for each sample, all its leaves in the group, at every moment a process may die."""

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest

from miles.buffer import (
    BufferView,
    BufferWriter,
    GroupReader,
    Status,
    TrainerQueue,
    read_group,
    write_part,
)
from miles.buffer.storage import Parts, write_part_file
from miles.config import load_config
from miles.core import NO_VERSION, StructureError, Trajectory
from miles.rundir import RunDir
from tests.buffer.parts import finished_parts, group_of, read_one, seal_parts, sealed_of


def leaf(group, sample, number, mask, *, reward=1.0, version=1, first_token=0, routes=True):
    """A leaf whose tokens count up from `first_token`, with the given mask."""
    mask = np.array(mask, np.uint8)
    n = len(mask)
    rows = np.arange((n - 1) * 2, dtype=np.uint8).reshape(n - 1, 1, 2)
    return Trajectory(
        group_id=group, sample=sample, leaf=number, task_id="t", tokens=np.arange(first_token, first_token + n, dtype=np.int32), loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32), versions=np.where(mask, version, NO_VERSION).astype(np.int32), routes=rows if routes else None,
        reward=reward, finish_reason="done", turns=1, exact=True, meta={"reused_tokens": number})


def three_leaves():
    """Sample 0 has two leaves that share their first three tokens, sample 2 has one; sample 1 was lost."""
    forked = [leaf(4, 0, 0, [0, 1, 1, 0, 1], reward=1.0, version=3), leaf(4, 0, 1, [0, 0, 0, 0, 1, 1], reward=1.0, version=2)]
    return {0: forked, 2: [leaf(4, 2, 0, [0, 0, 1], reward=0.0, first_token=50, version=4)]}


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "buffer.max_staleness=2")))


def equal(a, b):
    arrays = ("tokens", "loss_mask", "logprobs", "versions", "routes")
    scalars = ("group_id", "sample", "leaf", "task_id", "reward", "finish_reason", "turns", "exact", "meta")
    return all(getattr(a, k).dtype == getattr(b, k).dtype and np.array_equal(getattr(a, k), getattr(b, k)) for k in arrays) and all(
        getattr(a, k) == getattr(b, k) for k in scalars)


def put(run, samples):
    writer = BufferWriter(run, run.new_epoch("rollout"))
    writer.start(4, "t")
    for leaves in samples.values():
        write_part(run, run.current_epoch("rollout"), leaves)
    writer.seal(4, sorted(samples))


def test_a_group_holds_all_leaves_in_the_order_of_sample_and_leaf(run):
    samples = three_leaves()
    put(run, dict(reversed(samples.items())))
    expected = [*samples[0], *samples[2]]
    group = group_of(run, 4)
    assert len(group.trajectories) == 3 and all(equal(a, b) for a, b in zip(group.trajectories, expected, strict=True))
    assert all(equal(read_one(run, 4, n), t) for n, t in enumerate(expected))
    assert [(s["sample"], s["leaf"], s["length"], s["oldest_version"]) for s in sealed_of(run, 4).summaries] == [(0, 0, 5, 3), (0, 1, 6, 2), (2, 0, 3, 4)]


def test_the_journal_counts_sequences_and_samples_and_a_reward_once_for_each_sample(run):
    put(run, three_leaves())
    view = BufferView(run)
    view.poll()
    g = view.state.groups[4]
    # rewards 1 (two leaves) and 0: the mean over samples is 1/2, over leaves it would be 2/3
    assert (g.trajectories, g.samples, g.tokens, g.reward_mean, g.oldest_version) == (3, 2, 5 + 6 + 3, 0.5, 2)


def test_a_group_is_as_old_as_the_oldest_token_of_any_leaf(run):
    put(run, three_leaves())
    queue = TrainerQueue(run, run.new_epoch("trainer"), 0)
    assert [g.group_id for g in queue.take(1, version=5, step=1).stale] == [4]  # 5 - 2 > 2


def test_a_sample_written_again_replaces_all_its_leaves(run):
    samples = three_leaves()
    write_part_file(run.buffer_dir, samples[0])
    write_part_file(run.buffer_dir, samples[0][:1])
    write_part_file(run.buffer_dir, samples[2])
    at = seal_parts(run.buffer_dir, 4, [0, 2])
    assert [(t.sample, t.leaf) for t in read_group(run.buffer_dir, at).trajectories] == [(0, 0), (2, 0)]


@pytest.mark.parametrize("change", [{"leaf": 2}, {"leaf": 0}, {"sample": 1}, {"reward": 0.5}, {"finish_reason": "length"}, {"group_id": 5}, {"task_id": "u"}])
def test_what_is_not_the_leaves_of_one_sample_is_refused(run, change):
    first, second = three_leaves()[0]
    with pytest.raises(StructureError) as e:
        write_part_file(run.buffer_dir, [first, replace(second, **change)])
    assert e.value.cause == "leaves" and finished_parts(run.buffer_dir) == {}


def test_the_thousandth_leaf_comes_after_the_others(run):
    many = [leaf(4, 0, n, [0, 1], first_token=n, routes=False) for n in range(1002)]
    write_part_file(run.buffer_dir, many)
    at = seal_parts(run.buffer_dir, 4, [0])
    with GroupReader(run.buffer_dir) as reader:
        sealed = reader.sealed(at)
        assert [s["leaf"] for s in sealed.summaries] == list(range(1002))
        assert reader.trajectory(sealed.trajectories[1001]).tokens.tolist() == [1001, 1002]


def carry_on(run):
    """What the next leader does: samples that are not there are played again, the group is sealed."""
    epoch = run.new_epoch("rollout")
    view = BufferView(run)
    view.poll()
    status = view.state.groups[4].status if 4 in view.state.groups else None
    if status is Status.READY:
        return
    writer, samples = BufferWriter(run, epoch), three_leaves()
    parts = writer.finished_parts([4])
    if status is None:
        writer.start(4, "t")
    for sample in set(samples) - set(parts.get(4, ())):
        write_part(run, epoch, samples[sample])
    writer.seal(4, sorted(samples))


CALLS = ("open", "writev", "fsync", "rename", "unlink")  # the system calls through which the buffer makes anything durable


def die_before_call(run, number):
    """In a child: put the group and die, as by kill -9, right before the `number`-th of these calls. False: the child came to its end."""
    child = os.fork()
    if child == 0:
        calls = itertools.count()

        def dying(real):
            def call(*args, **kw):
                if next(calls) == number:
                    os._exit(9)
                return real(*args, **kw)

            return call

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            put(run, three_leaves())
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_before_any_call_the_group_comes_whole_and_once(tmp_path):
    expected = [t for leaves in three_leaves().values() for t in leaves]
    for number in itertools.count():
        run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"run.name=kill{number}")))
        died = die_before_call(run, number)
        for sample, part in Parts(run.buffer_dir).groups.get(4, {}).items():  # a part that is there has all its leaves
            assert [i["leaf"] for i in part.summaries] == list(range(len(three_leaves()[sample])))
        carry_on(run)
        view = BufferView(run)
        view.poll()
        assert [(g.group_id, g.trajectories, g.samples) for g in view.state.with_status(Status.READY)] == [(4, 3, 2)], number
        assert all(equal(a, b) for a, b in zip(group_of(run, 4).trajectories, expected, strict=True)), number
        if not died:
            break
    assert number > 12  # segment (open, folder), parts (write, fsync), sealing (open, write, fsync, folder), records
