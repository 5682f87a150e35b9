"""Streamed Adam against resident Adam, and what disks and kills do to it."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from miles.core import EnvironmentFault
from miles.optim import BucketStore, StreamedAdam, check_folder
from miles.optim.folder import file_system
from miles.platform.cpu_adam import CpuFusedAdam

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


def test_steps_are_those_of_resident_adam_bit_for_bit(tmp_path):
    ours, theirs = parameters(), parameters()
    stream, resident = streamed(tmp_path, ours), CpuFusedAdam(groups(theirs))
    for step in range(5):
        for params, optimizer in ((ours, stream), (theirs, resident)):
            set_gradients(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        state = stream.read(a)
        assert torch.equal(a, b) and torch.equal(state["param"], b.detach())
        assert torch.equal(state["exp_avg"], resident.state[b]["exp_avg"]) and torch.equal(state["exp_avg_sq"], resident.state[b]["exp_avg_sq"])


def test_a_bf16_target_gets_the_rounded_main_value(tmp_path):
    params = parameters()
    targets = [p.detach().bfloat16() for p in params]
    optimizer = StreamedAdam(groups(params), targets, tmp_path, bucket=BUCKET)
    set_gradients(params, 0)
    optimizer.step()
    assert all(torch.equal(optimizer.read(p)["param"].bfloat16(), t) for p, t in zip(params, targets, strict=True))


def test_three_buckets_are_in_memory(tmp_path):
    store = streamed(tmp_path, parameters()).store
    assert store.layout.buckets == 7 and store.buffer_bytes == 3 * store.layout.block_bytes


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


def test_a_file_that_ends_early_is_an_environment_fault(tmp_path):
    params = parameters()
    optimizer = streamed(tmp_path, params)
    os.truncate(tmp_path / "state.0", 3 * optimizer.store.layout.block_bytes)
    set_gradients(params, 0)
    with pytest.raises(EnvironmentFault, match="ends within bucket 3"):
        optimizer.step()


def test_a_full_disk_is_an_environment_fault_and_the_generation_before_stays(tmp_path, monkeypatch):
    params = parameters()
    optimizer = streamed(tmp_path, params)
    set_gradients(params, 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("miles.optim.store.os.pwritev", full)
        with pytest.raises(EnvironmentFault, match="No space left"):
            optimizer.step()
    assert optimizer.store.manifest.generation == 0
    assert torch.equal(optimizer.read(params[0])["exp_avg"], torch.zeros(5000))


MOUNTS = "/dev/a / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nhost:/x /home nfs4 rw 0 0\n"


@pytest.mark.parametrize(("folder", "kind"), [("/dev/shm/x", "tmpfs"), ("/dev/shmx", "ext4"), ("/home/me", "nfs4")])
def test_the_file_system_is_that_of_the_innermost_mount(folder, kind):
    assert file_system(Path(folder), MOUNTS) == kind


def test_memory_network_and_too_small_disks_are_refused(tmp_path):
    for point, kind in (("tmpfs", "tmpfs"), ("h:/x", "nfs4")):
        with pytest.raises(EnvironmentFault, match=f"is on {kind}"):
            check_folder(tmp_path, 1, mounts=f"{point} / {kind} rw 0 0\n")
    with pytest.raises(EnvironmentFault, match="GB free"):
        check_folder(tmp_path, 1 << 60, mounts="/dev/a / ext4 rw 0 0\n")


@pytest.mark.parametrize("seed", range(50))
def test_a_kill_at_any_time_leaves_a_whole_generation(tmp_path, seed):
    params = parameters()
    optimizer = streamed(tmp_path, params)
    child = os.fork()
    if child == 0:
        try:
            for step in range(100_000):
                set_gradients(params, step % 7)
                optimizer.step()
        finally:
            os._exit(1)
    time.sleep(random.Random(seed).uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = BucketStore.open(tmp_path, optimizer.store.layout)
    for step in range(left.manifest.generation):  # the parent's own steps, to the generation that the killed child left
        set_gradients(params, step % 7)
        if step == 0:
            optimizer = streamed(tmp_path / "again", params)
        optimizer.step()
    for bucket in range(left.layout.buckets):
        assert all(torch.equal(a, b) for a, b in zip(left.read(bucket), optimizer.store.read(bucket), strict=True))
