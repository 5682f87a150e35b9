"""Run under mpiexec by weights.py: `weights_ranks.py trainer|rollout RUN RANKS ELEMENTS REPEATS`, RANKS of each role, each role an MPI world of its own.

Trainer ranks hold a Llama of about ELEMENTS bf16 elements, tensor parallel. They send it to the rollout ranks point to point, as whole tensors to each and as the
shares of one engine's processes; and as a broadcast does it, over gloo: gathered on the leader, which sends every tensor to all. The leader writes the figures to RUN/figures.json.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from miles.comm import World, run_rank
from miles.rundir import RunDir
from miles.weights.mapping.architecture import Architecture, architecture_of
from miles.weights.mapping.placement import Place
from miles.weights.mapping.tables import (
    hf_names,
    join,
    padded_vocab,
    parameters,
    shard_slices,
    split,
)
from miles.weights.p2p.filled import Filled
from miles.weights.p2p.plan import Tensor
from miles.weights.p2p.receive import Receiver
from miles.weights.p2p.receivers import engine_share, whole
from miles.weights.p2p.send import Sender
from miles.weights.p2p.source import Source

HIDDEN, FFN, VOCAB = 1024, 2816, 1024
LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * FFN
SHAPES = {"embed_tokens": (VOCAB, HIDDEN), "gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN),
          **{f"{n}_proj": (HIDDEN, HIDDEN) for n in "qkvo"}}


def model(elements: int) -> tuple[Architecture, dict[str, Tensor]]:
    arch = architecture_of({"model_type": "llama", "num_hidden_layers": max(1, round(elements / LAYER)), "hidden_size": HIDDEN, "num_attention_heads": 16,
                            "intermediate_size": FFN, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True})
    names = [n for rule, layer, expert in parameters(arch) for n in hf_names(rule, layer, expert)]
    return arch, {n: Tensor(SHAPES.get(n.split(".")[-2], (HIDDEN,)), "bfloat16") for n in names}


def trainer(run: RunDir, ranks: int, elements: int, repeats: int) -> int:
    world, (arch, tensors) = World(ranks), model(elements)
    places = [Place(0, 0, arch.layers - 1, r, 0, 0, 0, 0) for r in range(ranks)]
    shards, generator = {}, torch.Generator().manual_seed(1)
    for rule, layer, expert in parameters(arch):
        shapes = [tensors[n].shape for n in hf_names(rule, layer, expert)]
        parts = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        mine = [p[i] for p, i in zip(parts, shard_slices(rule, shapes, ranks, world.rank), strict=True)]
        shards[rule.megatron, layer, expert] = join(rule, mine, arch, padded_vocab(arch.vocab, ranks) // ranks).contiguous()
    source, out = Source(arch, places, tensors, shards), {}
    held = {"whole": lambda t, n: [whole(t)] * n, "shares": lambda t, n: [engine_share(arch, t, rank=r, tp=n) for r in range(n)]}
    for epoch, name in enumerate(held, 1):
        while len(list(run.path.glob(f"up{epoch}.*"))) < ranks:
            time.sleep(0.01)
        sender, times = Sender(run, world, epoch, source, held[name]), []
        for _ in range(1 + repeats):  # the first connects, plans and touches memory
            start = time.perf_counter()
            filled = sender.fill(epoch if world.leader else None)
            times.append(time.perf_counter() - start)
            if not isinstance(filled, Filled):
                raise SystemExit(f"transfer failed: {filled}")
        out[name] = {"seconds": min(times[1:]), "first_s": times[0], "wire_bytes": filled.bytes}
        if world.leader:
            (run.path / f"end{epoch}").touch()
    out["broadcast"] = {"seconds": broadcast(run, world.rank, ranks, arch, tensors, shards, repeats)}
    size = sum(t.whole.size * t.itemsize for t in tensors.values())
    out["broadcast"]["wire_bytes"] = size * (ranks - 1) // ranks + size * ranks
    if world.leader:
        (run.path / "figures.json").write_text(json.dumps({"ranks": ranks, "model_bytes": size, **out}))
    world.gather_bytes(b"")  # the first rank that leaves is the end of all to mpiexec
    return 0


def rollout(run: RunDir, ranks: int, elements: int, repeats: int) -> int:
    world, (arch, tensors) = World(ranks), model(elements)
    for epoch in (1, 2):
        if world.leader:
            run.new_epoch("trainer")
            run.new_epoch("rollout")
        world.broadcast_bytes(b"" if world.leader else None)
        receiver = Receiver(run, world, epoch, lambda: Path(tempfile.mkdtemp(prefix=f"miles-weights-{os.getpid()}-", dir="/dev/shm")))
        (run.path / f"up{epoch}.{world.rank}").touch()
        while not (run.path / f"end{epoch}").exists():
            receiver.tick()
            time.sleep(0.001)
        receiver.close()
    broadcast(run, ranks + world.rank, ranks, arch, tensors, {}, repeats)
    return 0


def broadcast(run: RunDir, rank: int, ranks: int, arch: Architecture, tensors: dict[str, Tensor], shards: dict, repeats: int) -> float:
    """Best seconds of gathering every parameter on rank 0 and sending its Hugging Face tensors to the ranks from `ranks` on."""
    dist.init_process_group("gloo", init_method=f"file://{run.path}/gloo", rank=rank, world_size=2 * ranks)
    engines = dist.new_group([0, *range(ranks, 2 * ranks)])
    best = float("inf")
    for _ in range(1 + repeats):
        dist.barrier()
        start = time.perf_counter()
        for rule, layer, expert in parameters(arch):
            key, names = (rule.megatron, layer, expert), hf_names(rule, layer, expert)
            parts = [torch.empty(tensors[n].shape, dtype=torch.bfloat16) for n in names]
            if rank < ranks:
                sharded = rule.axis is not None
                if rank == 0:
                    got = [shards[key], *(torch.empty_like(shards[key]) for _ in range(1, ranks if sharded else 1))]
                    for other, buffer in enumerate(got[1:], 1):
                        dist.recv(buffer, other)
                    parts = [p.contiguous() for p in split(rule, got, arch)]
                elif sharded:
                    dist.send(shards[key], 0)
            if rank == 0 or rank >= ranks:
                for part in parts:
                    dist.broadcast(part, 0, group=engines)
        dist.barrier()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, path, *numbers = sys.argv[1:]
    run_rank(lambda: {"trainer": trainer, "rollout": rollout}[role](RunDir(path), *map(int, numbers)))
