"""Rank 0 of a pool: its world is a list, the run's side of the journals is written by hand."""

import asyncio
from types import SimpleNamespace

import pytest

from miles.config import load_config
from miles.core import StaleEpochError
from miles.rollout import pool_leader
from miles.rollout.pool import OUT, in_name
from miles.rollout.pool_leader import PoolLeader
from miles.rundir import JournalWriter, PoolDir, PoolFacts, RunDir, read_journal

WAIT = 60.0


class Side:
    """A pool of two ranks, 2000 and 2001, and the run's leader of epoch 3."""

    def __init__(self, tmp_path, monkeypatch):
        run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"rollout.pool_wait_s={WAIT}")))
        facts = PoolFacts(nodes=2, in_flight=4, time_limit="01:00:00")
        PoolDir.create(run, facts)
        self.pool = PoolDir.create(run, facts)
        self.folder = self.pool.pool_epoch_dir(2, self.pool.new_epoch())
        self.orders = JournalWriter(self.folder / in_name(3))
        self.posted, self.told, self.now = [], [], 1000.0
        monkeypatch.setattr(pool_leader.time, "monotonic", lambda: self.now)
        world = SimpleNamespace(size=2, post=lambda rank, message: self.posted.append((rank, message)), post_all=self.told.append)
        self.leader = PoolLeader(self.pool, 1, world)

    def assign(self, number, group, sample, rank):
        self.orders.append({"kind": "assign", "number": number, "rank": rank, "message": message(group, sample)})

    def tick(self, seconds=0.5):
        self.now += seconds
        asyncio.run(self.leader.tick())

    def said(self):
        return [r for r in read_journal(self.folder / OUT) if r["kind"] != "beat"]


def message(group, sample):
    return {"kind": "assign", "group": group, "sample": sample, "task": "t", "more": [1]}


@pytest.fixture
def side(tmp_path, monkeypatch):
    made = Side(tmp_path, monkeypatch)
    yield made
    made.leader.close()


def test_an_assignment_reaches_its_rank_as_the_run_s_leader_wrote_it_and_its_end_carries_its_number(side):
    side.assign("3.0", 7, 1, 2001)
    side.tick()
    assert side.posted == [(1, message(7, 1))]
    side.leader.receive(1, {"kind": "finished", "group": 7, "sample": 1, "cause": "retried:engine"})
    side.tick()
    assert side.said() == [{"kind": "finished", "numbers": ["3.0"], "cause": "retried:engine"}]


def test_a_sample_that_is_ordered_twice_is_played_once_and_ends_both_orders(side):
    side.assign("3.0", 7, 1, 2001)
    side.assign("3.1", 7, 1, 2000)
    side.tick()
    assert side.posted == [(1, message(7, 1))]
    side.leader.receive(1, {"kind": "finished", "group": 7, "sample": 1, "cause": None, "part": ["x.seg", 5]})
    side.tick()
    assert side.said() == [{"kind": "finished", "numbers": ["3.0", "3.1"], "cause": None, "part": ["x.seg", 5]}]


def test_a_sample_that_was_overdue_with_a_rank_can_be_given_to_another_and_what_the_first_says_of_it_is_not_passed_on(side):
    up = {"kind": "up", "version": 4, "url": "http://a", "moved": []}
    side.leader.receive(1, up)
    side.assign("3.0", 7, 1, 2001)
    side.tick()
    side.orders.append({"kind": "over", "number": "3.0"})
    side.assign("3.1", 7, 1, 2000)
    side.tick()
    assert side.posted == [(1, message(7, 1)), (0, message(7, 1))]
    side.leader.receive(1, {"kind": "finished", "group": 7, "sample": 1, "cause": "late"})
    side.leader.receive(1, up)  # it lives again
    side.leader.receive(0, {"kind": "finished", "group": 7, "sample": 1, "cause": None})
    side.leader.receive(1, {"kind": "finished", "group": 7, "sample": 1, "cause": None})
    side.tick()
    assert [(r["kind"], r.get("rank"), r.get("numbers")) for r in side.said()] == [("up", 2001, None), ("up", 2001, None), ("finished", None, ["3.1"])]


def test_an_engine_is_announced_when_something_changed(side):
    up = {"kind": "up", "version": 4, "url": "http://a", "moved": []}
    for m in (up, up, {**up, "version": 5}, {"kind": "down"}, {**up, "version": 5}):
        side.leader.receive(0, m)
    side.tick()
    assert [(r["kind"], r["rank"], r.get("version")) for r in side.said()] == [("up", 2000, 4), ("up", 2000, 5), ("down", 2000, None), ("up", 2000, 5)]


def test_what_a_rank_holds_from_before_is_told_and_answered(side):
    side.leader.receive(0, {"kind": "held", "samples": []})
    side.leader.receive(1, {"kind": "held", "samples": [(7, 1, 2)]})
    release = {"kind": "release", "samples": [[7, 1]]}
    side.orders.append({"kind": "order", "rank": 2001, "message": release})
    side.tick()
    assert side.said() == [{"kind": "held", "rank": 2001, "samples": [[7, 1, 2]]}] and side.posted == [(1, release)]


def test_ranks_are_told_of_the_engines_of_their_own_pool(side):
    side.assign("3.0", 7, 1, 2001)
    for rank in (0, 1):
        side.leader.receive(rank, {"kind": "up", "version": 4, "url": f"http://{rank}", "moved": []})
    side.tick()
    (engines,) = (m for m in side.told if m["kind"] == "engines")
    assert engines["table"] == {2000: {"url": "http://0", "version": 4, "active": 0}, 2001: {"url": "http://1", "version": 4, "active": 1}}
    assert {"kind": "look", "over": -1} in side.told


def test_it_shows_that_it_lives(side):
    for _ in range(20):
        side.tick()
    assert sum(r["kind"] == "beat" for r in read_journal(side.folder / OUT)) == 4  # 10 s, one every 2 s and a little


def test_a_pool_whose_epoch_was_raised_writes_no_more(side):
    side.tick()
    side.pool.new_epoch()
    with pytest.raises(StaleEpochError):
        side.tick(3.0)


def test_a_pool_ends_when_no_leader_of_the_run_writes_for_long(side):
    for _ in range(int(WAIT)):
        side.orders.append({"kind": "beat"})
        side.tick(1.0)
    assert {"kind": "stop"} not in side.told
    for _ in range(int(WAIT) + 5):
        side.tick(1.0)
    assert side.told.count({"kind": "stop"}) == 1
