"""Functions that `launch` runs on the ranks of a small trainer world. Each returns JSON."""

from __future__ import annotations

import hashlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from miles.config.schema import AlgorithmConfig, LayoutConfig, LoraConfig, TrainerConfig
from miles.core import Layout, StructureError
from miles.trainer.batching import Sequence
from miles.trainer.checkpoint import begin_checkpoint, load_checkpoint
from miles.trainer.critic import Critic
from miles.trainer.lora import describe_base
from miles.trainer.model import build_model, build_optimizer
from miles.trainer.nonfinite import NonFinite, read_sequences
from miles.trainer.reference import ReferencePolicy
from miles.trainer.step import TrainStep
from miles.weights.digest import bits, digest
from miles.weights.mapping import Replicas, export_hf, shards_of
from miles.weights.merged import MergedModel


def sequences(count: int, seed: int, *, vocab: int = 131, routes: tuple[int, int, int] | None = None, longest: int = 60) -> list[Sequence]:
    """Random sequences of 5..longest tokens; `routes` = (MoE layers, K, experts)."""
    rng = np.random.default_rng(seed)
    out = []
    for rollout in range(count):
        n = int(rng.integers(5, longest + 1))
        mask = (rng.random(n) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        chosen = None
        if routes:
            layers, k, experts = routes
            chosen = rng.random((n - 1, layers, experts)).argsort(-1)[..., :k].astype(np.uint8)
        out.append(Sequence(tokens=rng.integers(0, vocab, n).astype(np.int32), loss_mask=mask,
                            logprobs=np.where(mask, rng.uniform(-6, -3, n), 0).astype(np.float32), versions=np.where(mask, 0, -1).astype(np.int32),
                            routes=chosen, advantage=float(rng.normal()), exact=bool(rng.random() < 0.5), rollout=rollout))
    return out


def whole_and_split(seed: int) -> tuple[list[Sequence], list[Sequence]]:
    """Three rollouts of one sequence each; and the same with the first as two leaves: it ends with its first turn, and the other has that as given text."""
    rng = np.random.default_rng(seed)
    base = sequences(3, seed)
    mask = np.r_[np.zeros(6), np.ones(9), np.zeros(5), np.ones(14)].astype(np.uint8)
    n, end = len(mask), 15
    whole = replace(base[0], tokens=rng.integers(0, 131, n).astype(np.int32), loss_mask=mask, versions=np.where(mask, 0, -1).astype(np.int32),
                    logprobs=np.where(mask, rng.uniform(-6, -3, n), 0).astype(np.float32))
    first = replace(whole, **{name: getattr(whole, name)[:end] for name in ("tokens", "loss_mask", "logprobs", "versions")})
    shared = np.arange(n) < end
    second = replace(whole, loss_mask=np.where(shared, 0, mask).astype(np.uint8), logprobs=np.where(shared, 0, whole.logprobs).astype(np.float32),
                     versions=np.where(shared, -1, whole.versions).astype(np.int32))
    return [whole, *base[1:]], [first, second, *base[1:]]


def trainer_config(layout: Layout, **changes) -> TrainerConfig:
    base = {"layout": LayoutConfig(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, etp=layout.etp), "groups_per_step": 1,
            "max_tokens_per_microbatch": 128, "optimizer": {"lr": 1e-3}}
    return TrainerConfig(**{**base, **changes})


def build(folder: str, layout: dict, *, precision: str = "fp32", replay: bool = False, recompute: str = "none", temperature: float = 1.0,
          algorithm: dict | None = None, optimizer: dict | None = None, state_dir: str = "", stages: dict | None = None, mtp: float | None = None,
          lora: dict | None = None, **trainer) -> TrainStep:
    """`mtp`: learning rate of the draft layer. `state_dir`: stream the optimizer state, to a new folder in this one. `stages`: first_stage_layers, last_stage_layers
    of an uneven pipeline. `lora`: adapters. A reference policy and a critic where the algorithm wants them."""
    lay = Layout(world=dist.get_world_size(), **layout)
    streamed = {"state": "stream"} if state_dir else {}
    config = trainer_config(lay, optimizer={"lr": 1e-3, **streamed, **(optimizer or {})}, **trainer)
    how = {"precision": precision, "recompute": recompute, "stages": uneven(stages)}
    model = build_model(folder, lay, routing_replay=replay, mtp=mtp is not None, lora=LoraConfig(**lora) if lora else None, **how)
    a = AlgorithmConfig(**(algorithm or {}))
    reference = ReferencePolicy(model, a.reference or (None if lora else folder)) if a.kl_coefficient else None
    optimizer = build_optimizer(model, config.optimizer, folder_in(state_dir), mtp)
    critic = Critic.build(model, folder, config, a, folder_in(state_dir), **how) if a.critic else None
    return TrainStep(model, optimizer, config, a, temperature=temperature, reference=reference, critic=critic)


def uneven(stages: dict | None) -> LayoutConfig | None:
    return LayoutConfig(**stages) if stages else None


def folder_in(state_dir: str) -> Path | None:
    return Path(tempfile.mkdtemp(dir=state_dir)) if state_dir else None


def weights_after(folder: str, options: dict, layout: dict, steps: int) -> dict[str, str]:
    """Digest of each published tensor after some steps."""
    step = build(folder, layout, **options)
    for i in range(steps):
        step.run(sequences(4, i), number=i)
    return {name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for name, t in export_hf(step.model.chunks, step.model.arch)}


def capture_logprobs(step: TrainStep) -> list[list[float]]:
    """From now on, log-probabilities of the sampled tokens of each micro-batch, in the order in which they are computed."""
    seen: list[list[float]] = []
    inner = step._loss

    def loss(tokens, output):
        seen.append(output[0].detach().tolist())
        return inner(tokens, output)

    step._loss = loss
    return seen


def logprobs_of(step: TrainStep, batch: list[Sequence]) -> list[list[float]]:
    """Per sequence of this rank: log-probabilities of its sampled tokens. Runs a step (the parameters change afterwards)."""
    seen = capture_logprobs(step)
    plan = step.plan([len(s.tokens) for s in batch])
    step.run_planned(plan, [step.forward.of_this_rank(batch[i]) for i in plan.of_rank(step.data_rank)], number=0)
    out: list[list[float]] = [[] for _ in batch]
    for bin_, values in zip(plan.bins[step.data_rank], seen, strict=True):
        for i in bin_:
            n = int(batch[i].loss_mask[1:].sum())
            out[i], values = values[:n], values[n:]
    return out


def score(folder: str, options: dict, layout: dict, count: int, seed: int, routes: list | None) -> list[list[float]]:
    return logprobs_of(build(folder, layout, **options), sequences(count, seed, routes=tuple(routes) if routes else None))


def run_steps(folder: str, options: dict, layout: dict, steps: int, count: int, routes: list | None) -> list[dict]:
    step = build(folder, layout, **options)
    replicas = Replicas(step.model.chunks, step.model.arch)
    figures = [vars(step.run(sequences(count, 100 + i, routes=tuple(routes) if routes else None), number=i)) for i in range(steps)]
    replicas.check()  # what several ranks hold has stayed the same on each
    return figures


def replicas_after_a_change(folder: str, layout: dict, name: str, mtp: bool = False) -> str:
    """What is said of the replicas when the last rank has moved one element of the parameter of this Hugging Face name by one unit in the last place."""
    model = build_model(folder, Layout(world=dist.get_world_size(), **layout), precision="fp32", mtp=mtp)
    replicas, shards = Replicas(model.chunks, model.arch), shards_of(model.chunks, model.arch)
    replicas.check()
    if dist.get_rank() == dist.get_world_size() - 1:
        (parameter,) = (p for p, shard in shards.items() if name in shard.names)
        bits(parameter.detach())[-1] += 1
    try:
        replicas.check()
    except StructureError as e:
        return f"{e.cause}: {e.found}"
    return ""


def versions_until_replicas_are_compared(folder: str) -> int:
    """Versions after the first one, behind which one of two copies changes."""
    model = build_model(folder, Layout(world=dist.get_world_size()), precision="fp32")
    replicas, versions = Replicas(model.chunks, model.arch), 0
    replicas.check_now_and_then()
    if dist.get_rank() == 1:
        bits(next(model.chunks[0].parameters()).detach())[0] += 1
    while True:
        versions += 1
        try:
            replicas.check_now_and_then()
        except StructureError:
            return versions


def split_rollout(folder: str, layout: dict, reduction: str) -> dict:
    """A step over three rollouts, whole and with one of them split into two leaves; `leaves`: data ranks on which these lie."""
    out = {}
    for name, batch in zip(("whole", "split"), whole_and_split(26), strict=True):
        step = build(folder, layout, algorithm={"reduction": reduction})
        plan = step.plan([len(s.tokens) for s in batch])
        out[name] = vars(step.run(batch, number=0))
        out["leaves"] = [r for i in (0, 1) for r in range(step.forward.data_ranks) if i in plan.of_rank(r)]
    return out


def roundtrip(folder: str, layout: dict, bucket_bytes: int, stages: dict | None = None, mtp: bool = False) -> dict:
    """Load, export, and compare with the folder bit for bit: the names that differ. Rank 0 alone gets tensors."""
    from safetensors import safe_open

    model = build_model(folder, Layout(world=dist.get_world_size(), **layout), precision="fp32", stages=uneven(stages), mtp=mtp)
    with safe_open(Path(folder) / "model.safetensors", "pt") as f:
        original = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    exported = list(export_hf(model.chunks, model.arch, bucket_bytes))
    names = [name for name, _ in exported]
    if dist.get_rank() > 0:
        return {"names": len(names)}
    return {"names": len(names), "repeated": len(names) - len(set(names)), "missing": sorted(set(original) - set(names)),
            "unknown": sorted(set(names) - set(original)), "different": [n for n, t in exported if n in original and not torch.equal(t, original[n])]}


def checkpoint_resume(folder: str, checkpoint: str, layout: dict, routes: list | None, before: int = 2, precision: str = "fp32",
                      state_dir: str = "", algorithm: dict | None = None, optimizer: dict | None = None, mtp: float | None = None, lora: dict | None = None) -> dict:
    """Some steps; save, and two more while it is written; then a fresh model from the checkpoint does the last two again."""
    kind = tuple(routes) if routes else None
    how = {"replay": bool(routes), "precision": precision, "state_dir": state_dir, "algorithm": algorithm, "mtp": mtp, "optimizer": optimizer, "lora": lora}
    step = build(folder, layout, **how)
    for i in range(before):
        step.run(sequences(4, i, routes=kind), number=i)
    if dist.get_rank() == 0:
        Path(checkpoint).mkdir(parents=True)
    dist.barrier()
    start = time.perf_counter()
    saving = begin_checkpoint(checkpoint, step.model, step.optimizer, step.critic)
    seconds = time.perf_counter() - start
    drawn = torch.rand(2).tolist()
    went_on = [vars(step.run(sequences(4, i, routes=kind), number=i)) for i in (2, 3)]
    saving.wait()
    dist.barrier()
    saving.finish()
    weights = {n: t for n, t in export_hf(step.model.chunks, step.model.arch)}
    again = build(folder, layout, **how)
    load_checkpoint(checkpoint, again.model, again.optimizer, again.critic)
    redrawn = torch.rand(2).tolist()
    resumed = [vars(again.run(sequences(4, i, routes=kind), number=i)) for i in (2, 3)]
    rewritten = {n: t for n, t in export_hf(again.model.chunks, again.model.arch)}
    return {"went_on": went_on, "resumed": resumed, "seconds": seconds, "random": [drawn, redrawn],
            "different": [n for n in weights if not torch.equal(weights[n], rewritten[n])], "tensors": len(weights)}


def resume_from(folder: str, checkpoint: str, layout: dict, routes: list | None, state_dir: str = "", algorithm: dict | None = None,
                optimizer: dict | None = None, mtp: float | None = None, lora: dict | None = None) -> list[dict]:
    """Steps 2 and 3 of `checkpoint_resume`, from its checkpoint, under another layout."""
    step = build(folder, layout, replay=bool(routes), state_dir=state_dir, algorithm=algorithm, mtp=mtp, optimizer=optimizer, lora=lora)
    load_checkpoint(checkpoint, step.model, step.optimizer, step.critic)
    return [vars(step.run(sequences(4, i, routes=tuple(routes) if routes else None), number=i)) for i in (2, 3)]


def adapters_and_what_they_make(folder: str, layout: dict, options: dict, steps: int) -> dict:
    """Digests of new adapters; after some steps which weights of the model differ in a bit from what a reader makes of the folder and the exported adapters, and how many
    have moved."""
    step = build(folder, layout, **options)
    arch, base = step.model.arch, describe_base(step.model.chunks, step.model.arch)
    new = {n: digest(t) for n, t in export_hf(step.model.chunks, arch, adapters=True)}
    for i in range(steps):
        step.run(sequences(4, i), number=i)
    weights, adapters = dict(export_hf(step.model.chunks, arch)), dict(export_hf(step.model.chunks, arch, adapters=True))
    if dist.get_rank() > 0:
        return {"exported": len(weights) + len(adapters)}
    made, before = MergedModel(folder).make(base, adapters), load_file(Path(folder) / "model.safetensors")
    return {"new": new, "different": [n for n in weights.keys() | made.keys() if not torch.equal(bits(weights[n]), bits(made[n]))],
            "moved": sum(not torch.equal(t, before[n].to(t.dtype)) for n, t in made.items())}


def routes_kept(folder: str, layout: dict, kept_in: str) -> list[bool]:
    """Of a step that is not finite, whether the routes of each sequence that was kept are those that were fed, in all layers of the stage and all rows."""
    step = build(folder, layout, replay=True, max_tokens_per_microbatch=64)
    step.nonfinite = NonFinite(Path(kept_in), 1)
    fed = [replace(s, advantage=float("inf")) for s in sequences(4, 60, routes=(2, 2, 8))]
    assert step.run(fed, number=0).skipped
    dist.barrier()
    whole = {s.tokens.tobytes(): s.routes for s in fed}
    (path,) = Path(kept_in).iterdir()
    return [bool(np.array_equal(s.routes, whole[s.tokens.tobytes()])) for s in read_sequences(path)]
