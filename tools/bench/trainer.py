#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""The trainer against Hugging Face transformers, and what routing replay is worth: tools/bench/trainer.py [--quick] [--json].

All in one process and one run, fp32 where nothing else is said:

tokens/s        whole steps (forward, backward, Adam) over sequences of 128 to 1,280 tokens of which half are sampled, against the same model, loss,
                sampled tokens and optimizer in transformers with the same attention (scaled_dot_product_attention), which is given one sequence at a
                time, so that it pads nothing. In turns, medians. A dense and a mixture-of-experts model (routes replayed here, chosen there). The limit
                is what the processor's own matrix product of float32 would do of the model's products alone
same loss       the difference of the two losses of the first step
padding         rows of micro-batches that hold no token, of lengths that differ tenfold
replay, bf16    a real engine samples from the model of configs/tiny_async.toml in bf16, and the trainer scores its tokens in bf16: mean |difference of
                log-probabilities|. Baseline: megatron-core as it is, which rounds at other places (miles/platform/rounding.py) and chooses experts itself.
                Each of the two measures alone is shown beside it
replay, fp32    mean |difference| with replay over a run of 60 steps of configs/tiny_async.toml, tokens whose whole context was sampled by the version
                trained

--quick leaves out both of replay, since the start of an engine alone takes most of half a minute. Exit status 1 where a target is missed.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers

from miles.config import load_config
from miles.config.schema import AlgorithmConfig, TrainerConfig
from miles.core import Layout
from miles.platform import layers
from miles.trainer import model as trainer_model
from miles.trainer.batching import Sequence
from miles.trainer.distributed import close_distributed, init_distributed
from miles.trainer.model import build_model, build_optimizer
from miles.trainer.step import TrainStep
from tools.bench.table import figure, tell

VOCAB, MICROBATCH, CLIP = 4096, 2048, 1.0
SIZES = {"vocab_size": VOCAB, "hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
         "max_position_embeddings": 2048, "tie_word_embeddings": False}
EXPERTS, CHOSEN, EXPERT_WIDTH = 8, 2, 512
ALGORITHM = AlgorithmConfig(importance_high=2.0)
TRAINER = {"groups_per_step": 1, "max_tokens_per_microbatch": MICROBATCH, "layout": {}, "optimizer": {"lr": 1e-4, "clip_grad": CLIP}}


def make_model(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    if kind == "dense":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, intermediate_size=1024))
    else:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
            **SIZES, intermediate_size=1024, moe_intermediate_size=EXPERT_WIDTH, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False))
    model.float().save_pretrained(folder)
    return folder


def batch(kind: str, count: int) -> list[Sequence]:
    """`count` sequences whose lengths spread evenly over a factor of ten (in their logarithm), in turns of 64 given and 64 sampled tokens."""
    rng, out = np.random.default_rng(1), []
    for i, n in enumerate(np.geomspace(128, 1280, count).astype(int)):
        mask = (np.arange(n) % 128 >= 64).astype(np.uint8)
        routes = None
        if kind == "moe":
            routes = rng.random((n - 1, SIZES["num_hidden_layers"], EXPERTS)).argpartition(CHOSEN, axis=-1)[..., :CHOSEN].astype(np.uint8)
        out.append(Sequence(tokens=rng.integers(0, VOCAB, n).astype(np.int32), loss_mask=mask, logprobs=np.where(mask, -8.3, 0).astype(np.float32),
                            versions=np.where(mask, 0, -1).astype(np.int32), routes=routes, advantage=float(rng.normal()), exact=True, rollout=i))
    return out


class Baseline:
    """The same step in transformers: policy gradient with truncated importance weights, gradients clipped by their norm, Adam."""

    def __init__(self, folder: Path):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
        self.model.train()
        o = TrainerConfig(**TRAINER).optimizer
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True)

    def step(self, sequences: list[Sequence]) -> float:
        total, loss_sum = sum(int(s.loss_mask[1:].sum()) for s in sequences), 0.0
        self.optimizer.zero_grad()
        for s in sequences:
            tokens = torch.from_numpy(s.tokens).long()
            chosen = torch.from_numpy(np.flatnonzero(s.loss_mask[1:]))
            hidden = self.model.model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0, chosen]
            logprobs = self.model.lm_head(hidden).log_softmax(-1).gather(1, tokens[1:][chosen][:, None])[:, 0]
            weight = (logprobs.detach() - torch.from_numpy(s.logprobs[1:])[chosen]).exp().clamp(max=ALGORITHM.importance_high)
            loss = -(weight * (logprobs - logprobs.detach()).exp() * s.advantage).sum() / total
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss_sum


def trainer_step(folder: Path, *, precision: str = "fp32", replay: bool = False) -> TrainStep:
    config = TrainerConfig(**TRAINER)
    model = build_model(folder, Layout(world=1), precision=precision, routing_replay=replay)
    return TrainStep(model, build_optimizer(model, config.optimizer), config, ALGORITHM, temperature=1.0)


def timed(call) -> tuple[float, float]:
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def product_rate() -> float:
    """Float32 operations a second of torch's matrix product at the model's width."""
    a, b = torch.randn(MICROBATCH, SIZES["hidden_size"]), torch.randn(SIZES["hidden_size"], 1024)
    seconds = statistics.median(timed(lambda: torch.mm(a, b))[0] for _ in range(20))
    return 2 * MICROBATCH * SIZES["hidden_size"] * 1024 / seconds


def products_a_token(kind: str) -> float:
    """Operations of a token's matrix products with weights, forward and backward (6 for each weight that it meets); attention over the context not counted."""
    h, d = SIZES["hidden_size"], SIZES["head_dim"]
    attention = h * d * (2 * SIZES["num_attention_heads"] + 2 * SIZES["num_key_value_heads"])
    feed_forward = 3 * h * (1024 if kind == "dense" else CHOSEN * EXPERT_WIDTH)
    return 6 * (SIZES["num_hidden_layers"] * (attention + feed_forward) + 0.5 * VOCAB * h)


def speed(kind: str, scratch: Path, count: int, times: int) -> list[dict]:
    folder, sequences = make_model(kind, scratch / kind), batch(kind, count)
    ours, theirs = trainer_step(folder, replay=kind == "moe"), Baseline(folder)
    tokens, seconds = sum(s.fed for s in sequences), {"ours": [], "theirs": []}
    for number in range(times + 1):  # the first touches memory
        took, metrics = timed(lambda n=number: ours.run(sequences, number=n))
        seconds["ours"].append(took)
        took, loss = timed(lambda: theirs.step(sequences))
        seconds["theirs"].append(took)
        if number == 0:
            first = abs(metrics.loss - loss)
    rate = {name: tokens / statistics.median(values[1:]) for name, values in seconds.items()}
    limit = product_rate() / products_a_token(kind)
    found = [figure(f"steps of a {kind} model", "tokens/s", rate["ours"], rate["theirs"], limit, least=0.8, of_ratio=True)]
    if kind == "dense":  # experts chosen by chance in one and by the model in the other give another loss
        found.append(figure("difference of the first loss", "", first, abs(loss), 0.0, most=1e-5))
    return found


def padding() -> dict:
    """Rows of packed micro-batches without a token, on two data ranks."""
    from miles.trainer.batching import plan_batch

    lengths = [int(n) for n in np.random.default_rng(2).permutation(np.geomspace(128, 1280, 64))]
    plan = plan_batch(lengths, 2, MICROBATCH)
    # a packed micro-batch is as long as its tokens: what it wastes is that ranks which wait for each other hold different numbers
    loads = [[sum(lengths[i] for i in part) for part in rank] for rank in plan.bins]
    longest = sum(max(pair) for pair in zip(*loads, strict=True))
    wasted = 1 - sum(map(sum, loads)) / (len(loads) * longest)
    return figure("padding and waiting, lengths tenfold", "", wasted, None, 0.0, most=0.05)


# -- a real engine ----------------------------------------------------------------------------------------------------------------
async def sample(folder: Path, scratch: Path, count: int) -> list[Sequence]:
    """Continuations of random prompts, with the experts that the engine chose."""
    from miles.engine import EngineClient, EngineProcess, Sampling

    config = load_config(ROOT / "configs/tiny_async.toml", (f"model.path={folder}", "model.recipe=none", "model.rollout_precision=bf16",
                                                            "model.trainer_precision=bf16", "engine.port_base=37200"))
    (scratch / "token").write_text("bench")
    engine = EngineProcess(config, rank=0, log_path=scratch / "engine.log", token_file=scratch / "token", platform="cpu")
    client = EngineClient(await engine.start(), "bench", folder, max_context=2048)
    rng = np.random.default_rng(3)
    try:
        await client.refresh_version()
        turns = await asyncio.gather(*(
            client.generate(f"r{i}", rng.integers(10, 380, 64).astype(np.int32), Sampling(192, ignore_eos=True), routing_key=f"k{i}") for i in range(count)))
    finally:
        await client.close()
        await engine.stop()
    out = []
    for i, t in enumerate(turns):
        n, p = len(t.output_ids), len(t.input_ids)
        zeros = np.zeros(p, np.float32)
        out.append(Sequence(tokens=np.concatenate([t.input_ids, t.output_ids]), loss_mask=np.r_[zeros, np.ones(n)].astype(np.uint8),
                            logprobs=np.r_[zeros, t.logprobs].astype(np.float32), versions=np.r_[zeros - 1, np.zeros(n)].astype(np.int32), routes=t.routes,
                            advantage=1.0, exact=True, rollout=i))
    return out


def difference(folder: Path, sequences: list[Sequence], replay: bool) -> float:
    """Mean |trainer - engine| of the sampled tokens' log-probabilities in bf16, nats."""
    return trainer_step(folder, precision="bf16", replay=replay).run(sequences, number=0).logprob_diff_mean


@contextmanager
def rounding_of_megatron():
    """Models that are built inside round where megatron-core does."""
    real = layers.round_as_engine, trainer_model.transformer_config
    layers.round_as_engine = lambda *args: None
    trainer_model.transformer_config = lambda *args: replace(real[1](*args), fp32_residual_connection=False)
    try:
        yield
    finally:
        layers.round_as_engine, trainer_model.transformer_config = real


def replay_worth(scratch: Path) -> list[dict]:
    from miles.models import prepare

    config = load_config(ROOT / "configs/tiny_async.toml")
    prepare(config)
    folder = ROOT / config.model.path
    sequences = asyncio.run(sample(folder, scratch, 64))
    both, rounding = (difference(folder, sequences, replay) for replay in (True, False))
    with rounding_of_megatron():
        replayed, plain = (difference(folder, sequences, replay) for replay in (True, False))
    mean, steps = sixty_steps(scratch)
    return [
        figure("bf16: |difference| with replay", "nats", both, plain, 0.0, most=1 / 3, of_ratio=True, replay_alone=replayed, rounding_alone=rounding),
        figure(f"fp32: |difference| over {steps} steps", "nats", mean, None, 0.0, most=1e-4),
    ]


def sixty_steps(scratch: Path) -> tuple[float, int]:
    """(mean |difference| over the exact tokens of a run, its steps)."""
    submit = [str(Path(sys.executable).parent / "miles-submit")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*submit, "local", "configs/tiny_async.toml", "--set", "run.steps=60", "--set", f"run.root={scratch}"], cwd=ROOT, env=env, check=True,
                   stdout=sys.stderr)
    (run,) = (p for p in scratch.glob("tiny_async-*") if p.is_dir())
    report = json.loads(subprocess.run([*submit, "report", str(run), "--json"], cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout)
    return report["logprob_abs_diff"]["mean"], report["steps"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sequences and steps; nothing that needs a real engine: no figure of replay")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    init_distributed(0, Layout(world=1), lambda data: data, seed=1)
    with tempfile.TemporaryDirectory(prefix="miles-bench-trainer-") as name:
        scratch = Path(name)
        figures = [f for kind in ("dense", "moe") for f in speed(kind, scratch, *((4, 1) if args.quick else (12, 5)))]
        figures.append(padding())
        figures += [] if args.quick else replay_worth(scratch)
    close_distributed()
    return tell("trainer", figures, args.json, threads=torch.get_num_threads())


if __name__ == "__main__":
    sys.exit(main())
