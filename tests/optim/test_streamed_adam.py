"""Streamed Adam against resident Adam, and what disks and kills do to it."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from miles.core import EnvironmentFault
from miles.optim import BucketStore, SavedFile, SavedState, SavedTensor, StreamedAdam, check_folder, claim, file_names, folder_of, left_by, release
from miles.optim.adam import adam_on_device
from miles.optim.direct import read_digested
from miles.optim.folder import file_system
from miles.platform.cpu_adam import CpuFusedAdam
from miles.platform.cpu_adam import adam_ as adam_on_cpu

SIZES, BUCKET = (5000, 1, 333, 7777), 2048


def groups(params):
    common = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "bias_correction": True}
    return [{"params": params[:2], "weight_decay": 0.1, **common}, {"params": params[2:], "weight_decay": 0.0, **common}]


def parameters(seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n)) for n in SIZES]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def streamed(folder, params, **options):
    return StreamedAdam(groups(params), [p.detach() for p in params], folder, bucket=BUCKET, **options)


def state_of(optimizer):
    """Main value and moments of each parameter, as float32, as they lie on disk."""
    out = [[torch.empty(p.numel()) for _ in range(3)] for p in optimizer.parameters]
    for bucket, pieces in enumerate(optimizer.store.layout.pieces()):
        for field, values in enumerate(optimizer.store.read(bucket)):
            for x in pieces:
                out[x.tensor][field][x.start:x.start + x.count] = values[x.at:x.at + x.count]
    return out


def test_steps_are_those_of_resident_adam_bit_for_bit(tmp_path):
    ours, theirs = parameters(), parameters()
    stream, resident = streamed(tmp_path, ours), CpuFusedAdam(groups(theirs))
    for step in range(5):
        for params, optimizer in ((ours, stream), (theirs, resident)):
            set_gradients(params, step)
            optimizer.step()
    for a, b, (main, mean, square) in zip(ours, theirs, state_of(stream), strict=True):
        assert torch.equal(a, b) and torch.equal(main, b.detach())
        assert torch.equal(mean, resident.state[b]["exp_avg"]) and torch.equal(square, resident.state[b]["exp_avg_sq"])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_on_a_device_is_that_of_the_cpu_up_to_rounding(weight_decay):
    """Run here on the CPU, from the same state each time."""
    torch.manual_seed(0)
    state = [torch.randn(4096), torch.randn(4096), torch.randn(4096), torch.rand(4096)]
    for step in (1, 2, 1000):
        group = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": weight_decay, "bias_correction": True, "step": step}
        one, other = ([t.clone() for t in state] for _ in range(2))
        adam_on_cpu(*one, group)
        adam_on_device(*other, group)
        for got, want in zip(other, one, strict=True):
            assert torch.allclose(got, want, rtol=1e-6, atol=1e-7)
        assert not torch.equal(one[0], state[0])


def test_a_bf16_target_gets_the_rounded_main_value(tmp_path):
    params = parameters()
    targets = [p.detach().bfloat16() for p in params]
    optimizer = StreamedAdam(groups(params), targets, tmp_path, bucket=BUCKET)
    set_gradients(params, 0)
    optimizer.step()
    assert all(torch.equal(main.bfloat16(), t) for (main, _, _), t in zip(state_of(optimizer), targets, strict=True))


def test_three_buckets_are_in_memory(tmp_path):
    store = streamed(tmp_path, parameters()).store
    assert store.layout.buckets == 7 and store.buffer_bytes == 3 * store.layout.block_bytes


def test_the_next_two_buckets_are_read_while_one_is_computed(tmp_path, monkeypatch):
    store = streamed(tmp_path, parameters()).store
    begun = [threading.Event() for _ in range(store.layout.buckets)]

    def read(fd, path, view, offset):
        begun[offset // store.layout.block_bytes].set()
        return read_digested(fd, path, view, offset)

    def compute(i, fields):
        assert all(event.wait(10) for event in begun[i + 1:i + 3]), f"buckets {i + 1} and {i + 2} waited for bucket {i}"
        assert i + 3 >= len(begun) or not begun[i + 3].is_set(), f"bucket {i + 3} took the buffer of bucket {i}"

    monkeypatch.setattr("miles.optim.store.read_digested", read)
    store.step(compute)
    assert store.manifest.generation == 1


def damage(optimizer, position):
    path = optimizer.store.folder / f"state.{optimizer.store.manifest.generation % 2}"
    with path.open("r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_an_environment_fault_that_names_file_and_bucket(tmp_path):
    params = parameters()
    optimizer = streamed(tmp_path, params)
    damage(optimizer, 2 * optimizer.store.layout.block_bytes + 5)
    set_gradients(params, 0)
    with pytest.raises(EnvironmentFault, match=r"bucket 2 of .*state\.0 \(generation 0\)"):
        optimizer.step()
    assert optimizer.store.manifest.generation == 0


@pytest.mark.parametrize("position", [0, 8191, 8192, 24575])
def test_a_block_is_checked_to_the_last_byte(tmp_path, position):
    """One of 24,576 bytes."""
    params = parameters()
    optimizer = streamed(tmp_path, params)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    damage(optimizer, optimizer.store.layout.block_bytes + position)
    with pytest.raises(EnvironmentFault, match=r"bucket 1 of .*state\.0 \(generation 2\)"):
        optimizer.step()


def test_a_file_that_ends_early_is_an_environment_fault(tmp_path):
    params = parameters()
    optimizer = streamed(tmp_path, params)
    os.truncate(tmp_path / "state.0", 3 * optimizer.store.layout.block_bytes)
    set_gradients(params, 0)
    with pytest.raises(EnvironmentFault, match=r"state\.0 ends at byte 73728, within a block that begins at 73728"):
        optimizer.step()


def test_a_full_disk_is_an_environment_fault_and_the_generation_before_stays(tmp_path, monkeypatch):
    params = parameters()
    optimizer = streamed(tmp_path, params)
    set_gradients(params, 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("miles.optim.direct.os.pwritev", full)
        with pytest.raises(EnvironmentFault, match="No space left"):
            optimizer.step()
    assert optimizer.store.manifest.generation == 0
    assert torch.equal(state_of(optimizer)[0][1], torch.zeros(5000))


def test_a_snapshot_stays_what_it_was_while_steps_go_on_and_gives_its_space_back(tmp_path):
    params = parameters()
    optimizer = streamed(tmp_path / "state", params)
    set_gradients(params, 0)
    optimizer.step()
    then, snapshot = state_of(optimizer), optimizer.store.snapshot()
    for step in range(1, 4):  # the third would write to the file that the snapshot is of
        set_gradients(params, step)
        optimizer.step()
    assert {p.name for p in (tmp_path / "state").iterdir()} == {"state.0", "state.1", "snapshot", "manifest.json"}  # the spare file is state.1
    save(optimizer, snapshot, tmp_path)
    with SavedState(tmp_path, "optimizer") as saved:
        for n, want in enumerate(then):
            assert all(torch.equal(a, b) for a, b in zip(saved.read((f"p{n}",), 0, 0, SIZES[n]), want, strict=True))
    assert {p.name for p in (tmp_path / "state").iterdir()} == {"state.0", "state.1", "spare", "manifest.json"}
    set_gradients(params, 4)
    optimizer.step()
    assert (tmp_path / "state" / "state.0").stat().st_nlink == (tmp_path / "state" / "state.1").stat().st_nlink == 1


def test_no_step_and_no_snapshot_needs_space_after_the_start(tmp_path, monkeypatch):
    params = parameters()
    optimizer = streamed(tmp_path / "state", params)
    taken = left_by(tmp_path / "state")
    assert taken >= 3 * optimizer.store.layout.file_bytes

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("miles.optim.store.os.posix_fallocate", full)  # another rank has taken the rest of the disk
    for number in range(3):
        then, snapshot = state_of(optimizer), optimizer.store.snapshot()
        for step in range(number + 1):  # the first snapshot is copied before a step leaves a file to it
            set_gradients(params, step)
            optimizer.step()
        assert left_by(tmp_path / "state") == taken
        folder = tmp_path / f"saved{number}"
        folder.mkdir()
        save(optimizer, snapshot, folder)
        with SavedState(folder, "optimizer") as saved:
            for n, want in enumerate(then):
                assert all(torch.equal(a, b) for a, b in zip(saved.read((f"p{n}",), 0, 0, SIZES[n]), want, strict=True))
    optimizer.store.snapshot()
    for step in range(3):  # a snapshot that nobody copied gives way to the next
        set_gradients(params, step)
        optimizer.step()
    optimizer.store.snapshot()
    optimizer.step()
    assert {p.name for p in (tmp_path / "state").iterdir()} == {"state.0", "state.1", "spare", "snapshot", "manifest.json"}


def test_ranks_that_do_not_fit_on_their_node_together_say_so_at_the_start(tmp_path, monkeypatch):
    size = streamed(tmp_path / "size", parameters()).store.layout.file_bytes
    free = [5 * size]  # enough for each alone

    def reserve(fd, offset, size):
        if size > free[0]:
            raise OSError(28, "No space left on device")
        free[0] -= size

    monkeypatch.setattr("miles.optim.store.os.posix_fallocate", reserve)
    first = streamed(tmp_path / "first", parameters())
    with pytest.raises(EnvironmentFault, match=r"second/spare: no space(?s:.*)three files(?s:.*)every other trainer rank of the node"):
        streamed(tmp_path / "second", parameters())
    assert first.store.manifest.generation == 0


def save(optimizer, snapshot, folder, rank=0, starts=(0, 0, 0, 0), names=None):
    state, described = file_names("optimizer", rank, 0)
    snapshot.copy(folder / state)
    tensors = [SavedTensor((f"p{n}",) if names is None else names, 0, 1, (size,), start, p.numel())
               for n, (size, start, p) in enumerate(zip(SIZES, starts, optimizer.parameters, strict=True))]
    layout = optimizer.store.layout
    (folder / described).write_bytes(msgspec.json.encode(SavedFile(layout.bucket, layout.moments, tensors)))


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize(("start", "count"), [(0, 7777), (2047, 2), (100, 1), (5000, 2777)])
def test_any_range_of_a_parameter_is_found_in_a_saved_file(tmp_path, start, count, moments):
    params = parameters()
    optimizer = streamed(tmp_path / "state", params, moments=moments)
    set_gradients(params, 0)
    optimizer.step()
    save(optimizer, optimizer.store.snapshot(), tmp_path)
    with SavedState(tmp_path, "optimizer") as saved:
        assert saved.shards(("p3",)) == (1, (7777,))
        for got, want in zip(saved.read(("p3",), 0, start, count), state_of(optimizer)[3], strict=True):
            assert torch.equal(got, want[start:start + count])


def test_saved_state_that_does_not_hold_all_is_an_environment_fault(tmp_path):
    params = parameters()
    optimizer = streamed(tmp_path / "state", params)
    save(optimizer, optimizer.store.snapshot(), tmp_path)
    with SavedState(tmp_path, "optimizer") as saved:
        with pytest.raises(EnvironmentFault, match=r"10 of 7777 elements of shard 0 .* are not in"):
            saved.read(("p3",), 0, 10, 7777)
        with pytest.raises(EnvironmentFault, match="has nothing for"):
            saved.shards(("p4",))
    os.truncate(tmp_path / "optimizer_00000.0.state", 4096)
    with SavedState(tmp_path, "optimizer") as saved, pytest.raises(EnvironmentFault, match="a file ends before byte"):
        saved.read(("p3",), 0, 0, 7777)


def test_a_damaged_block_does_not_get_into_a_checkpoint(tmp_path):
    optimizer = streamed(tmp_path / "state", parameters())
    snapshot = optimizer.store.snapshot()
    damage(optimizer, 5)
    with pytest.raises(EnvironmentFault, match="bucket 0 of .*snapshot"):
        snapshot.copy(tmp_path / "saved")


MOUNTS = "/dev/a / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nhost:/x /home nfs4 rw 0 0\n"


@pytest.mark.parametrize(("folder", "kind"), [("/dev/shm/x", "tmpfs"), ("/dev/shmx", "ext4"), ("/home/me", "nfs4")])
def test_the_file_system_is_that_of_the_innermost_mount(folder, kind):
    assert file_system(Path(folder), MOUNTS) == kind


def test_memory_network_and_too_small_disks_are_refused(tmp_path):
    for point, kind in (("tmpfs", "tmpfs"), ("h:/x", "nfs4")):
        with pytest.raises(EnvironmentFault, match=f"is on {kind}"):
            check_folder(tmp_path, 1, mounts=f"{point} / {kind} rw 0 0\n")
    with pytest.raises(EnvironmentFault, match="GB free"):
        check_folder(tmp_path, 1 << 60, mounts=LOCAL)


LOCAL = "/dev/a / ext4 rw 0 0\n"


def test_a_network_disk_is_taken_where_the_user_says_so_and_memory_never_is(tmp_path):
    assert check_folder(tmp_path, 1, network=True, mounts="h:/x / lustre rw 0 0\n").startswith(f"{tmp_path} is on lustre, ")
    with pytest.raises(EnvironmentFault, match="in memory"):
        check_folder(tmp_path, 1, network=True, mounts="tmpfs / tmpfs rw 0 0\n")


def test_a_folder_that_is_not_there_yet_is_judged_by_what_it_will_be_made_in_and_not_made(tmp_path):
    assert check_folder(tmp_path / "a" / "b", 1, mounts=LOCAL).startswith(f"{tmp_path}/a/b is on ext4, ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_nothing_can_be_written_or_linked_is_refused(tmp_path, monkeypatch):
    for call in ("fsync", "link"):
        def fails(*_):
            raise OSError(1, "Operation not permitted")

        with monkeypatch.context() as m:
            m.setattr(f"miles.optim.folder.os.{call}", fails)
            with pytest.raises(EnvironmentFault, match=f"in {tmp_path} no file can be written, synced and linked: Operation not permitted"):
                check_folder(tmp_path, 1, mounts=LOCAL)
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_left_is_counted_as_the_blocks_that_it_takes(tmp_path):
    folder = folder_of(tmp_path, "run") / "e000001" / "rank_00000"
    folder.mkdir(parents=True)
    (folder / "state.0").write_bytes(bytes(8192))
    (folder / "state.1").touch()
    with (folder / "sparse").open("wb") as f:
        f.truncate(1 << 30)
    assert left_by(folder_of(tmp_path, "run")) == 8192 and left_by(folder_of(tmp_path, "other")) == 0


@pytest.mark.parametrize("seed", range(50))
def test_a_kill_at_any_time_leaves_a_whole_generation_from_which_the_next_step_is_the_same(tmp_path, seed):
    params = parameters()
    optimizer = streamed(tmp_path, params)
    begun, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for step in range(100_000):
                set_gradients(params, step % 7)
                os.write(says, bytes([step % 256]))
                optimizer.step()
        finally:
            os._exit(1)
    os.close(says)
    try:
        for _ in range(1 + seed % 5):  # in the first step to the fifth, or a little later
            os.read(begun, 1)
        time.sleep(random.Random(seed).uniform(0.0, 0.03))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(begun)
    left = BucketStore.open(tmp_path, optimizer.store.layout)
    done = left.manifest.generation
    assert done >= seed % 5, "the steps before it were done"
    optimizer = streamed(tmp_path / "again", params)
    for step in range(done):  # the parent's own steps, to the generation that the killed child left
        set_gradients(params, step % 7)
        optimizer.step()
    same(left, optimizer.store)
    went_on = streamed(tmp_path / "went_on", parameters(1))
    went_on.store = left
    for each in (optimizer, went_on):
        each.param_groups[0]["step"] = each.param_groups[1]["step"] = done
        set_gradients(each.parameters, done % 7)
        each.step()
    same(left, optimizer.store)
    assert all(torch.equal(a, b) for a, b in zip(went_on.parameters, optimizer.parameters, strict=True))


def same(one, other):
    for bucket in range(one.layout.buckets):
        assert all(torch.equal(a, b) for a, b in zip(one.read(bucket), other.read(bucket), strict=True))


def test_a_rank_claims_its_folder_from_its_predecessors_and_leaves_none(tmp_path):
    first, other = claim(tmp_path / "run", 1, 0), claim(tmp_path / "run", 1, 1)
    for folder in (first, other):
        folder.mkdir(parents=True)
        (folder / "state.0").touch()
    second = claim(tmp_path / "run", 2, 0)
    assert second == tmp_path / "run" / "e000002" / "rank_00000" and not first.exists() and other.exists()
    second.mkdir(parents=True)
    release(second)
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("rank_*")] == [other.relative_to(tmp_path)]
    assert claim(tmp_path / "run", 3, 1).parent.name == "e000003" and list((tmp_path / "run").iterdir()) == []  # nor is an empty folder left of an epoch
    second.mkdir(parents=True)
    release(second)
    assert not (tmp_path / "run").exists()


def test_a_process_that_starts_late_leaves_its_successors_folder_alone(tmp_path):
    living = claim(tmp_path / "run", 10, 0)
    living.mkdir(parents=True)
    (living / "state.0").touch()
    assert claim(tmp_path / "run", 9, 0).parent.name == "e000009" and (living / "state.0").exists()
    claim(tmp_path / "run", 11, 0)
    assert not living.exists()
