"""Faults of file systems, clocks and processes: what the buffer does (the table in docs/buffer.md, row by row)."""

import errno
import os
import random
import threading
import time
from types import SimpleNamespace

import pytest
from test_buffer import flip, put, queue, trajectory

from miles.buffer import BufferView, BufferWriter, Status, group_path, read_group, segments, write_part
from miles.buffer.storage import Parts, parts_dir, read_sealed
from miles.buffer.view import journal_name
from miles.config import load_config
from miles.core import EnvironmentFault
from miles.rundir import JournalReader, JournalWriter, RunDir
from miles.trainer.feed import Feed
from tests.buffer.parts import finished_parts, seal_parts


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "buffer.max_staleness=2", "trainer.groups_per_step=2")))


@pytest.fixture
def writer(run):
    return BufferWriter(run, run.new_epoch("rollout"))


def state_of(run):
    view = BufferView(run)
    view.poll()
    return view.state


def fail(monkeypatch, call, error, where, *, after=0, torn=0):
    """`os.<call>` fails with `error` for descriptors or paths that hold `where`, after so many good calls; `torn` bytes of a write arrive first."""
    real, good = getattr(os, call), iter(range(after))

    def failing(target, *args, **kw):
        name = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        if where in name and next(good, None) is None:
            if torn:
                real(target, [b"".join(args[0])[:torn]])
            raise OSError(error, os.strerror(error), name)
        return real(target, *args, **kw)

    monkeypatch.setattr(os, call, failing)


# -- full disk ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call, torn", [("writev", 0), ("writev", 40), ("writev", 500), ("fsync", 0), ("open", 0)])
def test_full_disk_at_a_part_the_sample_is_not_there_and_the_next_one_is(run, writer, monkeypatch, call, torn):
    writer.start(0, "t")
    write_part(run, 1, [trajectory(0, 0)])
    with monkeypatch.context() as m:
        if call == "open":  # at the end of a segment
            m.setattr(segments, "SEGMENT_BYTES", 1)
        fail(m, call, errno.ENOSPC, ".seg", torn=torn)
        with pytest.raises(EnvironmentFault, match="free space"):
            write_part(run, 1, [trajectory(0, 1, reward=0.5)])
    if call != "fsync":  # a frame that is whole but was not promised may be used: it is what was sampled
        assert finished_parts(run.buffer_dir) == {0: [0]}
    write_part(run, 1, [trajectory(0, 1, reward=0.75)])  # the sample is played again
    writer.seal(0, [0, 1])
    assert [t.reward for t in read_group(run.buffer_dir, 0).trajectories] == [1.0, 0.75]


@pytest.mark.parametrize("call, torn", [("open", 0), ("writev", 0), ("writev", 50), ("fsync", 0)])
def test_full_disk_at_the_seal_the_next_leader_seals(run, writer, monkeypatch, call, torn):
    writer.start(0, "t")
    for s in range(2):
        write_part(run, 1, [trajectory(0, s)])
    with monkeypatch.context() as m:
        m.setattr(os, "unlink", lambda *a, **k: None)  # not even the torn file can be removed
        fail(m, call, errno.ENOSPC, group_path(run.buffer_dir, 0).name, torn=torn)
        group_path(run.buffer_dir, 0).parent.mkdir(exist_ok=True)
        with pytest.raises(EnvironmentFault, match="free space"):
            writer.seal(0, [0, 1])
    assert state_of(run).groups[0].status is Status.OPEN
    BufferWriter(run, run.new_epoch("rollout")).seal(0, [0, 1])
    assert state_of(run).groups[0].status is Status.READY and len(read_group(run.buffer_dir, 0).trajectories) == 2


@pytest.mark.parametrize("call, torn", [("writev", 0), ("writev", 30), ("fsync", 0)])
def test_full_disk_at_the_journal_nothing_is_appended_after_it_and_the_next_epoch_goes_on(run, writer, monkeypatch, call, torn):
    put(run, writer, 0)
    with monkeypatch.context() as m:
        fail(m, call, errno.ENOSPC, ".log", torn=torn)
        with pytest.raises(EnvironmentFault, match="free space"):
            writer.start(1, "t")
    with pytest.raises(EnvironmentFault, match="restart the role"):  # there is room again, but a torn line would hide what follows
        writer.start(2, "t")
    second = BufferWriter(run, run.new_epoch("rollout"))
    put(run, second, 3)
    assert [g.group_id for g in state_of(run).ready_in_order()] == [0, 3] and 2 not in state_of(run).groups


# -- a folder that cannot be written -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("error, advice", [(errno.EROFS, "remount"), (errno.EACCES, "make the folder writable"), (errno.EDQUOT, "quota")])
@pytest.mark.parametrize("what", [".seg", ".json", ".log"])
def test_a_folder_that_cannot_be_written_says_what_to_do(run, writer, monkeypatch, error, advice, what):
    writer.start(0, "t")
    if what != ".seg":
        for s in range(2):
            write_part(run, 1, [trajectory(0, s)])
    group_path(run.buffer_dir, 0).parent.mkdir(exist_ok=True)
    fail(monkeypatch, "writev" if what == ".log" else "open", error, what)
    with pytest.raises(EnvironmentFault, match=advice):
        write_part(run, 1, [trajectory(0, 0)]) if what == ".seg" else writer.seal(0, [0, 1])


# -- slow disk ---------------------------------------------------------------------------------------------------------------
def test_on_a_slow_disk_groups_come_late_but_whole_and_once(run, writer, monkeypatch):
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (time.sleep(0.02), real(fd)))
    monkeypatch.setattr(os, "writev", lambda fd, pieces, w=os.writev: w(fd, [pieces[0][: max(1, len(pieces[0]) // 3)]]))  # and it takes little at once
    q, seen, making = queue(run), [], threading.Thread(target=lambda: [put(run, writer, g) for g in range(4)])
    making.start()
    while len(seen) < 4:
        alive = making.is_alive()
        q.poll()
        if (got := q.take(1, 1, len(seen) + 1)) is not None:
            assert len(read_group(run.buffer_dir, got.groups[0].group_id).trajectories) == 2
            seen.append(got.groups[0].group_id)
            q.trained(seen[-1:], 1, len(seen))
        assert alive or got or len(seen) == 4
    making.join()
    assert seen == [0, 1, 2, 3] and q.state.counts() == {"open": 0, "ready": 0, "taken": 0, "trained": 4, "dropped": 0}


# -- clocks ------------------------------------------------------------------------------------------------------------------
def life(run):
    """Two groups made, one trained, one stale; returns the bytes of the journals."""
    w = BufferWriter(run, run.new_epoch("rollout"))
    put(run, w, 0, version=0)
    put(run, w, 1, version=3)
    q = queue(run)
    q.take(1, version=3, step=1)
    q.trained([1], 3, 1)
    q.retire(1)
    w.close()
    return [p.read_bytes().replace(str(p).encode(), b"") for p in sorted((run.buffer_dir / "journal").iterdir())]


def test_a_clock_that_jumps_changes_no_decision(tmp_path, monkeypatch):
    def made(name):
        return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path / name}", "buffer.max_staleness=2")), now=0)

    monkeypatch.setattr(segments, "_HOST", "node")
    quiet = life(made("a"))
    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(-1e9, 1e10))
    monkeypatch.setattr(time, "time_ns", lambda: int(rng.uniform(-1e18, 1e19)))
    run = made("b")
    for path in run.buffer_dir.rglob("*"):
        os.utime(path, (0, 0))
    assert life(run) == quiet


# -- torn last records -------------------------------------------------------------------------------------------------------
def cut(path, drop):
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size - drop)


@pytest.mark.parametrize("drop", [1, 5, 40])
def test_a_torn_last_line_of_a_journal_is_not_believed(run, writer, drop):
    put(run, writer, 0)
    writer.start(1, "t")
    path = run.buffer_dir / "journal" / journal_name("rollout", 1)
    cut(path, drop)
    assert sorted(state_of(run).groups) == [0]


def test_a_damaged_line_before_whole_ones_is_an_error(run, writer):
    for g in range(3):
        writer.start(g, "t")
    path = run.buffer_dir / "journal" / journal_name("rollout", 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(EnvironmentFault, match="whole lines follow it"):
        state_of(run)


@pytest.mark.parametrize("drop", [1, 300, 100_000])
def test_a_torn_last_part_is_played_again(run, writer, drop):
    writer.start(0, "t")
    for s in range(2):
        write_part(run, 1, [trajectory(0, s)])
    (path,) = parts_dir(run.buffer_dir).iterdir()
    place = Parts(run.buffer_dir).groups[0][1].place
    cut(path, min(drop, place.size - 1))
    second = BufferWriter(run, run.new_epoch("rollout"))
    assert second.finished_parts([0]) == {0: [0]}
    write_part(run, 2, [trajectory(0, 1, reward=0.5)])
    second.seal(0, [0, 1])
    assert [t.reward for t in read_group(run.buffer_dir, 0).trajectories] == [1.0, 0.5]


def test_a_torn_sealed_file_without_a_record_is_made_again(run, writer):
    writer.start(0, "t")
    for s in range(2):
        write_part(run, 1, [trajectory(0, s)])
    seal_parts(run.buffer_dir, 0, [0, 1])
    cut(group_path(run.buffer_dir, 0), 7)  # the leader died while it wrote
    BufferWriter(run, run.new_epoch("rollout")).seal(0, [0, 1])
    assert state_of(run).groups[0].status is Status.READY and len(read_group(run.buffer_dir, 0).trajectories) == 2


# -- parts that are gone -----------------------------------------------------------------------------------------------------
def test_a_part_that_vanished_before_the_seal_is_left_out_and_a_group_of_one_is_dropped(run, writer):
    for group, samples in ((0, (0, 1, 2)), (1, (0, 1))):
        writer.start(group, "t")
        for s in samples[:-1]:
            write_part(run, 1, [trajectory(group, s, reward=float(s))])
        writer.seal(group, list(samples))
    state = state_of(run)
    assert (state.groups[0].status, state.groups[0].samples) == (Status.READY, 2)
    assert (state.groups[1].dropped, state.groups[1].tokens) == ("damaged_parts", 6)


def test_of_a_sample_that_is_there_twice_the_last_is_used_once(run, writer):
    writer.start(0, "t")
    for s, reward in ((0, 0.0), (1, 0.25), (1, 0.5)):
        write_part(run, 1, [trajectory(0, s, reward=reward)])
    writer.seal(0, [0, 1])
    assert [t.reward for t in read_group(run.buffer_dir, 0).trajectories] == [0.0, 0.5]
    g = state_of(run).groups[0]
    assert (g.samples, g.trajectories, g.reward_mean) == (2, 2, 0.25)


# -- sealed groups that are gone or damaged ----------------------------------------------------------------------------------
class Link:
    def tick(self):
        pass

    def wake(self):
        pass

    def woken(self):
        return True


def feed(run, q):
    return Feed(run, None, SimpleNamespace(routes_shape=None, routing_replay=False), q, Link(), lambda: "", lambda: False, lambda: 1, lambda: False, None)


@pytest.mark.parametrize("damage, reason", [("gone", "missing"), ("torn", "digest"), ("flipped", "digest")])
def test_a_ready_group_whose_file_is_gone_or_damaged_is_dropped_with_its_reason_and_replaced(run, writer, damage, reason):
    for g in range(3):
        put(run, writer, g)
    path = group_path(run.buffer_dir, 1)
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        cut(path, 20)
    else:
        data = bytearray(path.read_bytes())
        data[50] ^= 4
        path.write_bytes(data)
    q = queue(run)
    plan = feed(run, q)._plan(1, [], 0.0, 0)
    assert sorted({i.group for i in plan.items}) == [0, 2] and q.state.dropped_by_reason() == {reason: 1}
    assert q.state.groups[1].tokens == 12  # its figures are known although its file is not
    again = queue(run)  # a restart does not meet it again
    assert sorted({i.group for i in feed(run, again)._plan(1, [], 0.0, 0).items}) == [0, 2]


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_rank_that_finds_a_sample_gone_or_damaged_names_its_group(run, writer, damage):
    from miles.buffer import UNREADABLE

    put(run, writer, 0)
    if damage == "gone":
        (parts_dir(run.buffer_dir) / read_sealed(run.buffer_dir, 0).places[0].segment).unlink()
    else:
        flip(run, 0, 0, 3)
    with pytest.raises(UNREADABLE):
        read_group(run.buffer_dir, 0)


# -- older epochs ------------------------------------------------------------------------------------------------------------
def late(run, role, epoch, *records):
    """Append to a journal of an older epoch, as a process that had passed its check when it was fenced."""
    path = run.buffer_dir / "journal" / journal_name(role, epoch)
    w = JournalWriter.__new__(JournalWriter)
    w.path, w._fd = path, os.open(path, os.O_WRONLY | os.O_APPEND)
    w.append(*records)
    w.close()


def test_late_records_of_a_fenced_trainer_come_before_the_restart_that_undid_them(run, writer):
    for g in range(3):
        put(run, writer, g)
    old = queue(run)
    old.trained([old.take(1, 1, 1).groups[0].group_id], 1, 1)
    new = queue(run, step=1)
    late(run, "trainer", 1, {"kind": "taken", "groups": [1], "step": 2, "version": 1}, {"kind": "trained", "groups": [1], "step": 2, "version": 1})
    new.poll()
    assert [g.group_id for g in new.take(2, 1, 2).groups] == [1, 2]
    fresh = state_of(run)
    assert {g: i.status for g, i in fresh.groups.items()} == {g: i.status for g, i in new.state.groups.items()}


def test_a_late_drop_of_what_was_trained_since_does_not_undo_it(run, writer):
    put(run, writer, 0)
    queue(run)
    new = queue(run)
    new.trained([new.take(1, 1, 1).groups[0].group_id], 1, 1)
    late(run, "trainer", 1, {"kind": "stale", "group": 0, "step": 1, "version": 9, "oldest_version": 1, "tokens": 12, "reward_mean": 0.5})
    new.poll()
    assert new.state.groups[0].status is Status.TRAINED and state_of(run).groups[0].status is Status.TRAINED


def test_a_group_sealed_late_by_a_fenced_leader_stays_what_the_record_says(run, writer):
    writer.start(0, "t")
    for s in range(3):
        write_part(run, 1, [trajectory(0, s, reward=float(s))])
    second = BufferWriter(run, run.new_epoch("rollout"))
    second.seal(0, [0, 1, 2])
    before = group_path(run.buffer_dir, 0).read_bytes()
    sealed = seal_parts(run.buffer_dir, 0, [0, 1])  # the old leader, with another choice
    assert group_path(run.buffer_dir, 0).read_bytes() == before and len(sealed.places) == 3


# -- retention ---------------------------------------------------------------------------------------------------------------
def test_a_segment_goes_when_every_group_in_it_is_gone(run, writer, monkeypatch):
    config = run.config.model_copy(update={"buffer": run.config.buffer.model_copy(update={"keep_trained_gb": 0.0})})
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)  # a segment for each sample
    q = queue(run)
    for g in range(3):
        put(run, writer, g)
    q.poll()
    q.take(2, 1, 1)
    q.trained([0, 1], 1, 1)
    q._run.config = config
    assert q.retire(up_to_step=0) == 0 and len(segments.segments(parts_dir(run.buffer_dir))) == 6  # no checkpoint holds step 1 yet
    assert q.retire(up_to_step=1) == 2
    assert [(n.number, g) for n in segments.segments(parts_dir(run.buffer_dir)) for h, _ in segments.read_segment(parts_dir(run.buffer_dir), n)
            for g in [h.group]] == [(4, 2), (5, 2)]
    assert len(read_group(run.buffer_dir, 2).trajectories) == 2
    q.drop(2, "digest")
    run.new_epoch("rollout")  # its writers are gone: their last segments as well
    assert q.retire(up_to_step=1) == 1 and segments.segments(parts_dir(run.buffer_dir)) == []


def test_retention_goes_on_after_a_restart(run, writer, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    for g in range(2):
        put(run, writer, g)
    q = queue(run)
    q.take(2, 1, 1)
    q.trained([0, 1], 1, 1)
    second = queue(run, step=1)
    second._run.config = run.config.model_copy(update={"buffer": run.config.buffer.model_copy(update={"keep_trained_gb": 1.5 * second.state.groups[0].bytes / 1e9})})
    assert second.retire(up_to_step=1) == 1
    assert [group_path(run.buffer_dir, g).exists() for g in range(2)] == [False, True]
    assert [n.number for n in segments.segments(parts_dir(run.buffer_dir))] == [2, 3]


def test_a_reader_follows_a_journal_that_grows_by_parts_of_lines(tmp_path):
    w = JournalWriter(tmp_path / "a.log")
    w.append({"n": 1}, {"n": 2})
    data, r = (tmp_path / "a.log").read_bytes(), JournalReader(tmp_path / "b.log")
    seen = []
    for n in range(len(data) + 1):
        (tmp_path / "b.log").write_bytes(data[:n])
        seen += r.poll()
    assert seen == [{"n": 1}, {"n": 2}]
    w.close()


# -- an answer that comes late -----------------------------------------------------------------------------------------------
def test_a_part_that_comes_after_its_group_was_sealed_changes_nothing(run, writer):
    """Of a rank that was frozen and wakes up: its sample was played by another."""
    writer.start(0, "t")
    for s in range(2):
        write_part(run, 1, [trajectory(0, s)])
    writer.seal(0, [0, 1])
    before = state_of(run).groups[0]
    write_part(run, 1, [trajectory(0, 1, reward=0.25)])
    put(run, writer, 1)
    assert state_of(run).groups[0] == before and [t.reward for t in read_group(run.buffer_dir, 0).trajectories] == [1.0, 1.0]
    assert BufferWriter(run, run.new_epoch("rollout")).finished_parts([]) == {}


# -- a listing that is late, as an NFS client's may be ------------------------------------------------------------------------
def test_a_part_in_a_segment_that_no_listing_shows_yet_is_found_where_its_writer_says_that_it_is(run, writer, monkeypatch):
    writer.start(0, "t")
    write_part(run, 1, [trajectory(0, 0)])
    writer.finished_parts([0])
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    hidden = [write_part(run, 1, [trajectory(0, s, reward=0.5)]) for s in (1, 2)]
    shown = os.listdir
    monkeypatch.setattr(segments.os, "listdir", lambda folder: [n for n in shown(folder) if n not in {h.segment for h in hidden}])
    writer.told(0, 1, *hidden[0])
    writer.told(0, 2, hidden[1].segment, hidden[1].offset + 1)  # nothing begins there
    assert writer.seal(0, [0, 1, 2, 3]) == [2, 3], "which its caller counts"
    assert [t.reward for t in read_group(run.buffer_dir, 0).trajectories] == [1.0, 0.5]
    monkeypatch.undo()
    put(run, writer, 1)  # the listing shows them: of a group that is closed
    assert [g.samples for g in state_of(run).ready_in_order()] == [2, 2]
