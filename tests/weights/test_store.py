import errno
import json
import mmap
import random
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from miles.config import load_config
from miles.core import StaleEpochError, StructureError
from miles.rundir import RunDir
from miles.weights.acks import Ack, read_acks, write_ack
from miles.weights.digest import bits
from miles.weights.follow import Follower
from miles.weights.store import WeightStore


def state(seed, n=64):
    g = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(4, n, generator=g), "b.weight": torch.randn(n, generator=g).bfloat16()}


def bump(s, k=1):
    new = {n: t.clone() for n, t in s.items()}
    for t in new.values():
        bits(t)[:k] ^= 1
    return new


def delta(store, version, new, old, *, base, epoch=1):
    """Published one tensor after the other; the publisher's copy of `old` is the new state afterwards."""
    snapshot = {n: t.clone() for n, t in old.items()}
    m = store.publish_delta(version, version - 1, store.encode_delta(base, new.items(), snapshot), epoch, base=base)
    assert equal(snapshot, new)
    return m


@pytest.fixture
def run(tmp_path):
    r = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))
    r.new_epoch("trainer")
    return r


@pytest.fixture
def store(run):
    return WeightStore(run)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(bits(a[k]), bits(b[k])) for k in a)


def test_a_reader_follows_keyframe_and_deltas_and_may_skip_versions(run, store):
    s1 = state(1)
    s2 = bump(s1)
    s3 = bump(s2, 2)
    store.publish(1, 0, s1, 1)
    delta(store, 2, s2, s1, base=1)
    delta(store, 3, s3, s2, base=2)
    f = Follower(store)
    m = f.advance(1)
    assert equal(f.state, s1) and (m.encoding, m.step) == ("keyframe", 0)
    f.advance(3)
    assert equal(f.state, s3) and f.version == 3
    late = Follower(store)
    late.advance(3)
    assert equal(late.state, s3)


@pytest.mark.parametrize("next_is", ["keyframe", "a delta to another base"])
def test_a_reader_never_holds_two_copies_also_when_it_reads_a_keyframe(store, next_is):
    made = []

    def memory(size):
        made.append(weakref.ref(m := mmap.mmap(-1, size)))
        assert sum(r() is not None for r in made) == 1
        return m

    f = Follower(store, memory)
    s1, s2, s3 = state(1), state(2), bump(state(2))
    store.publish(1, 0, s1, 1)
    f.advance(1)
    store.publish(2, 1, s2, 1)
    if next_is == "keyframe":
        f.advance(2)
        assert equal(f.state, s2) and len(made) == 2
    else:
        delta(store, 3, s3, s2, base=2)
        f.version = 2  # claims it, and is wrong: found out while the delta is applied
        f.advance(3)
        assert equal(f.state, s3) and len(made) == 2


def test_the_copy_stays_where_the_keyframe_was_read_to_also_under_dense_patches(store):
    memory = []
    f = Follower(store, lambda size: memory.append(bytearray(size)) or memory[-1])
    states = [state(seed) for seed in range(3)]
    store.publish(1, 0, states[0], 1)
    f.advance(1)
    for version in (2, 3):
        delta(store, version, states[version - 1], states[version - 2], base=version - 1)
    f.advance(3)
    assert equal(f.state, states[2]) and len(memory) == 1 and equal(load(bytes(memory[0])), states[2])


def test_a_delta_with_other_tensors_than_its_keyframe_is_refused(store):
    s1 = state(1)
    store.publish(1, 0, s1, 1)
    delta(store, 2, {**bump(s1), "c": torch.ones(2)}, s1, base=1)
    f = Follower(store)
    f.advance(1)
    with pytest.raises(StructureError, match="other tensors than the keyframe.*'c'"):
        f.advance(2)


def test_a_keyframe_that_cannot_be_read_is_refused_as_a_damaged_one_is(run, store):
    store.publish(1, 0, state(1), 1)
    path = run.weights_dir / "v000001" / "weights.safetensors"
    path.unlink()
    path.mkdir()  # reading it is an error of the operating system
    with pytest.raises(StructureError, match="cannot be read"):
        Follower(store).advance(1)


def test_a_keyframe_is_an_ordinary_safetensors_file(run, store):
    store.publish(1, 0, state(1), 1)
    assert equal(load_file(run.weights_dir / "v000001" / "weights.safetensors"), state(1))


@pytest.mark.parametrize(("code", "error"), [(errno.ESTALE, FileNotFoundError), (errno.ENOENT, FileNotFoundError), (errno.EIO, StructureError)])
def test_a_manifest_that_a_network_file_system_lost_is_gone_and_one_it_cannot_read_is_damaged(run, store, monkeypatch, code, error):
    store.publish(1, 0, state(1), 1)

    def lost(path):
        raise OSError(code, "of the network", str(path))

    monkeypatch.setattr(Path, "read_bytes", lost)
    with pytest.raises(error):
        WeightStore(run).manifest(1)


def test_a_manifest_is_decoded_once_and_again_when_it_is_another_file(run, store):
    published = store.publish(1, 0, state(1), 1)
    assert store.manifest(1) is published  # whoever has written it need not read it
    reader, path = WeightStore(run), run.weights_dir / "v000001" / "MANIFEST.json"
    first = reader.manifest(1)
    assert first == published and reader.manifest(1) is first
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StructureError):
        reader.manifest(1)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        reader.manifest(1)


def test_a_flipped_bit_is_refused_and_the_next_keyframe_repairs(run, store):
    s1, s2, s3 = state(1), state(2), state(3)
    store.publish(1, 0, s1, 1)
    f = Follower(store)
    f.advance(1)
    delta(store, 2, s2, s1, base=1)
    path = run.weights_dir / "v000002" / "weights.patch"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StructureError, match="does not match its manifest"):
        f.advance(2)
    assert f.version == 1 and equal(f.state, s1)  # what it had is untouched
    store.publish(3, 2, s3, 1)
    f.advance(3)
    assert equal(f.state, s3)


def test_a_reader_with_the_wrong_base_goes_back_to_the_keyframe(store):
    s1, s2 = state(1), bump(state(1))
    store.publish(1, 0, s1, 1)
    delta(store, 2, s2, s1, base=1)
    f = Follower(store)
    f.version, f.state = 1, state(9)  # claims version 1, holds something else
    f.advance(2)
    assert equal(f.state, s2)


def test_files_do_not_lead_across_a_broadcast(store):
    s = state(1)
    store.publish(1, 0, s, 1)
    store.publish_broadcast(2, 1, bump(s), 1, base=1, extra=dict)
    assert Follower(store).advance(2) is None
    assert store.newest() == 2 and json.loads(json.dumps(store.manifest(2).extra)) == {}


def test_an_old_trainer_cannot_publish(run, store):
    run.new_epoch("trainer")
    with pytest.raises(StaleEpochError):
        store.publish(1, 0, state(1), 1)
    assert store.versions() == []


def test_a_trainer_that_is_given_up_for_dead_while_it_writes_publishes_nothing(run, store):
    with pytest.raises(StaleEpochError):
        store.publish(1, 0, state(1), 1, extra=lambda: {"epoch": run.new_epoch("trainer")})
    assert list(run.weights_dir.iterdir()) == []


def test_retention_keeps_what_the_kept_keyframes_need(store):
    s = state(1)
    for v in range(1, 8):
        new = bump(s)
        if v % 3 == 1:
            store.publish(v, v, new, 1)
        else:
            delta(store, v, new, s, base=v - 1)
        s = new
    assert store.retire(2) == [1, 2, 3] and store.versions() == [4, 5, 6, 7]
    f = Follower(store)
    f.advance(7)
    assert equal(f.state, s)


def test_acks_of_an_older_epoch_are_not_counted(run):
    write_ack(run, Ack(0, 1, 0, 3, "d"))
    write_ack(run, Ack(1, 2, 0, 4, "e"))
    assert read_acks(run, 2) == {1: Ack(1, 2, 0, 4, "e")}


def damage(rng, path):
    """One bit, a part, or all of a file lost."""
    data = bytearray(path.read_bytes())
    kind = rng.randrange(3)
    if kind == 0:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)):]
    path.unlink() if kind == 2 else path.write_bytes(data)


def test_a_damaged_manifest_is_refused_or_says_the_same(run, store):
    published = store.publish(1, 0, state(1), 1)
    path = run.weights_dir / "v000001" / "MANIFEST.json"
    data = path.read_bytes()
    for i in range(0, 8 * len(data), 5):
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        path.write_bytes(flipped)
        try:
            assert WeightStore(run).manifest(1) == published  # the last digit of the time may round away
        except StructureError as e:
            assert e.cause == "manifest"
    path.write_bytes(data)
    assert WeightStore(run).manifest(1) == published


@pytest.mark.parametrize("seed", range(3))
def test_random_versions_skipped_damaged_and_lost_leave_readers_at_exact_states(run, store, seed):
    """100 versions by two epochs. At any time a reader holds exactly a published version, however it was refused in between."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    truth, epoch, base = {}, 1, None
    readers = [Follower(store) for _ in range(3)]
    reached = refused = 0
    for version in range(1, 101):
        s = {n: t.clone() for n, t in truth[base].items()} if base else state(seed)
        for t in s.values():
            share = rng.choice([0, 0.02, 0.3, 1])
            bits(t)[torch.rand(t.shape, generator=g).view(-1) < share] += rng.choice([-1, 1, 1000])
        truth[version] = s
        if version == 50:
            epoch, base = run.new_epoch("trainer"), None
            with pytest.raises(StaleEpochError):
                store.publish(version, version, s, epoch - 1)
        keyframe = base is None or rng.random() < 0.15
        if keyframe:
            store.publish(version, version, s, epoch)
        else:
            delta(store, version, s, truth[base], base=base, epoch=epoch)
        base = version
        if rng.random() < 0.2:
            damage(rng, rng.choice(sorted((run.weights_dir / f"v{version:06d}").iterdir())))
        if rng.random() < 0.1:
            (run.weights_dir / f".v{version + 1:06d}.dead.1.tmp").mkdir()  # a writer that was killed
        if rng.random() < 0.2:
            store.retire(2)
        for i, f in enumerate(readers):
            if rng.random() < 0.05:
                readers[i] = f = Follower(store)  # killed and started again
            if rng.random() < 0.5:
                target = rng.choice(store.versions()[-3:])
                before = f.version
                try:
                    got = f.advance(target)
                except (StructureError, FileNotFoundError):
                    refused += 1
                    got = None
                assert f.version == target if got is not None else f.version in (before, None)
                reached += got is not None
            assert f.version is None or equal(f.state, truth[f.version])
    assert reached > 20 and refused > 5
