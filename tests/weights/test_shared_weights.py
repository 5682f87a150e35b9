"""The ranks of a node share what is read: one pull a version, one copy, and whoever dies or freezes leaves nothing that is believed."""

import multiprocessing.connection
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from miles.config import load_config
from miles.core import EnvironmentFault, StructureError
from miles.rundir import RunDir
from miles.weights import node, shared
from miles.weights.digest import bits
from miles.weights.node import EXCLUSIVE, SHARED, Memory, NodeFolder, Place
from miles.weights.shared import NodeCopy, NodePatches
from miles.weights.store import WeightStore
from tests.weights import shared_rank
from tests.weights.test_store import equal

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.weights.shared_rank"])
ANSWER_S = 60
DEAD = (EOFError, ConnectionResetError)


class Trainer:
    """Publishes versions; `truth` is what each holds."""

    def __init__(self, run, elements=1 << 12):
        self.run, self.store, self.epoch = run, WeightStore(run), run.new_epoch("trainer")
        g = torch.Generator().manual_seed(0)
        self.truth = {0: {"a.weight": torch.randn(8, elements, generator=g), "b.weight": torch.randn(elements, generator=g).bfloat16()}}
        self.digest = {}

    @property
    def version(self):
        return max(self.truth)

    def publish(self, keyframe=False):
        old, version = self.truth[self.version], self.version + 1
        new = {n: t.clone() for n, t in old.items()}
        for t in new.values():
            bits(t)[version % 7::11] ^= 1
        if keyframe or version == 1:
            manifest = self.store.publish(version, version, new, self.epoch)
        else:
            encoded = self.store.encode_delta(version - 1, new.items(), {n: t.clone() for n, t in old.items()})
            manifest = self.store.publish_delta(version, version, encoded, self.epoch, base=version - 1)
        self.truth[version], self.digest[version] = new, manifest.digest
        return manifest


class Rank:
    def __init__(self, trainer, parent, **how):
        self._pipe, other = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=shared_rank.main, args=(str(trainer.run.path), str(parent), other), kwargs=how, daemon=True)
        self.process.start()
        other.close()

    def tell(self, *order):
        self._pipe.send(order)

    def hear(self):
        """Raises one of `DEAD` when it is."""
        assert self._pipe.poll(ANSWER_S), "no answer"
        return self._pipe.recv()

    def ask(self, *order):
        self.tell(*order)
        return self.hear()

    def answered(self):
        return self._pipe.poll(0)

    @staticmethod
    def wait(ranks):
        """Until one of them answers or dies."""
        assert multiprocessing.connection.wait([r._pipe for r in ranks], ANSWER_S), "no answer"

    def signal(self, number):
        os.kill(self.process.pid, number)

    def stopped(self):
        """Wait until it has been stopped."""
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            self.process.join(0.01)

    def end(self):
        self._pipe.send("end")
        assert self.hear() == "ended"
        self.process.join()

    def kill(self):
        self.process.kill()
        self.process.join()


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))


@pytest.fixture
def trainer(run):
    return Trainer(run)


@pytest.fixture
def shm(tmp_path):
    """In the place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def ranks(trainer, shm):
    """`ranks(n)` starts so many."""
    started = []

    def start(count, **how):
        new = [Rank(trainer, shm, **how) for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for rank in started:
        rank.kill()


@pytest.fixture
def copies(run, shm):
    """`copies(n)`: holds of so many ranks, all of this process."""
    folder = NodeFolder(shm, run)
    made = []

    def make(count):
        new = [NodeCopy(WeightStore(run), folder.shared("copy")) for _ in range(count)]
        made.extend(new)
        return new

    yield make
    for copy in made:
        copy.forget()
    folder.close()


# -- one pull ----------------------------------------------------------------------------------------------------------------
def test_a_version_is_pulled_by_one_rank_of_the_node_and_all_read_the_same_memory(trainer, ranks, shm):
    four = ranks(4)
    for keyframe in (True, False, False, True, False):
        trainer.publish(keyframe)
        for rank in four:
            rank.tell("advance", trainer.version)
        found = [rank.hear() for rank in four]
        assert [(v, d) for v, _, d in found] == [(trainer.version, trainer.digest[trainer.version])] * 4
        assert sum(pulled for _, pulled, _ in found) == 1
        assert [rank.ask("release") for rank in four] == [None] * 4
    for rank in four:
        rank.end()
    assert list(shm.iterdir()) == []


def test_a_patch_file_is_pulled_by_one_rank_of_the_node(trainer, ranks, run):
    trainer.publish()
    for _ in range(3):
        trainer.publish()
    files = {v: (run.weights_dir / f"v{v:06d}" / "weights.patch").read_bytes() for v in (2, 3, 4)}
    four = ranks(4)
    for wanted in ([2, 3], [3], [4]):  # what was fetched last stays for those that come later
        for rank in four:
            rank.tell("fetch", wanted)
        found = [rank.hear() for rank in four]
        assert sum(pulled for pulled, _ in found) == (wanted != [3])
        assert all(got == [files[v] for v in wanted] for _, got in found)


def test_a_rank_that_comes_later_than_the_others_gets_what_they_have_reached(trainer, copies):
    trainer.publish(), trainer.publish()
    first, late = copies(2)
    assert first.advance(2).version == 2
    assert late.advance(1).version == 2 and not late.pulled and equal(late.state, trainer.truth[2])


def test_nobody_changes_what_a_rank_reads(trainer, copies, monkeypatch):
    trainer.publish(), trainer.publish()
    reader, other = copies(2)
    reader.advance(1)

    def let_go(seconds):
        assert other._follower.version in (None, 1) and equal(reader.state, trainer.truth[1])
        reader.release()

    monkeypatch.setattr(node.time, "sleep", let_go)  # `other` waits
    assert other.advance(2).version == 2 and equal(other.state, trainer.truth[2])


def test_there_is_one_copy_also_while_a_keyframe_is_read_and_none_when_nobody_has_it(trainer, copies, monkeypatch):
    trainer.publish()
    one, other = copies(2)
    for copy in (one, other):
        copy.advance(1), copy.release()
    before, size = other.memory, os.fstat(other.memory.fd).st_size
    assert one.memory.name == before.name and size > 0
    trainer.publish(keyframe=True)
    new, left = Memory.new, []
    monkeypatch.setattr(Memory, "new", lambda size: left.append(os.fstat(before.fd).st_size) or new(size))
    assert one.advance(2).version == 2
    assert left == [0] and one.memory.name != before.name
    one.release()
    place = one.memory.place(2, "")
    other.forget()
    assert (held := Memory.at(place)) is not None
    held.close()
    one.forget()
    assert Memory.at(place) is None


def test_a_rank_that_a_broadcast_carried_past_the_copy_lets_go_of_it_and_the_others_keep_it(trainer, copies, run):
    trainer.publish()
    stays, goes = copies(2)
    for copy in (goes, stays):
        copy.advance(1), copy.release()
    goes.forget()
    trainer.publish()
    (run.weights_dir / "v000001" / "weights.safetensors").unlink()  # what `stays` has is all there is
    assert stays.advance(2).version == 2 and stays.pulled
    stays.release()
    assert goes.advance(2).version == 2 and not goes.pulled and equal(goes.state, trainer.truth[2])


def test_a_rank_that_lets_go_of_what_it_pulled_finds_it_again_with_another(trainer, copies):
    trainer.publish()
    pulled, other = copies(2)
    for copy in (pulled, other):
        copy.advance(1), copy.release()
    pulled.forget()
    assert pulled.advance(1).version == 1 and not pulled.pulled and pulled.memory.name == other.memory.name
    assert equal(pulled.state, trainer.truth[1])


def test_a_rank_that_gives_up_waits_for_nobody_any_more(trainer, copies, run, shm):
    trainer.publish()
    (holder,) = copies(1)
    holder.advance(1)
    trainer.publish()
    folder = NodeFolder(shm, run)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(NodeCopy(WeightStore(run), folder.shared("copy")).advance, 2)
        folder.give_up()
        with pytest.raises(EnvironmentFault, match="was given up"):
            waiting.result(ANSWER_S)
    folder.close()


def test_a_folder_that_was_cleaned_away_is_not_a_version_that_is_gone(trainer, copies, shm):
    trainer.publish()
    (copy,) = copies(1)
    shutil.rmtree(next(shm.iterdir()))
    with pytest.raises(EnvironmentFault, match="was removed under a rank that uses it"):
        copy.advance(1)


# -- what does not verify ----------------------------------------------------------------------------------------------------
def test_after_a_damaged_patch_the_copy_is_what_it_was_for_all(trainer, copies, run):
    trainer.publish(), trainer.publish()
    path = run.weights_dir / "v000002" / "weights.patch"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    one, other = copies(2)
    one.advance(1), one.release()
    for copy in (one, other):
        with pytest.raises(StructureError, match="another digest"):
            copy.advance(2)
        assert copy.advance(1).version == 1 and not copy.pulled and equal(copy.state, trainer.truth[1])
        copy.release()


def test_a_damaged_patch_file_is_handed_to_nobody(trainer, run, shm):
    trainer.publish(), trainer.publish()
    path = run.weights_dir / "v000002" / "weights.patch"
    good = path.read_bytes()
    path.write_bytes(good[:20] + bytes([good[20] ^ 1]) + good[21:])
    folder = NodeFolder(shm, run)
    one, other = (NodePatches(trainer.store, folder.shared("patches")) for _ in range(2))
    for patches in (one, other):
        with pytest.raises(StructureError, match="another digest"):
            patches.fetch([trainer.store.manifest(2)])
    path.write_bytes(good)
    (memory,) = other.fetch([trainer.store.manifest(2)])
    assert other.pulled and os.pread(memory.fd, 1 << 30, 0) == good
    one.forget(), other.forget(), folder.close()


def test_a_node_remembers_the_newest_patches_alone(trainer, run, shm, monkeypatch):
    monkeypatch.setattr(shared, "RECORDED", 3)
    for _ in range(6):
        trainer.publish()
    folder, manifests = NodeFolder(shm, run), [trainer.store.manifest(v) for v in range(2, 7)]
    one, other = (NodePatches(trainer.store, folder.shared("patches")) for _ in range(2))
    one.fetch(manifests)
    held = folder.shared("patches")
    assert held.take(EXCLUSIVE) and [p.version for p in held.read()] == [4, 5, 6]
    held.release()
    other.fetch(manifests[2:])
    assert not other.pulled
    other.fetch(manifests)
    assert other.pulled
    one.forget(), other.forget(), folder.close()


@pytest.mark.parametrize("said", ["other content", "a number that is something else now", "a process that is gone", "half a record"])
def test_a_record_is_believed_only_where_the_memory_that_it_names_holds_that_version(trainer, copies, said):
    trainer.publish()
    stale, reader = copies(2)
    manifest = stale.advance(1)
    stale.release()
    place = stale.memory.place(1, manifest.mark)
    records = {
        "other content": [Place(1, "0" * 32, place.memory, place.pid, place.fd)],
        "a number that is something else now": [Place(1, manifest.mark, "miles-weights-0123", place.pid, place.fd)],
        "a process that is gone": [Place(1, manifest.mark, place.memory, 1 << 22, place.fd)],
        "half a record": [],
    }
    shared = reader._shared
    assert shared.take(EXCLUSIVE)
    shared.write(records[said])
    if said == "half a record":
        os.pwrite(shared._fd, b'[{"version":1,"mark":"' + manifest.mark.encode(), 0)
    shared.release()
    if said == "a process that is gone":
        stale.forget()  # or it would be found with this one
    assert reader.advance(1).version == 1 and reader.pulled and equal(reader.state, trainer.truth[1])


# -- death -------------------------------------------------------------------------------------------------------------------
def test_the_copy_of_a_killed_rank_lives_on_with_one_that_has_it_and_otherwise_ends(trainer, ranks, run):
    trainer.publish()
    owner, heir, late = ranks(3)
    for rank in (owner, heir):
        rank.ask("advance", 1), rank.ask("release")
    owner.kill()
    trainer.publish()
    keyframe = run.weights_dir / "v000001" / "weights.safetensors"
    kept = keyframe.read_bytes()
    keyframe.unlink()
    assert heir.ask("advance", 2) == (2, True, trainer.digest[2])
    heir.kill()
    keyframe.write_bytes(kept)
    assert late.ask("advance", 2) == (2, True, trainer.digest[2])


def test_a_copy_whose_rank_was_killed_while_it_changed_it_is_believed_by_nobody(trainer, ranks):
    trainer.publish(), trainer.publish()
    killed, heir = ranks(2)
    for rank in (killed, heir):
        rank.ask("advance", 1), rank.ask("release")
    killed.tell("die in the middle", 2)  # version 2 lies there by then
    killed.process.join()
    assert heir.ask("advance", 1) == (1, True, trainer.digest[1])


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_are_killed_at_any_line_leave_only_published_versions_to_the_others(trainer, ranks, shm, seed):
    """Four ranks follow versions that come meanwhile, as deltas and keyframes, and die before a random line of what moves the copy forward, or at a random
    time. What any of them ever saw while it held the copy is a published version, to the bit."""
    rng, deaths, seen = random.Random(seed), 0, set()

    def start():
        (rank,) = ranks(1, die_at=rng.randrange(2000))
        rank.tell("follow", 1 << 30)
        return rank

    living = [start() for _ in range(4)]
    while trainer.version < 40 or deaths < 10 or len(seen) < 5:
        trainer.publish(keyframe=rng.random() < 0.2)
        Rank.wait(living)
        for i, rank in enumerate(living):
            if rng.random() < 0.05:
                rank.kill()
            try:
                while rank.answered():
                    version, _, digest = rank.hear()
                    assert digest == trainer.digest[version]
                    seen.add(version)
            except DEAD:
                deaths += 1
                living[i] = start()
    for rank in living:
        rank.kill()
    last, newest = ranks(4), trainer.version
    for rank in last:
        rank.tell("advance", newest)
    found = [rank.hear() for rank in last]
    assert {(v, d) for v, _, d in found} == {(newest, trainer.digest[newest])} and sum(pulled for _, pulled, _ in found) <= 1
    for rank in last:
        rank.ask("release"), rank.end()
    assert list(shm.iterdir()) == []


def test_the_folder_of_ranks_that_were_all_killed_is_removed_by_the_next_start_of_any_run(trainer, ranks, shm, tmp_path):
    trainer.publish()
    (rank,) = ranks(1)
    rank.ask("advance", 1)
    (left,) = shm.iterdir()
    other = NodeFolder(shm, RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path / 'other'}",))))
    assert left.exists() and left != other.path, "of the living nothing is removed"
    rank.kill()
    other.close()
    assert left.exists()
    other = NodeFolder(shm, RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path / 'other'}",))))
    assert list(shm.iterdir()) == [other.path]
    other.close()
    assert list(shm.iterdir()) == []


# -- a frozen rank -----------------------------------------------------------------------------------------------------------
def test_the_others_go_on_without_one_that_is_frozen_while_it_holds_the_lock_and_share_again_when_it_wakes(trainer, ranks):
    trainer.publish()
    frozen, *others = ranks(3, patience=2.0)
    frozen.tell("stop while it holds")
    frozen.stopped()
    for rank in others:
        rank.tell("advance", 1)
    found = [rank.hear() for rank in others]
    assert {(v, d) for v, _, d in found} == {(1, trainer.digest[1])} and sum(pulled for _, pulled, _ in found) == 1, "among themselves they share"
    frozen.signal(signal.SIGCONT)
    assert frozen.hear() == "awake"
    assert frozen.ask("advance", 1) == (1, False, trainer.digest[1])


def test_what_a_frozen_rank_reads_stays_as_it_is_while_the_others_go_on(trainer, ranks):
    trainer.publish()
    frozen, *others = ranks(3, patience=2.0)
    for rank in (frozen, *others):
        assert rank.ask("advance", 1)[::2] == (1, trainer.digest[1])
    frozen.signal(signal.SIGSTOP)
    frozen.stopped()
    trainer.publish()
    for rank in others:
        rank.ask("release"), rank.tell("advance", 2)
    found = [rank.hear() for rank in others]
    assert {(v, d) for v, _, d in found} == {(2, trainer.digest[2])} and sum(pulled for _, pulled, _ in found) == 1
    frozen.signal(signal.SIGCONT)
    assert frozen.ask("look") == trainer.digest[1] and frozen.ask("release") is None
    assert frozen.ask("advance", 2) == (2, False, trainer.digest[2])


def test_one_that_holds_the_lock_for_long_and_runs_is_waited_for(trainer, ranks):
    trainer.publish(), trainer.publish()
    reader, other = ranks(2, patience=1.0)
    for rank in (reader, other):
        assert rank.ask("advance", 1)[0] == 1
    other.tell("advance", 2)
    other.process.join(2.5)  # longer than the patience; a rank that lives does not end
    assert not other.answered() and reader.ask("look") == trainer.digest[1]
    reader.ask("release")
    assert other.hear() == (2, True, trainer.digest[2])


def test_time_in_which_the_waiting_rank_did_not_run_itself_says_nothing_of_the_holder(trainer, copies, monkeypatch):
    trainer.publish(), trainer.publish()
    holder, waits = copies(2)
    holder.advance(1)
    naps, real = [], node.time.monotonic

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            holder.release()

    monkeypatch.setattr(node, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: real() + 1000 * (len(naps) > 1)))  # suspended after the first
    assert waits.advance(2).version == 2 and waits._shared._newest() == 0


def test_readers_hold_the_lock_together(copies, trainer):
    trainer.publish()
    one, other = copies(2)
    one.advance(1)
    assert other._shared.take(SHARED) and not copies(1)[0]._shared.take(EXCLUSIVE)
