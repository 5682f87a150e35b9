"""Which versions are removed, and that nobody who reads is left without what it reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import load_config
from miles.rundir import PoolDir, PoolFacts, RunDir
from miles.weights.acks import Ack, serving, write_ack
from miles.weights.publish import Publisher
from miles.weights.retention import HELD, expired
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


@st.composite
def histories(draw):
    """(kind, value) in turn: publish a keyframe or a delta; a rank starts to read the newest version, ends reading, or dies; the publisher cleans up."""
    steps = st.one_of(st.tuples(st.just("publish"), st.booleans()), st.tuples(st.sampled_from(["read", "done", "die"]), st.integers(0, 2)), st.just(("retire", 0)))
    return [("publish", True), *draw(st.lists(steps, max_size=80))]


@given(histories(), st.integers(1, 3))
def test_no_reader_loses_its_chain_and_no_reader_fills_the_disk(steps, keep):
    versions, keyframes, newest = [], [], 0
    serves: dict[int, int] = {}  # rank -> version acknowledged
    reading: dict[int, list[int]] = {}  # rank -> what it has yet to read
    for kind, value in steps:
        if kind == "publish":
            newest += 1
            versions.append(newest)
            if value:
                keyframes.append(newest)
        elif kind == "read" and value not in reading and serves.setdefault(value, -1) < newest:
            have, start = serves[value], max(keyframes)
            reading[value] = [v for v in versions if (v > have if have >= start else v >= start)]
            assert reading[value]  # what is newest can always be reached
        elif kind == "done" and value in reading:
            serves[value] = reading.pop(value)[-1]
        elif kind == "die":
            serves.pop(value, None)
            reading.pop(value, None)
        elif kind == "retire":
            gone = expired(versions, keyframes, keep, serves.values())
            versions, keyframes = [v for v in versions if v not in gone], [v for v in keyframes if v not in gone]
            assert len(keyframes) <= HELD * keep and versions == sorted(versions)
            assert keyframes[-keep:] == sorted(keyframes)[-keep:] and versions[0] in keyframes
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
