"""A version is written beside the step that follows it: what of it may be seen when, and what becomes of it when that goes wrong."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import miles.weights.store
from miles.config import load_config
from miles.core import EnvironmentFault
from miles.core.at_work import signs
from miles.rundir import RunDir, remove_unfinished
from miles.weights import publish
from miles.weights.acks import Ack, write_ack
from miles.weights.digest import BLOCK_BYTES, bits
from miles.weights.follow import Follower
from miles.weights.handoff import Handoff
from miles.weights.p2p.filled import Filled
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from tests.weights.publisher_program import gathered, parameters, step_of_training


def after(steps):
    held = parameters()
    for _ in range(steps):
        step_of_training(held)
    return held


def make(root, **overrides):
    settings = {"run.root": root, "weights.keyframe_every": 4, **overrides}
    run = RunDir.create(load_config("configs/tiny_async.toml", tuple(f"{k}={v}" for k, v in settings.items())))
    wakes = []
    return run, wakes, Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: wakes.append(1), lambda s: "")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(bits(a[n]), bits(b[n])) for n in a)


def read(run, version):
    follower = Follower(WeightStore(run))
    follower.advance(version)
    return follower.state


class Held:
    """Writers stop before they rename their version into place, until `go` is set."""

    def __init__(self, monkeypatch):
        self.go, self.there = threading.Event(), threading.Semaphore(0)
        rename = miles.weights.store.publish_dir

        def publish_dir(tmp, final):
            self.there.release()
            assert self.go.wait(60)
            rename(tmp, final)

        monkeypatch.setattr(miles.weights.store, "publish_dir", publish_dir)


@pytest.fixture
def writer(monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.go.set()


def test_while_a_version_is_written_the_weights_change_and_it_is_what_they_were(tmp_path, writer):
    """Versions 1 and 5 are keyframes, 2 to 4 deltas."""
    run, wakes, p = make(tmp_path)
    held = parameters()
    for step in range(6):
        writer.go.clear()
        publication = p.begin(step, gathered(held))
        step_of_training(held)
        assert writer.there.acquire(timeout=60)  # all is written
        assert (p.version, WeightStore(run).newest(), publication.done(), len(wakes)) == (step + 1, step or None, False, step)
        assert f"writing a version to {run.weights_dir}" in [what for what, _ in signs().values()], "so that one that hangs here is noticed"
        writer.go.set()
        assert publication.result(60).version == step + 1 and len(wakes) == step + 1
    assert [WeightStore(run).manifest(v).encoding for v in range(1, 7)] == ["keyframe", *["delta"] * 3, "keyframe", "delta"]
    assert all(equal(read(run, version), after(version - 1)) for version in range(1, 7))


def test_there_is_one_on_its_way_at_most_and_they_come_in_order(tmp_path, writer, monkeypatch):
    run, _, p = make(tmp_path)
    begun, order = [], []
    rename = miles.weights.store.publish_dir
    monkeypatch.setattr(miles.weights.store, "publish_dir", lambda tmp, final: (order.append((final.name, len(begun))), rename(tmp, final)))

    def begin(held):
        for step in range(5):
            begun.append(p.begin(step, gathered(held)))
            step_of_training(held)

    trainer = threading.Thread(target=begin, args=(parameters(),))
    trainer.start()
    assert writer.there.acquire(timeout=60)
    trainer.join(0.2)
    assert trainer.is_alive() and len(begun) == 1  # the second has to wait
    writer.go.set()
    trainer.join(60)
    p.settle()
    assert [name for name, _ in order] == [f"v{v:06d}" for v in range(1, 6)] and all(n <= i + 1 for i, (_, n) in enumerate(order))
    assert [b.result().version for b in begun] == [1, 2, 3, 4, 5] and equal(read(run, 5), after(4))


@pytest.mark.parametrize(("overrides", "note"), [({"run.mode": "sync"}, ""), ({"weights.transport": "auto", "weights.ack_timeout_s": 0.1}, "auto: disk failed")])
def test_in_synchronous_mode_and_while_ways_are_tried_the_trainer_waits(tmp_path, overrides, note):
    run, _, p = make(tmp_path, **overrides)
    run.new_epoch("rollout")
    p.begin(0, gathered(parameters())).result()
    for rank in (0, 1):
        write_ack(run, Ack(rank, 1, 0, 1, ""))
    publication = p.begin(1, gathered(after(1)))
    assert publication.done() and WeightStore(run).newest() == 2 and publication.result().note == note


def test_nobody_is_late_for_a_version_that_is_on_its_way(tmp_path, writer):
    """Version 2 went over the wire; version 3 is a keyframe on disk, because an engine has started anew, which waits for just that."""
    run, _, p = make(tmp_path, **{"weights.transport": "p2p"})
    run.new_epoch("rollout")
    writer.go.set()
    p.publish(0, gathered(parameters()))
    p.publish_filled(1, Filled("1.1", 1, ("d0", "d1"), {}, 0), 0.0)
    write_ack(run, Ack(0, 1, 1, -1, "", "it did not load"))
    assert p.late()
    writer.go.clear()
    p.begin(2, gathered(after(2)))
    assert not p.late() and p.serve_late() is None
    writer.go.set()
    p.settle()
    assert not p.late() and WeightStore(run).manifest(3).encoding == "keyframe" and p.version == 3


@pytest.mark.parametrize("kind", ["keyframe", "delta"])
def test_a_full_disk_is_said_where_the_version_is_waited_for_and_nothing_of_it_is_left(tmp_path, monkeypatch, kind):
    run, wakes, p = make(tmp_path)
    if kind == "delta":
        p.publish(0, gathered(parameters()))
    there = WeightStore(run).versions()
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        publication = p.begin(1, gathered(after(1)))
        with pytest.raises(EnvironmentFault, match="free space"):
            publication.result(60)
    with pytest.raises(EnvironmentFault, match="free space"):
        p.begin(2, gathered(after(2)))
    assert WeightStore(run).versions() == there and len(wakes) == len(there)
    assert p.publish(2, gathered(after(2))).version == len(there) + 2  # no other weights under that number
    assert WeightStore(run).manifest(len(there) + 2).encoding == "keyframe" and equal(read(run, len(there) + 2), after(2))


def full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def dense(count, seed):
    """So many blocks, to which there is no small patch from those of another seed."""
    return {"a": torch.randint(0, 2**31, (count * BLOCK_BYTES // 4,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)}


def test_a_writer_that_fails_ends_the_gathering_that_waits_for_it(tmp_path, monkeypatch):
    run, _, p = make(tmp_path)
    p.publish(0, dense(8, seed=0).items())
    monkeypatch.setattr(publish, "WAITING_BYTES", BLOCK_BYTES)

    def broken(out, encoded):
        next(iter(encoded))
        full(None)

    monkeypatch.setattr(miles.weights.store, "write_patch", broken)
    with pytest.raises(EnvironmentFault, match="free space"):
        p.begin(1, dense(8, seed=1).items())
    assert [path.name for path in run.weights_dir.iterdir()] == ["v000001"] and p.version == 1 and not p.holds


def test_where_most_elements_change_the_gathering_waits_so_that_few_encoded_blocks_are_held(tmp_path, monkeypatch):
    """16 blocks that are encoded as about 4 MiB each; two may wait. The writer takes each when no more can come."""
    run, _, p = make(tmp_path)
    p.publish(0, dense(16, seed=0).items())
    most, waited = [], threading.Semaphore(0)

    class Watched(Handoff):
        def feed(self, things):
            def seen():
                for thing in things:
                    waited.release()
                    yield thing
                    most.append(self._bytes)
            super().feed(seen())

    write = miles.weights.store.write_patch

    def write_patch(out, encoded):
        assert all(waited.acquire(timeout=60) for _ in range(3))  # two wait, and one for room
        return write(out, encoded)

    monkeypatch.setattr(publish, "WAITING_BYTES", 2 * BLOCK_BYTES + 4096)
    monkeypatch.setattr(publish, "Handoff", Watched)
    monkeypatch.setattr(miles.weights.store, "write_patch", write_patch)
    new = dense(16, seed=1)
    published = p.publish(1, gathered(new))
    assert published.bytes > 15 * BLOCK_BYTES and BLOCK_BYTES < max(most) <= 2 * BLOCK_BYTES + 4096 and equal(read(run, 2), new)


# -- kill -9 -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_time_a_trainer_leaves_whole_versions_and_the_next_goes_on(tmp_path, seed):
    run, _, _ = make(tmp_path, **{"weights.keep_keyframes": 1000})
    rng = random.Random(seed)
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("publisher_program.py"), run.path], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": os.getcwd()})
    try:
        for _ in range(rng.randrange(1, 12)):
            begun = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.02))  # anywhere between two lines
    finally:
        process.kill()
        begun = max([begun, *map(int, process.communicate()[0].split())])
    there = WeightStore(run).versions()
    assert there == list(range(1, len(there) + 1)) and begun - 1 <= len(there) <= begun + 1
    assert all(equal(read(run, v), after(v - 1)) for v in there)
    remove_unfinished(run.weights_dir)
    again = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    assert again.publish(0, gathered(parameters())).version == len(there) + 1 and equal(read(run, len(there) + 1), parameters())
    assert [p.name for p in run.weights_dir.glob(".*")] == []
