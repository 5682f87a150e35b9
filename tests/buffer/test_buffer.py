import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from miles.buffer import (
    BufferState,
    BufferWriter,
    GroupReader,
    Status,
    TrainerQueue,
    stored_groups,
    write_part,
)
from miles.buffer import storage
from miles.buffer.frames import read_frame
from miles.buffer.segments import SegmentName, Source, segments
from miles.buffer.storage import parts_dir
from miles.config import load_config
from miles.core import NO_VERSION, StaleEpochError, StructureError, Trajectory
from miles.rundir import PoolDir, PoolFacts, RunDir
from tests.buffer.parts import finished_parts, group_of, read_one, read_slice, seal_parts, sealed_file, sealed_of, state_of


def trajectory(group=0, sample=0, version=1, reward=1.0, n=6):
    mask = np.array([0] * (n // 2) + [1] * (n - n // 2), np.uint8)
    return Trajectory(
        group_id=group, sample=sample, task_id="t", tokens=np.arange(n, dtype=np.int32), loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32), versions=np.where(mask, version, NO_VERSION).astype(np.int32),
        routes=np.arange((n - 1) * 4, dtype=np.uint8).reshape(n - 1, 2, 2), reward=reward, finish_reason="done", turns=1, exact=True,
    )


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "buffer.max_staleness=2")))


@pytest.fixture
def writer(run):
    return BufferWriter(run, run.new_epoch("rollout"))


def put(run, writer, group, version=1, samples=2):
    writer.start(group, "t")
    for s in range(samples):
        write_part(run, run.current_epoch("rollout"), [trajectory(group, s, version, reward=float(s))])
    writer.seal(group, list(range(samples)))


def queue(run, step=0):
    return TrainerQueue(run, run.new_epoch("trainer"), step)


def test_a_sealed_group_reads_back_equal(run, writer):
    put(run, writer, 7)
    g = group_of(run, 7)
    for s, t in enumerate(g.trajectories):
        expected = trajectory(7, s, 1, reward=float(s))
        for name in ("tokens", "loss_mask", "logprobs", "versions", "routes"):
            a, b = getattr(t, name), getattr(expected, name)
            assert a.dtype == b.dtype and np.array_equal(a, b), name
        assert (t.reward, t.sample, t.exact) == (float(s), s, True)
    assert [i["length"] for i in sealed_of(run, 7).summaries] == [6, 6]


def test_what_lies_where_another_group_or_another_sample_was_expected_is_not_believed(run, writer):
    put(run, writer, 7)
    put(run, writer, 8)
    with GroupReader(run.buffer_dir) as reader:
        at = state_of(run).groups[7].sealed
        first, second = reader.sealed(at).trajectories
        other = reader.sealed(state_of(run).groups[8].sealed).trajectories[0]
        for wrong in (replace(at, group=8), replace(at, offset=at.offset + 1), replace(at, size=at.size - 2), replace(at, size=at.size + 1)):
            with pytest.raises(StructureError) as e:
                reader.sealed(wrong)
            assert e.value.cause == "digest"
        for wrong in (structs.replace(first, group=8), structs.replace(first, place=other.place), structs.replace(first, place=structs.replace(second.place, sample=0)),
                      structs.replace(first, place=structs.replace(first.place, size=first.place.size + 1))):
            with pytest.raises(StructureError) as e:
                reader.slice(wrong)
            assert e.value.cause == "digest"
        assert reader.trajectory(first).sample == 0


def test_groups_are_taken_first_sealed_first_and_once(run, writer):
    for g in (3, 1, 2):
        put(run, writer, g)
    q = queue(run)
    assert [g.group_id for g in q.take(2, version=1, step=1).groups] == [3, 1]
    assert q.take(2, version=1, step=2) is None
    put(run, writer, 4)
    q.poll()
    assert [g.group_id for g in q.take(2, version=1, step=2).groups] == [2, 4]


def test_staleness_is_counted_when_taken_and_over_the_limit_dropped(run, writer):
    put(run, writer, 0, version=1)
    put(run, writer, 1, version=2)
    q = queue(run)
    taken = q.take(1, version=4, step=1)
    assert [g.group_id for g in taken.stale] == [0] and [g.group_id for g in taken.groups] == [1]
    assert q.state.dropped_by_reason() == {"stale": 1}


def test_a_restart_undoes_what_was_trained_after_its_checkpoint(run, writer):
    for g in range(3):
        put(run, writer, g)
    q = queue(run)
    for step in (1, 2):
        ids = [g.group_id for g in q.take(1, 1, step).groups]
        q.trained(ids, 1, step)
    q.take(1, 1, 3)  # taken, then the trainer dies
    again = queue(run, step=1)
    assert {g.group_id: g.status for g in again.state.groups.values()} == {0: Status.TRAINED, 1: Status.READY, 2: Status.READY}
    assert [g.group_id for g in again.take(2, 1, 2).groups] == [1, 2]


def test_an_old_trainer_cannot_take_after_a_new_one_has_started(run, writer):
    put(run, writer, 0)
    old = queue(run)
    queue(run)
    with pytest.raises(StaleEpochError):
        old.take(1, 1, 1)


def test_an_old_rollout_rank_cannot_begin_a_segment(run, writer):
    run.new_epoch("rollout")
    with pytest.raises(StaleEpochError):
        write_part(run, 1, [trajectory()])
    assert finished_parts(run.buffer_dir) == {}


def test_what_an_old_rank_appends_after_a_new_leader_has_started_is_not_seen(run, writer):
    write_part(run, 1, [trajectory(0, 0, reward=0.25)])
    second = BufferWriter(run, run.new_epoch("rollout"))
    write_part(run, 1, [trajectory(0, 0, reward=0.75)])  # to the segment that it had open
    write_part(run, 1, [trajectory(0, 1, reward=0.75)])
    write_part(run, 2, [trajectory(0, 1, reward=0.5)])
    second.seal(0, [0, 1])
    assert [t.reward for t in group_of(run, 0).trajectories] == [0.25, 0.5]


def test_a_leader_killed_between_seal_and_record_is_completed_by_the_next(run, writer):
    writer.start(5, "t")
    for s in range(2):
        write_part(run, 1, [trajectory(5, s)])
    seal_parts(run.buffer_dir, 5, [0, 1])  # ... and dead before `ready`
    second = BufferWriter(run, run.new_epoch("rollout"))
    second.seal(5, [0, 1])
    assert [g.group_id for g in state_of(run).ready_in_order()] == [5] and len(group_of(run, 5).trajectories) == 2
    assert sealed_file(run, 5).name.startswith("e000002."), "what the first left is not looked at"


def flip(run, group, sample, offset, *, from_end=False):
    """Flip one bit in the body of a stored sample."""
    place = next(p for p in sealed_of(run, group).places if p.sample == sample)
    at = place.offset + place.size - 1 - offset if from_end else place.body + offset
    with open(parts_dir(run.buffer_dir) / place.segment, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_anywhere_in_a_sample_is_found(run, data):
    if 0 not in state_of(run).groups:
        put(run, BufferWriter(run, run.new_epoch("rollout")), 0)
    place = sealed_of(run, 0).places[1]
    offset = data.draw(st.integers(0, place.size - 1))
    flip(run, 0, 1, offset, from_end=True)
    try:
        assert read_one(run, 0, 0).sample == 0  # the other sample is whole
        with pytest.raises(StructureError) as e:
            group_of(run, 0)
        assert e.value.cause == "digest"
    finally:
        flip(run, 0, 1, offset, from_end=True)
    group_of(run, 0)


def test_layers_and_rows_are_read_alone_and_verified_alone(run, writer):
    routes = np.random.default_rng(0).random((5000, 6, 32)).argsort(-1)[..., :4].astype(np.uint8)
    writer.start(0, "t")
    write_part(run, 1, [replace(trajectory(n=5001), routes=routes)])
    writer.seal(0, [0])
    expected = np.sort(routes, axis=-1)
    assert np.array_equal(read_slice(run, 0, 0, slice(2, 4)), expected[:, 2:4])
    assert read_slice(run, 0, 0, ()).shape == (5000, 0, 4)
    assert np.array_equal(read_slice(run, 0, 0, [1], lambda fed: ((0, 10), (fed - 10, fed))), expected[[*range(10), *range(4990, 5000)]][:, [1]])
    assert sealed_of(run, 0).summaries[0]["routes_shape"] == [6, 4]
    flip(run, 0, 0, 0, from_end=True)  # in the last rows of the last layer
    assert np.array_equal(read_slice(run, 0, 0, range(5)), expected[:, :5])
    assert np.array_equal(read_slice(run, 0, 0, [5], lambda fed: [(0, 4096)]), expected[:4096, [5]])
    with pytest.raises(StructureError, match="layers 5 .. 5, rows 4096 .. is not what was written"):
        read_slice(run, 0, 0, [5])
    place = sealed_of(run, 0).places[0]
    flip(run, 0, 0, place.offset + place.size - place.body - leaf_of(run, place).sizes[-1])  # in the header of the routes
    with pytest.raises(StructureError):
        read_slice(run, 0, 0, ())


def leaf_of(run, place):
    with open(parts_dir(run.buffer_dir) / place.segment, "rb") as f:
        return read_frame(f.fileno(), place, 0).leaves[0]


def test_trained_groups_beyond_the_budget_go_oldest_first(run, writer, monkeypatch):
    monkeypatch.setattr(storage, "SEALED_BYTES", 1)
    monkeypatch.setattr(storage, "PARTS_BYTES", 1)
    writer = BufferWriter(run, run.new_epoch("rollout"))
    q = queue(run)
    for g in range(3):
        put(run, writer, g)
        q.poll()
        q.take(1, 1, g + 1)
        q.trained([g], 1, g + 1)
    size = q.state.groups[0].bytes
    q._run.config = run.config.model_copy(update={"buffer": run.config.buffer.model_copy(update={"keep_trained_gb": 1.5 * size / 1e9})})
    assert q.retire(up_to_step=3) == 2
    assert stored_groups(run.buffer_dir, q.state) == [2]


@settings(max_examples=60)
@given(st.data())
def test_the_fold_does_not_depend_on_how_the_two_journals_interleave(data):
    ids = st.integers(0, 4)
    made = [{"kind": "start", "group": g, "task": "t"} for g in range(5)]
    made += [{"kind": "ready", "group": g, "task": "t", "trajectories": 2, "samples": 2, "oldest_version": 1, "tokens": 9, "reward_mean": 0.5}
             for g in data.draw(st.lists(ids, unique=True))]
    used, step = [], 0
    for _ in range(data.draw(st.integers(0, 6))):
        kind = data.draw(st.sampled_from(["taken", "trained", "restore"]))
        if kind == "restore":
            step = data.draw(st.integers(0, step))
            used.append({"kind": "restore", "step": step})
        else:
            step += kind == "taken"
            used.append({"kind": kind, "groups": [data.draw(ids)], "step": step, "version": 1})
    def fold(order):
        s = BufferState()
        for r in order:
            s.apply(r)
        return {i: (g.status, g.step, g.ready_order) for i, g in s.groups.items()}
    i = data.draw(st.integers(0, len(made)))
    mixed = list(itertools.chain(made[:i], used, made[i:]))
    assert fold(made + used) == fold(mixed) == fold(used + made)


# -- pools -------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def pool(run):
    made = PoolDir.create(run, PoolFacts(nodes=1, in_flight=2, time_limit="01:00:00"))
    made.new_epoch()
    return made


def test_segments_name_the_pool_that_wrote_them():
    own, pools = "e000002.node7.4711.0003.seg", "p0012.e000002.node7.4711.0003.seg"
    assert SegmentName.parse(own) == SegmentName(Source(0, 2), "node7.4711", 3) and str(SegmentName.parse(own)) == own
    assert SegmentName.parse(pools) == SegmentName(Source(12, 2), "node7.4711", 3) and str(SegmentName.parse(pools)) == pools
    assert [SegmentName.parse(n) for n in (f".{own}.node7.1.tmp", "notes.txt", f"{own}.tmp")] == [None] * 3


def test_samples_of_a_pool_are_sealed_while_it_is_followed_and_what_it_left_before(run, writer, pool):
    writer.start(0, "t")
    write_part(pool, 1, [trajectory(0, 0)])
    writer.follow(1, 1)
    assert writer.has_part(0, 0)
    write_part(pool, 1, [trajectory(0, 1)])
    writer.leave(1, 1)
    write_part(pool, 1, [trajectory(0, 2)])  # its segment was open: no fence is asked
    assert writer.has_part(0, 1)
    writer.seal(0, [0, 1, 2])
    assert [t.sample for t in group_of(run, 0).trajectories] == [0, 1]


def test_the_last_segment_of_a_pool_goes_when_its_epoch_is_over(run, writer, pool):
    writer.follow(1, 1)
    for s in (0, 1):
        write_part(pool, 1, [trajectory(0, s)])
    writer.start(0, "t")
    writer.seal(0, [0, 1])
    q = queue(run)
    q.take(1, 1, 1)
    q.trained([0], 1, 1)
    q._run.config = run.config.model_copy(update={"buffer": run.config.buffer.model_copy(update={"keep_trained_gb": 0.0})})
    assert q.retire(up_to_step=1) == 1 and len(segments(parts_dir(run.buffer_dir))) == 1  # it may still append to it
    run.new_epoch("rollout")
    q.retire(up_to_step=1)
    assert len(segments(parts_dir(run.buffer_dir))) == 1, "an epoch of the run's own ranks is none of a pool"
    pool.new_epoch()
    q.retire(up_to_step=1)
    assert segments(parts_dir(run.buffer_dir)) == []


def test_a_segment_stays_for_a_group_that_was_sealed_from_it_after_the_trainer_had_looked(run, writer, pool):
    """A fenced pool appends late; a leader that starts after that finds the sample and seals it."""
    writer.follow(1, 1)
    for s in (0, 1):
        write_part(pool, 1, [trajectory(0, s)])
    writer.start(0, "t")
    writer.seal(0, [0, 1])
    pool.new_epoch()
    q = queue(run)
    q.retire(up_to_step=0)  # looks at the segment: it holds group 0
    for s in (0, 1):
        write_part(pool, 1, [trajectory(1, s)])
    again = BufferWriter(run, run.new_epoch("rollout"))
    again.start(1, "t")
    again.seal(1, [0, 1])
    q.poll()
    q.take(1, 1, 1)
    q.trained([0], 1, 1)
    q._run.config = run.config.model_copy(update={"buffer": run.config.buffer.model_copy(update={"keep_trained_gb": 0.0})})
    q.retire(up_to_step=1)
    assert [t.sample for t in group_of(run, 1).trajectories] == [0, 1]
