"""The rollout leader over a real run directory with a pool, whose side is played by hand: its journal, its parts and its epochs."""

import asyncio
from types import SimpleNamespace

import h5py
import pytest
from test_leader import NEWEST, trajectory

from miles.buffer import Status, write_part
from miles.config import load_config
from miles.core import Role, StaleEpochError
from miles.log import RunLog
from miles.rollout import leader as leader_module
from miles.rollout import pools
from miles.rollout.leader import Leader
from miles.rollout.pool import OUT, Inbox
from miles.rundir import JournalWriter, PoolDir, PoolFacts, RunDir
from tests.buffer.parts import group_of

LEASE = 30.0


@pytest.fixture
def clock(monkeypatch):
    """The leader's clock, which a test moves. Starts late, so that nothing was done just now."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(pools.time, "monotonic", lambda: now.s)
    return now


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "rollout.in_flight=2", "rollout.group_size=2", "buffer.capacity_groups=4",
                                                                 "trainer.groups_per_step=2", "rollout.retries=0", f"rollout.pool_lease_s={LEASE}")))
    made.new_attempt()
    return made


class Rollout:
    """A leader of one rank, whose samples `given` end when a test says so."""

    def __init__(self, run, clock):
        self.run, self.clock, self.epoch = run, clock, run.new_epoch("rollout")
        self.given: list[tuple[int, int]] = []
        self.held_by: dict[tuple[int, int], int | None] = {}
        world = SimpleNamespace(size=1, leader=True, post_all=lambda message: None, post=self.post)
        self.log = RunLog(run.log_path(1, "rollout", 0, self.epoch), role="rollout", rank=0, attempt=1, epoch=self.epoch)
        self.leader = Leader(run, self.epoch, world, self.log, {"a": 60.0, "b": 30.0}, lambda: NEWEST)
        self.leader.receive(0, {"kind": "held", "samples": []})

    def post(self, rank, message):
        sample = (message["group"], message["sample"])
        self.given.append(sample)
        self.held_by[sample] = message["held_by"]

    def up(self):
        self.leader.receive(0, {"kind": "up", "version": NEWEST, "moved": [], "url": "http://engine"})

    def tick(self, seconds=3.0):
        self.clock.s += seconds
        asyncio.run(self.leader.tick())

    def end(self, group, sample, cause=None):
        if cause is None:
            write_part(self.run, self.epoch, [trajectory(group, sample, float(sample))])
        self.leader.receive(0, {"kind": "finished", "group": group, "sample": sample, "cause": cause})

    @property
    def state(self):
        return self.leader._view.state

    def stop(self):
        self.leader.close()
        self.log.close()


class Pool:
    """One epoch of a pool of one rank, 1000, with two slots."""

    def __init__(self, pool: PoolDir):
        self.dir, self.epoch = pool, pool.new_epoch()
        folder = pool.pool_epoch_dir(pool.pool, self.epoch)
        self.out, self.inbox = JournalWriter(folder / OUT), Inbox(folder)
        self.numbers = {}
        self.out.append({"kind": "beat"})

    def up(self):
        self.out.append({"kind": "up", "rank": 1000, "version": NEWEST, "url": "http://pool", "moved": []})

    def beat(self):
        self.out.append({"kind": "beat"})

    def given(self):
        """(group, sample) of new assignments."""
        new = {(r["message"]["group"], r["message"]["sample"]): r["number"] for r in self.inbox.poll() if r["kind"] == "assign"}
        self.numbers |= new
        return list(new)

    def write(self, group, sample):
        write_part(self.dir, self.epoch, [trajectory(group, sample, float(sample))])

    def say(self, group, sample, cause=None):
        self.out.append({"kind": "finished", "numbers": [self.numbers[group, sample]], "cause": cause})


@pytest.fixture
def pool_dir(run):
    return PoolDir.create(run, PoolFacts(nodes=1, in_flight=2, time_limit="01:00:00"))


@pytest.fixture
def joined(run, clock, pool_dir):
    """A leader that runs (0, 0) and (1, 0) itself; its pool has (0, 1) and (1, 1)."""
    rollout, pool = Rollout(run, clock), Pool(pool_dir)
    rollout.up()
    rollout.tick()  # finds the pool
    pool.up()
    assert rollout.given == [(0, 0), (0, 1)]
    rollout.tick()
    assert pool.given() == []  # written at the next look
    rollout.tick()
    assert pool.given() == [(1, 0), (1, 1)]
    yield rollout, pool
    rollout.stop()


def groups(rollout, status=Status.READY):
    return {g.group_id: g.samples for g in rollout.state.with_status(status)}


def test_a_pool_brings_slots_and_its_samples_are_sealed_like_all_others(joined):
    rollout, pool = joined
    for sample in (0, 1):
        pool.write(1, sample)
        pool.say(1, sample)
    rollout.tick()
    assert groups(rollout) == {1: 2}
    assert [t.sample for t in group_of(rollout.run, 1).trajectories] == [0, 1]
    rollout.tick()
    assert pool.given() == [(2, 0), (2, 1)] and rollout.given == [(0, 0), (0, 1)]


def test_a_pool_gets_no_work_before_it_has_written_since_it_was_found(run, clock, pool_dir):
    pool = Pool(pool_dir)
    pool.up()  # what it said before may be long ago
    rollout = Rollout(run, clock)
    rollout.tick()
    rollout.tick()
    assert pool.given() == [] and rollout.leader._scheduler.engines() == {}
    pool.beat()
    rollout.tick()
    rollout.tick()
    assert pool.given() == [(0, 0), (0, 1)]
    rollout.stop()


def test_samples_of_a_silent_pool_are_started_again_at_once_and_that_is_no_retry(joined):
    rollout, pool = joined
    for _ in range(int(LEASE) + 1):
        rollout.tick(1.0)
    rollout.end(0, 0)
    rollout.tick()
    assert rollout.leader._scheduler.engines().keys() == {0} and pool.dir.current_epoch(Role.ROLLOUT) == pool.epoch + 1
    assert rollout.held_by[1, 1] == 1000, "it goes on from the turns in the session file of the pool's rank"
    assert rollout.given == [(0, 0), (0, 1), (1, 1)]  # of the two, the one that was given last waits at the front
    rollout.end(1, 1)
    rollout.end(0, 1)
    rollout.tick()
    rollout.end(1, 0)
    rollout.tick()
    assert groups(rollout) == {0: 2, 1: 2}  # with rollout.retries = 0 a retry would have cost them their place
    rollout.log.close()
    with h5py.File(rollout.run.log_path(1, "rollout", 0, rollout.epoch), "r") as f:
        rows = f["tables/trajectories"][...]
    assert sorted(zip(rows["group_id"], rows["sample"], rows["status"], rows["rank"])) == [(1, 0, b"retried:pool", 1000), (1, 1, b"retried:pool", 1000)]


def test_silence_counts_only_while_the_leader_itself_has_listened(joined):
    rollout, pool = joined
    rollout.tick(100 * LEASE)  # the leader was stopped, or waited for a file system
    assert 1000 in rollout.leader._scheduler.engines() and pool.dir.current_epoch(Role.ROLLOUT) == pool.epoch


def test_a_paused_pool_that_goes_on_is_fenced_and_one_part_of_each_sample_is_sealed(joined):
    rollout, pool = joined
    for _ in range(int(LEASE) + 1):
        rollout.tick(1.0)
    rollout.end(0, 0)
    rollout.end(0, 1)
    rollout.tick()
    assert rollout.given[2:] == [(1, 1), (1, 0)]
    rollout.end(1, 1)
    pool.out.append({"kind": "finished", "numbers": [pool.numbers[1, 0], pool.numbers[1, 1]], "cause": None})
    with pytest.raises(StaleEpochError):  # a segment is begun under the fence only
        pool.write(1, 0)
    rollout.tick()
    assert groups(rollout) == {0: 2}, "what a fenced pool says is not heard"
    rollout.end(1, 0)
    rollout.tick()
    assert groups(rollout) == {0: 2, 1: 2}
    assert [(t.sample, t.group_id) for t in group_of(rollout.run, 1).trajectories] == [(0, 1), (1, 1)]


def test_what_a_fenced_pool_appends_to_the_segment_that_it_has_open_is_not_sealed(joined):
    rollout, pool = joined
    pool.write(1, 0)
    pool.say(1, 0)
    rollout.tick()
    for _ in range(int(LEASE) + 1):
        rollout.tick(1.0)
    write_part(pool.dir, pool.epoch, [trajectory(1, 1, 77.0)])  # its segment is open: no fence is asked
    rollout.end(0, 0)
    rollout.end(0, 1)
    rollout.tick()
    assert (1, 1) in rollout.given
    rollout.end(1, 1)
    rollout.tick()
    assert [t.reward for t in group_of(rollout.run, 1).trajectories] == [0.0, 1.0]


def test_what_a_pool_had_finished_when_it_was_lost_is_kept_also_where_it_could_not_say_so(joined):
    rollout, pool = joined
    pool.write(1, 0)
    pool.say(1, 0)
    rollout.tick()
    pool.write(1, 1)  # and killed before its leader could say so
    for _ in range(int(LEASE) + 1):
        rollout.tick(1.0)
    assert groups(rollout) == {1: 2} and rollout.given == [(0, 0), (0, 1)]


def test_a_pool_whose_supervisor_raised_its_epoch_is_over_at_once_and_its_successor_joins(joined):
    rollout, pool = joined
    again = Pool(pool.dir)
    rollout.tick()
    assert rollout.leader._scheduler.engines().keys() == {0}
    again.up()
    rollout.tick()
    rollout.tick()
    assert sorted(again.given()) == [(1, 0), (1, 1)]


def test_ranks_that_were_started_again_go_on_with_what_they_held_and_let_go_of_what_others_have(joined):
    rollout, pool = joined
    again = Pool(pool.dir)
    again.up()
    again.out.append({"kind": "held", "rank": 1000, "samples": [[1, 0, 2], [1, 1, 1], [0, 0, 3]]})
    rollout.tick()
    again.beat()
    rollout.tick()
    rollout.tick()
    orders = again.inbox.poll()
    assert [(o["rank"], o["message"]) for o in orders if o["kind"] == "order"] == [(1000, {"kind": "release", "samples": [[0, 0]]})]
    given = [(o["message"]["group"], o["message"]["sample"], o["message"]["held_by"]) for o in orders if o["kind"] == "assign"]
    assert sorted(given) == [(1, 0, 1000), (1, 1, 1000)]


def test_a_new_leader_goes_on_with_what_the_pool_runs_and_what_it_finished_meanwhile(joined, run, clock):
    first, pool = joined
    pool.write(1, 0)
    pool.say(1, 0)  # and no leader has read it
    second = Rollout(run, clock)
    second.up()
    second.tick()
    assert second.given == [(0, 0), (0, 1)] and pool.given() == []
    pool.beat()
    second.tick()
    pool.write(1, 1)
    pool.say(1, 1)
    second.tick()
    assert groups(second) == {1: 2}
    second.tick()
    assert pool.given() == [(2, 0), (2, 1)], "the pool itself was not restarted"
    with pytest.raises(StaleEpochError):
        first.tick()  # the old leader orders nothing any more
    second.stop()


def test_a_new_leader_starts_again_what_a_pool_ran_that_died_meanwhile(joined, run, clock):
    _, pool = joined
    second = Rollout(run, clock)
    second.up()
    second.tick()
    assert second.given == [(0, 0), (0, 1)]
    for _ in range(int(LEASE) + 1):
        second.tick(1.0)
    second.end(0, 0)
    second.end(0, 1)
    second.tick()
    assert second.given[2:] == [(1, 1), (1, 0)]
    second.stop()


def test_a_damaged_journal_costs_the_pool_and_not_the_run(joined):
    rollout, pool = joined
    path = pool.dir.pool_epoch_dir(1, pool.epoch) / OUT
    with open(path, "ab") as f:
        f.write(b"00000000 {}\n")
    pool.beat()
    rollout.tick()
    assert rollout.leader._scheduler.engines().keys() == {0} and pool.dir.current_epoch(Role.ROLLOUT) == pool.epoch + 1


def test_a_sample_that_failed_in_a_pool_counts_as_a_retry(joined):
    rollout, pool = joined
    pool.say(1, 0, cause="retried:environment")
    pool.write(1, 1)
    pool.say(1, 1)
    rollout.tick()
    assert rollout.state.dropped_by_reason() == {"retried:environment": 1}


def test_a_sample_that_a_pool_s_rank_does_not_answer_is_given_to_others_and_a_new_leader_does_not_think_that_the_pool_has_it(run, clock, pool_dir, monkeypatch):
    """The pool itself writes on: one of its ranks is frozen."""
    monkeypatch.setattr(leader_module, "SLACK_S", 50.0 - run.config.rollout.deadline_s - run.config.tasks.command_timeout_s - 60.0)
    rollout, pool = Rollout(run, clock), Pool(pool_dir)
    rollout.tick()
    pool.up()
    rollout.tick()
    rollout.tick()
    assert pool.given() == [(0, 0), (0, 1)] and rollout.given == []
    rollout.up()
    rollout.tick()
    assert rollout.given == [(1, 0), (1, 1)]
    for _ in range(25):
        rollout.tick(1.0)
        pool.beat()
    for sample in (0, 1):
        rollout.end(1, sample)
    rollout.tick()
    rollout.up()
    assert rollout.given[2:] == [(2, 0), (2, 1)]
    for _ in range(25):
        rollout.tick(1.0)
        pool.beat()
    assert rollout.state.dropped_by_reason() == {"retried:overdue": 1}  # rollout.retries = 0
    over = [r["number"] for r in Inbox(pool.dir.pool_epoch_dir(1, pool.epoch)).poll() if r["kind"] == "over"]
    assert over == [pool.numbers[0, 0], pool.numbers[0, 1]]
    pool.write(0, 0)
    pool.say(0, 0)  # it wakes up
    rollout.tick()
    assert groups(rollout) == {1: 2} and rollout.leader._pools._members[1].state.done == []
    rollout.stop()


def test_a_pool_s_rank_has_no_slots_while_it_owes_an_answer_that_is_overdue(run, clock, pool_dir, monkeypatch):
    monkeypatch.setattr(leader_module, "SLACK_S", 20.0 - run.config.rollout.deadline_s - run.config.tasks.command_timeout_s - 60.0)
    rollout, pool = Rollout(run, clock), Pool(pool_dir)
    rollout.tick()
    pool.up()
    rollout.tick()
    rollout.tick()
    assert len(pool.given()) == 2
    for _ in range(25):
        rollout.tick(1.0)
        pool.beat()
    assert pool.given() == []
    pool.up()  # its leader says so anew, since it was told
    rollout.tick()
    rollout.tick()
    assert len(pool.given()) == 2
    rollout.stop()
