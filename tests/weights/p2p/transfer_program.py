"""A rank of test_transfer.py: `python -m tests.weights.p2p.transfer_program RUN`, two of each role. Prints one line for each thing that happened."""

import functools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from miles.weights.p2p import receive, send
from miles.comm import World, run_rank
from miles.rundir import RunDir
from miles.weights.p2p.filled import Filled
from miles.weights.p2p.plan import plan
from miles.weights.p2p.source import Source
from miles.weights.store import Manifest
from tests.weights.p2p.models import Trainer, architecture, shards_of, tensors_of

ARCH = architecture("glm4_moe", hidden_size=64, vocab_size=301)
TENSORS = tensors_of(ARCH, "bfloat16")
LAYOUT = Trainer(tp=2, ep=2)
DEADLINE = time.monotonic() + 150


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype)) for n, t in TENSORS.items()}


def trainer(run: RunDir, epoch: int, fault: str) -> int:
    """Two versions to each rollout epoch there is."""
    world = World(2)
    send.plan = functools.partial(plan, chunk_bytes=8192)
    place = LAYOUT.places(ARCH.layers)[world.rank]
    shards = shards_of(ARCH, place, LAYOUT, values(0))
    sender = send.Sender(run, world, epoch, Source(ARCH, LAYOUT.places(ARCH.layers), TENSORS, shards))
    version = 0
    for rollout in (1, 2) if fault else (1,):
        while len(list(run.path.glob(f"up{rollout}.*"))) < 2:  # as acknowledgements say it
            time.sleep(0.01)
        for _ in range(2):
            version += 1
            fresh = shards_of(ARCH, place, LAYOUT, values(version))
            for key, tensor in shards.items():
                tensor.copy_(fresh[key])
            start = time.monotonic()
            found = sender.fill(rollout if world.leader else None)
            if isinstance(found, Filled):
                if world.leader:
                    m = Manifest(version, 0, None, "p2p", epoch, 0.0, found.tensors, extra={"p2p": {"link": found.link, "serial": found.serial, "receivers": found.receivers}})
                    run.path.joinpath(f"m{version}.tmp").write_bytes(msgspec.json.encode(m))
                    run.path.joinpath(f"m{version}.tmp").rename(run.path / f"m{version}")
                    while len(list(run.path.glob(f"seen{version}.*"))) < 2 and time.monotonic() < DEADLINE:
                        time.sleep(0.01)
                print(f"rank {world.rank} v{version} filled {found.bytes} bytes", flush=True)
            else:
                print(f"rank {world.rank} v{version} failed after {time.monotonic() - start:.0f} s: {found}", flush=True)
                break
    return 0


def rollout(run: RunDir, epoch: int, fault: str) -> int:
    world = World(2)
    folder = Path(tempfile.mkdtemp(prefix=f"miles-weights-{os.getpid()}-", dir="/dev/shm"))
    receiver = receive.Receiver(run, world, epoch, lambda: folder)
    faulty = world.rank == 1 and epoch == 1
    inner, arrived = receive.unpack, []

    def unpack(message, pieces, image):
        arrived.append(1)
        if faulty and len(arrived) == 8:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "flipped":
                message[3] ^= 1
        return inner(message, pieces, image)

    receive.unpack = unpack
    run.path.joinpath(f"up{epoch}.{world.rank}").touch()
    seen = set()
    while not run.path.joinpath("end").exists() and time.monotonic() < DEADLINE:
        receiver.tick()
        for version in (1, 2, 3, 4):
            path = run.path / f"m{version}"
            if version not in seen and path.exists():
                manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
                if receiver.holds(manifest):
                    expected = values(version)
                    state = receiver.image.state()
                    assert state.keys() == expected.keys() and all(torch.equal(state[n], expected[n]) and state[n].dtype == expected[n].dtype for n in state)
                    from safetensors.torch import load_file

                    read = load_file(folder / "model.safetensors")
                    assert all(torch.equal(read[n], expected[n]) for n in expected)
                    seen.add(version)
                    print(f"rank {world.rank} has v{version} after {len(arrived)} chunks", flush=True)
                    run.path.joinpath(f"seen{version}.{world.rank}").touch()
        time.sleep(0.005)
    receiver.close()
    return 0


if __name__ == "__main__":
    main = {"trainer": trainer, "rollout": rollout}[os.environ["MILES_ROLE"]]
    run_rank(lambda: main(RunDir(sys.argv[1]), int(os.environ["MILES_EPOCH"]), os.environ["FAULT"]))
