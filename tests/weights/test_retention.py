"""Which versions are removed, and that nobody who reads is left without what it reads."""

import os
import random
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import miles.weights.store
from miles.config import load_config
from miles.rundir import PoolDir, PoolFacts, RunDir, remove_unfinished
from miles.weights.acks import Ack, serving, write_ack
from miles.weights.p2p.filled import Filled
from miles.weights.publish import Publisher
from miles.weights.retention import HELD, WIRED, expired
from miles.weights.store import WeightStore
from tests.weights.test_store import state

VERSIONS = range(1, 26)
KEYFRAMES = [1, 6, 11, 16, 21]  # 2 to 5 are deltas to 1 and to each other, and so on


@pytest.mark.parametrize(("serving", "first"), [
    ([], 16),  # the two newest keyframes and what follows them
    ([25, 24], 16),  # what leads on from there is kept anyway
    ([16], 16),
    ([15, 25], 11),  # one that serves 15 may have found its copy wrong and be reading 11 and on
    ([11], 11),
    ([10], 6),
    ([5], 6),  # further back than twice two keyframes: it starts again from the newest
    ([-1], 6),  # serves nothing yet: it may be reading anything
])
def test_what_ranks_may_be_reading_is_kept_as_far_back_as_four_keyframes(serving, first):
    assert expired(VERSIONS, KEYFRAMES, 2, serving) == list(range(1, first))


def test_nothing_goes_before_there_are_more_keyframes_than_are_kept():
    assert expired([1, 2, 3], [1, 3], 2, []) == []
    assert expired([4, 5, 6], [4, 5, 6], 2, [-1]) == []  # held by one that serves nothing yet


def test_of_what_went_over_the_wire_the_newest_few_stay_wherever_keyframes_lie():
    assert expired(range(1, 31), [1, 2], 2, [30, -1], range(3, 31)) == list(range(3, 23))  # too few keyframes for one to go
    assert expired(range(3, 31), [], 2, [], range(3, 31)) == list(range(3, 23))  # all files are lost
    assert expired(range(1, 32), [1, 2, 31], 1, [2], range(3, 31)) == [1, *range(3, 23)]  # one that serves 2 may read it
    assert expired(range(1, 32), [1, 31], 1, [31], range(2, 31)) == list(range(1, 31))


@st.composite
def histories(draw):
    """(kind, value) in turn: publish a keyframe (True), a delta (False) or without files (None); a rank starts to read the newest version, ends reading, or dies;
    the publisher cleans up."""
    steps = st.one_of(st.tuples(st.just("publish"), st.sampled_from([True, False, None])), st.tuples(st.sampled_from(["read", "done", "die"]), st.integers(0, 2)), st.just(("retire", 0)))
    return [("publish", True), *draw(st.lists(steps, max_size=80))]


@given(histories(), st.integers(1, 3))
def test_no_reader_loses_its_chain_and_no_reader_fills_the_disk(steps, keep):
    versions, keyframes, wired, newest = [], [], [], 0
    serves: dict[int, int] = {}  # rank -> version acknowledged
    reading: dict[int, list[int]] = {}  # rank -> what it has yet to read
    for kind, value in steps:
        if kind == "publish":
            newest += 1
            versions.append(newest)
            if value is None:
                wired.append(newest)
            elif value or newest - 1 in wired:  # nothing is a delta to what has no files
                keyframes.append(newest)
        elif kind == "read" and value not in reading and newest not in wired and serves.setdefault(value, -1) < newest:
            have, start = serves[value], max(keyframes)
            reading[value] = [v for v in versions if (v > have if have >= start else v >= start)]
            assert reading[value] and not set(reading[value]) & set(wired)  # what is newest can always be reached
        elif kind == "done" and value in reading:
            serves[value] = reading.pop(value)[-1]
        elif kind == "die":
            serves.pop(value, None)
            reading.pop(value, None)
        elif kind == "retire":
            gone = expired(versions, keyframes, keep, serves.values(), wired)
            versions, keyframes, wired = ([v for v in of if v not in gone] for of in (versions, keyframes, wired))
            assert len(keyframes) <= HELD * keep and len(wired) <= WIRED and newest in versions
            assert next(v for v in versions if v not in wired) in keyframes
            if len(keyframes) < HELD * keep:  # else the bound may have cut a reader off
                assert not set(gone) & {v for chain in reading.values() for v in chain}
            if all(v >= keyframes[-1] for v in serves.values()):
                assert len(keyframes) <= keep
            for rank in [r for r, chain in reading.items() if set(chain) - set(versions)]:
                del reading[rank]  # finds its files gone, and looks again


@pytest.fixture
def run(tmp_path):
    r = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "weights.keyframe_every=1", "weights.keep_keyframes=1")))
    r.new_epoch("rollout")
    return r


def publish(run, publisher, versions):
    for v in versions:
        publisher.publish(v, state(v).items())
    return WeightStore(run).versions()


def test_the_publisher_keeps_what_an_engine_of_the_run_or_of_a_pool_may_be_reading(run):
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    pool = PoolDir.create(run, PoolFacts(nodes=1, in_flight=8, time_limit="01:00:00"))
    pool.new_epoch()
    assert publish(run, publisher, [1, 2, 3]) == [3]
    write_ack(run, Ack(0, 1, 0, 3, ""))
    write_ack(pool, Ack(0, 1, 0, 2, ""))
    assert sorted(serving(run)) == [2, 3]
    assert publish(run, publisher, [4]) == [3, 4]
    write_ack(pool, Ack(0, 1, 0, 4, ""))
    assert publish(run, publisher, [5]) == [4, 5]  # 3 went when the run's rank still served it: 4 is the bound


def test_a_rank_of_an_epoch_that_is_over_holds_nothing_back(run):
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    pool = PoolDir.create(run, PoolFacts(nodes=1, in_flight=8, time_limit="01:00:00"))
    pool.new_epoch()
    publish(run, publisher, [1])
    write_ack(run, Ack(0, 1, 0, 1, ""))
    write_ack(pool, Ack(0, 1, 0, 1, ""))
    assert publish(run, publisher, [2]) == [1, 2]
    run.new_epoch("rollout")
    pool.new_epoch()
    assert serving(run) == [] and publish(run, publisher, [3]) == [3]


# -- what went over the wire -------------------------------------------------------------------------------------------------
class Killed(BaseException):
    """kill -9: nothing is cleaned up after it."""


def fill(publisher, count):
    """So many versions point to point."""
    for step in range(count):
        publisher.publish_filled(step, Filled("1.1", step, ("d",), {"a": {"shape": [1 << 20], "dtype": "float32", "digest": "x"}}, 4), 0.0)
    publisher.settle()


def test_after_any_number_of_versions_without_files_a_few_are_there_beside_those_with(run):
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    publish(run, publisher, [1])
    fill(publisher, 40)
    assert WeightStore(run).versions() == [1, *range(42 - WIRED, 42)]
    assert publish(run, publisher, [42]) == [42]


def test_a_broadcast_retires_too(run, monkeypatch):
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    fill(publisher, WIRED)
    group = SimpleNamespace(name="g", address="", port=0, world=2, joined=True, send=lambda state: None)
    monkeypatch.setattr(Publisher, "_way", "broadcast")
    monkeypatch.setattr(publisher, "_ready_group", lambda: group)
    assert publisher.publish(1, state(1).items()).transport == "broadcast"
    assert WeightStore(run).versions() == list(range(2, 2 + WIRED))


def test_nothing_is_removed_before_the_engines_are_woken(run):
    there = []
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: there.append(WeightStore(run).versions()), lambda s: "")
    assert publish(run, publisher, [1, 2, 3]) == [3]
    fill(publisher, WIRED + 1)
    assert there[:3] == [[1], [1, 2], [2, 3]] and there[-1] == list(range(3, 5 + WIRED))


def test_a_trainer_that_starts_again_decodes_nothing_and_removes_what_a_run_has_left_some_at_a_time(run, monkeypatch):
    old, epoch = WeightStore(run), run.new_epoch("trainer")
    old.publish(1, 0, state(1), epoch)
    for v in range(2, 41):
        old.publish_filled(v, v, {"a": {"shape": [2], "dtype": "float32", "digest": "x"}}, epoch, base=v - 1, extra=dict)
    monkeypatch.setattr(miles.weights.store, "AT_ONCE", 10)
    monkeypatch.setattr(WeightStore, "manifest", None)
    looked, kind = [], WeightStore._kind
    monkeypatch.setattr(WeightStore, "_kind", lambda self, v: looked.append(v) or kind(self, v))
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    assert publish(run, publisher, [41]) == list(range(11, 42))
    assert publish(run, publisher, [42, 43, 44, 45]) == [45] and looked == list(range(1, 46))  # each folder once


@pytest.mark.parametrize("seed", range(20))
def test_killed_anywhere_while_it_removes_a_trainer_is_followed_by_one_that_goes_on(run, monkeypatch, seed):
    rng = random.Random(seed)
    old, epoch = WeightStore(run), run.new_epoch("trainer")
    for v in range(1, 15):
        old.publish(v, v, state(v), epoch) if v < 4 else old.publish_filled(v, v, {}, epoch, base=v - 1, extra=dict)

    def dying(call, left=iter(range(rng.randrange(12), -1, -1))):
        def last(path, *args, **kw):
            if next(left) == 0:
                if rng.random() < 0.5 and call is shutil.rmtree and path.exists():
                    next(path.iterdir()).unlink()  # half of it
                raise Killed
            return call(path, *args, **kw)
        return last

    with monkeypatch.context() as m, pytest.raises(Killed):
        m.setattr(shutil, "rmtree", dying(shutil.rmtree))
        m.setattr(os, "rename", dying(os.rename))
        old.retire(1, [3])
    there = WeightStore(run).versions()
    assert {3, *range(15 - WIRED, 15)} <= set(there) and [WeightStore(run).manifest(v).version for v in there] == there  # each whole
    remove_unfinished(run.weights_dir)
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    assert publish(run, publisher, [15]) == [15] and [p.name for p in run.weights_dir.iterdir()] == ["v000015"]
