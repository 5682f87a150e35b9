"""Faults of file systems, clocks and processes: what the buffer does (the table in docs/buffer.md, row by row)."""

import errno
import os
import random
import threading
import time
from types import SimpleNamespace

import pytest
from test_buffer import flip, put, queue, trajectory

from miles.buffer import BufferWriter, Status, segments, storage, stored_groups, write_part
from miles.buffer.storage import Parts, groups_dir, parts_dir, sealed_in
from miles.buffer.view import journal_name
from miles.config import load_config
from miles.core import EnvironmentFault
from miles.rundir import JournalReader, JournalWriter, RunDir
from miles.trainer.feed import Feed
from tests.buffer.parts import finished_parts, group_of, sealed_file, sealed_of, state_of


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "buffer.max_staleness=2", "trainer.groups_per_step=2")))


@pytest.fixture
def writer(run):
    return BufferWriter(run, run.new_epoch("rollout"))


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
    if call == "open":
        monkeypatch.setattr(storage, "PARTS_BYTES", 1)  # each sample begins a segment
    writer.start(0, "t")
    write_part(run, 1, [trajectory(0, 0)])
    with monkeypatch.context() as m:
        fail(m, call, errno.ENOSPC, ".seg", torn=torn)
        with pytest.raises(EnvironmentFault, match="free space"):
            write_part(run, 1, [trajectory(0, 1, reward=0.5)])
    if call != "fsync":  # a frame that is whole but was not promised may be used: it is what was sampled
        assert finished_parts(run.buffer_dir) == {0: [0]}
    write_part(run, 1, [trajectory(0, 1, reward=0.75)])  # the sample is played again
    writer.seal(0, [0, 1])
    assert [t.reward for t in group_of(run, 0).trajectories] == [1.0, 0.75]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("call, where, torn", [("open", "/groups/", 0), ("writev", "/groups/", 0), ("writev", "/groups/", 50), ("fsync", "/groups/", 0), ("fsync", "/groups", 0)])
def test_full_disk_at_the_seal_the_next_leader_seals(run, writer, monkeypatch, call, where, torn, after):
    """Of the first group, or of the one after it; "/groups" is the folder too."""
    monkeypatch.setattr(storage, "SEALED_BYTES", 1 if call == "open" or where == "/groups" else 4 << 20)  # as long as it takes a new segment
    writer = BufferWriter(run, run.new_epoch("rollout"))
    for g in range(after):
        put(run, writer, g)
    writer.start(after, "t")
    for s in range(2):
        write_part(run, 2, [trajectory(after, s)])
    with monkeypatch.context() as m:
        fail(m, call, errno.ENOSPC, where, torn=torn)
        with pytest.raises(EnvironmentFault, match="free space"):
            writer.seal(after, [0, 1])
    assert state_of(run).groups[after].status is Status.OPEN
    BufferWriter(run, run.new_epoch("rollout")).seal(after, [0, 1])
    for g in range(after + 1):
        assert state_of(run).groups[g].status is Status.READY and len(group_of(run, g).trajectories) == 2
    assert sealed_file(run, after).name.startswith("e000003."), "nothing follows what may be torn"


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
@pytest.mark.parametrize("what", ["/parts/", "/groups/", ".log"])
def test_a_folder_that_cannot_be_written_says_what_to_do(run, writer, monkeypatch, error, advice, what):
    writer.start(0, "t")
    if what != "/parts/":
        for s in range(2):
            write_part(run, 1, [trajectory(0, s)])
    fail(monkeypatch, "writev" if what == ".log" else "open", error, what)
    with pytest.raises(EnvironmentFault, match=advice):
        write_part(run, 1, [trajectory(0, 0)]) if what == "/parts/" else writer.seal(0, [0, 1])


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
            assert len(group_of(run, got.groups[0].group_id).trajectories) == 2
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
    assert [t.reward for t in group_of(run, 0).trajectories] == [1.0, 0.5]


@pytest.mark.parametrize("drop", [0, 1, 7, 300])
def test_a_sealed_group_without_a_record_whole_or_torn_is_made_again(run, writer, drop):
    put(run, writer, 0)
    writer.start(1, "t")
    for s in range(2):
        write_part(run, 1, [trajectory(1, s)])
    writer._append = lambda record: None  # the leader died before the record
    writer.seal(1, [0, 1])
    left = sealed_file(run, 0)
    assert sealed_in(left) == {0, 1}
    cut(left, drop)  # or while it wrote
    assert sealed_in(left) == ({0, 1} if drop <= 1 else {0}) and state_of(run).groups[1].status is Status.OPEN
    BufferWriter(run, run.new_epoch("rollout")).seal(1, [0, 1])
    for g in range(2):
        assert state_of(run).groups[g].status is Status.READY and len(group_of(run, g).trajectories) == 2
    assert sealed_file(run, 1) != left


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


def test_with_min_samples_a_group_is_dropped_for_every_part_that_vanished(tmp_path):
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "rollout.min_samples=3")))
    writer = BufferWriter(run, run.new_epoch("rollout"))
    for group, samples in ((0, (0, 1, 2)), (1, (0, 1))):
        writer.start(group, "t")
        for s in (0, 1):
            write_part(run, 1, [trajectory(group, s, reward=float(s))])
        writer.seal(group, list(samples))
    state = state_of(run)  # the second is whole: how many samples a group has is the scheduler's to decide
    assert [state.groups[g].status for g in (0, 1)] == [Status.DROPPED, Status.READY] and state.groups[0].dropped == "damaged_parts"


def test_of_a_sample_that_is_there_twice_the_last_is_used_once(run, writer):
    writer.start(0, "t")
    for s, reward in ((0, 0.0), (1, 0.25), (1, 0.5)):
        write_part(run, 1, [trajectory(0, s, reward=reward)])
    writer.seal(0, [0, 1])
    assert [t.reward for t in group_of(run, 0).trajectories] == [0.0, 0.5]
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
def test_a_ready_group_whose_record_is_gone_or_damaged_is_dropped_with_its_reason_and_replaced(run, monkeypatch, damage, reason):
    monkeypatch.setattr(storage, "SEALED_BYTES", 1 if damage in ("gone", "torn") else 4 << 20)  # the whole file, or the middle of one that goes on to be read
    writer = BufferWriter(run, run.new_epoch("rollout"))
    for g in range(3):
        put(run, writer, g)
    path, at = sealed_file(run, 1), state_of(run).groups[1].sealed
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        cut(path, 20)
    else:
        data = bytearray(path.read_bytes())
        data[at.offset + 50] ^= 4
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
        (parts_dir(run.buffer_dir) / sealed_of(run, 0).places[0].segment).unlink()
    else:
        flip(run, 0, 0, 3)
    with pytest.raises(UNREADABLE):
        group_of(run, 0)


# -- older epochs ------------------------------------------------------------------------------------------------------------
def late(run, role, epoch, *records):
    """Append to a journal of an older epoch, as a process that had passed its check when it was fenced."""
    path = run.buffer_dir / "journal" / journal_name(role, epoch)
    w = JournalWriter.__new__(JournalWriter)
    w.path, w._fd = path, os.open(path, os.O_WRONLY | os.O_APPEND)
    w.append(*records)
    w.close()


def pass_checks(writer):
    """This leader has passed all of them when it is fenced."""
    writer._check = writer._sealed._fence = lambda: None


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


@pytest.mark.parametrize("first", ["fenced", "living"])
def test_of_a_group_sealed_by_a_fenced_leader_and_by_a_living_one_the_newest_epoch_counts_for_all_readers(run, writer, first):
    """The fenced one, past its check, seals another choice of samples, before or after its successor."""
    writer.start(0, "t")
    for s in range(3):
        write_part(run, 1, [trajectory(0, s, reward=float(s))])
    second = BufferWriter(run, run.new_epoch("rollout"))
    pass_checks(writer)
    q, turns = queue(run), [lambda: writer.seal(0, [0, 1]), lambda: second.seal(0, [0, 1, 2])]
    for seal in turns if first == "fenced" else turns[::-1]:
        seal()
        q.poll()
    put(run, second, 1)
    q.poll()
    fresh = state_of(run)
    assert fresh.groups == q.state.groups and (fresh.in_sealed, fresh.in_segment) == (q.state.in_sealed, q.state.in_segment)
    assert [g.group_id for g in q.state.ready_in_order()] == [0, 1] and (q.state.groups[0].samples, q.state.groups[0].reward_mean) == (3, 1.0)
    assert [t.reward for t in group_of(run, 0).trajectories] == [0.0, 1.0, 2.0]


def test_all_segments_of_a_group_that_was_sealed_twice_stay_as_long_as_it_is_needed(run, writer):
    writer.start(0, "t")
    for s in range(2):
        write_part(run, 1, [trajectory(0, s)])
    second = BufferWriter(run, run.new_epoch("rollout"))
    pass_checks(writer)
    writer.seal(0, [0, 1])
    for s in range(2):
        write_part(run, 2, [trajectory(0, s)])  # played again by those who did not see it
    second.seal(0, [0, 1])
    run.new_epoch("rollout")  # nobody appends any more
    q = queue(run)
    q._run.config = nothing_kept(run)
    q.retire(up_to_step=0)
    both = {f"e00000{n}" for n in (1, 2)}
    assert epochs_of(run) == (both, both)
    q.take(1, 1, 1)
    q.trained([0], 1, 1)
    q.retire(up_to_step=0)
    assert epochs_of(run) == (both, both) and len(group_of(run, 0).trajectories) == 2
    assert q.retire(up_to_step=1) == 1 and epochs_of(run) == (set(), set())


# -- retention ---------------------------------------------------------------------------------------------------------------
def nothing_kept(run):
    return run.config.model_copy(update={"buffer": run.config.buffer.model_copy(update={"keep_trained_gb": 0.0})})


def epochs_of(run):
    """Of the segments of parts, and of sealed groups."""
    return tuple({str(n).partition(".")[0] for n in segments.segments(folder(run.buffer_dir))} for folder in (parts_dir, groups_dir))


@pytest.fixture
def one_each(monkeypatch):
    """A segment for each sample and for each sealed group."""
    monkeypatch.setattr(storage, "PARTS_BYTES", 1)
    monkeypatch.setattr(storage, "SEALED_BYTES", 1)


def test_a_segment_goes_when_every_group_in_it_is_gone(one_each, run, writer):
    config = nothing_kept(run)
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
    assert [(n.number, sealed_in(groups_dir(run.buffer_dir) / str(n))) for n in segments.segments(groups_dir(run.buffer_dir))] == [(2, {2})]
    assert len(group_of(run, 2).trajectories) == 2
    q.drop(2, "digest")
    run.new_epoch("rollout")  # its writers are gone: their last segments as well
    assert q.retire(up_to_step=1) == 1 and epochs_of(run) == (set(), set())


def test_a_segment_of_sealed_groups_stays_for_each_group_in_it_also_for_one_that_only_a_journal_names(run, writer):
    for g in range(3):
        put(run, writer, g)
    data = bytearray(sealed_file(run, 1).read_bytes())
    data[state_of(run).groups[1].sealed.offset + 20] ^= 1
    sealed_file(run, 1).write_bytes(data)
    run.new_epoch("rollout")
    q = queue(run)
    q._run.config = nothing_kept(run)
    for step, group in enumerate((0, 2, 1), 1):
        assert epochs_of(run) == ({"e000001"}, {"e000001"})
        q.trained([group], 1, step)
        assert q.retire(up_to_step=step) == 1
    assert epochs_of(run) == (set(), set())


def train_two(run, writer):
    for g in range(2):
        put(run, writer, g)
    q = queue(run)
    q.take(2, 1, 1)
    q.trained([0, 1], 1, 1)


def test_retention_goes_on_after_a_restart(one_each, run, writer):
    train_two(run, writer)
    second = queue(run, step=1)
    second._run.config = run.config.model_copy(update={"buffer": run.config.buffer.model_copy(update={"keep_trained_gb": 1.5 * second.state.groups[0].bytes / 1e9})})
    assert second.retire(up_to_step=1) == 1

    def left():
        return [[n.number for n in segments.segments(folder(run.buffer_dir))] for folder in (parts_dir, groups_dir)]

    assert stored_groups(run.buffer_dir, second.state) == [1] and left() == [[2, 3], [1]]
    third = queue(run, step=1)  # group 0 is gone, and takes no room
    assert third.retire(up_to_step=1) == 0 and left() == [[2, 3], [1]]


def test_a_group_that_lost_one_of_its_segments_is_not_kept_for_the_others_after_a_restart(one_each, run, writer):
    train_two(run, writer)
    (parts_dir(run.buffer_dir) / sealed_of(run, 0).places[1].segment).unlink()  # or a trainer was killed while it removed them
    again = queue(run, step=1)
    assert stored_groups(run.buffer_dir, again.state) == [1] and again.retire(up_to_step=1) == 0
    assert [[n.number for n in segments.segments(folder(run.buffer_dir))] for folder in (parts_dir, groups_dir)] == [[2, 3], [1]]


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
    assert state_of(run).groups[0] == before and [t.reward for t in group_of(run, 0).trajectories] == [1.0, 1.0]
    assert BufferWriter(run, run.new_epoch("rollout")).finished_parts([]) == {}


# -- a listing that is late, as an NFS client's may be ------------------------------------------------------------------------
def test_a_part_in_a_segment_that_no_listing_shows_yet_is_found_where_its_writer_says_that_it_is(run, writer, monkeypatch):
    monkeypatch.setattr(storage, "PARTS_BYTES", 1)
    writer.start(0, "t")
    write_part(run, 1, [trajectory(0, 0)])
    writer.finished_parts([0])
    hidden = [write_part(run, 1, [trajectory(0, s, reward=0.5)]) for s in (1, 2)]
    shown = os.listdir
    monkeypatch.setattr(segments.os, "listdir", lambda folder: [n for n in shown(folder) if n not in {h.segment for h in hidden}])
    writer.told(0, 1, *hidden[0])
    writer.told(0, 2, hidden[1].segment, hidden[1].offset + 1)  # nothing begins there
    assert writer.seal(0, [0, 1, 2, 3]) == [2, 3], "which its caller counts"
    assert [t.reward for t in group_of(run, 0).trajectories] == [1.0, 0.5]
    monkeypatch.undo()
    put(run, writer, 1)  # the listing shows them: of a group that is closed
    assert [g.samples for g in state_of(run).ready_in_order()] == [2, 2]
