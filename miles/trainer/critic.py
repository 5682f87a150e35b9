"""The critic of PPO: a model of its own that says how much reward is to come, and advantages of tokens from it (miles.trainer.algorithms.gae).

    forward, backward   values at the sampled tokens -> advantages and returns -> (value - return)^2 / 2, in one pass: each batch is trained on once, so
                        the values before the update are those of the pass that learns
    step                its optimizer, when the gradients of critic and policy are both finite
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miles.config.schema import AlgorithmConfig, TrainerConfig
from miles.core import ConfigError
from miles.trainer.algorithms import gae_of_sequences
from miles.trainer.batching import BatchPlan, Sequence
from miles.trainer.forward import Figures, PackedForward, SampledRows
from miles.trainer.model import PolicyModel, build_model, build_optimizer
from miles.weights.mapping import read_architecture

EPS = 1e-6
SUMS = ("loss", "tokens", "returns", "returns_squared", "errors", "errors_squared")


@dataclass(frozen=True)
class Judgement:
    """Of one step. `known` has `advantages` [n] for each micro-batch on the last pipeline stage, with mean 0 and standard deviation 1 over the step."""

    known: list[Figures]
    loss: float  # token-weighted mean of (value - return)^2 / 2
    losses: list[torch.Tensor]  # what each micro-batch adds to it on this rank; on the last pipeline stage
    explained_variance: float  # 1 - Var(return - value) / Var(return); not a number where all returns are equal


class Critic:
    """`model` has a value head (`build_model(..., value_head=True)`). It routes freely: recorded experts are those of the policy."""

    def __init__(self, model: PolicyModel, optimizer, algorithm: AlgorithmConfig, max_tokens: int):
        self.model, self.optimizer, self.config = model, optimizer, algorithm.critic
        self._penalty = algorithm.kl_coefficient if algorithm.kl == "k1" else 0.0
        self._forward = PackedForward(model, max_tokens, shared_head=True)

    @classmethod
    def build(cls, policy: PolicyModel, folder: str | Path, trainer: TrainerConfig, algorithm: AlgorithmConfig, state_dir: Path | None = None, **options) -> Critic:
        """Beside `policy`, from the weights of algorithm.critic.path or else of `folder`. `state_dir` as of `build_optimizer`, `options` as of `build_model`.
        A collective call. Raises ConfigError: the folder has another architecture."""
        folder = algorithm.critic.path or folder
        found = read_architecture(folder)
        if found != (wanted := replace(policy.arch, draft_layers=0, adapters=None)):
            raise ConfigError(f"the critic {folder} has the architecture {found}", f"that of model.path: {wanted}", "correct algorithm.critic.path")
        model = build_model(folder, policy.layout, value_head=True, **options)
        optimizer = build_optimizer(model, trainer.optimizer.model_copy(update={"lr": algorithm.critic.lr}), state_dir)
        return cls(model, optimizer, algorithm, trainer.max_tokens_per_microbatch)

    def judge(self, plan: BatchPlan, mine: list[Sequence], weights: list[float], known: list[Figures]) -> Judgement:
        """Collective: advantages of the step, and the gradients of the critic. The `advantage` of a sequence is its reward, earned with its last sampled
        token; with algorithm.kl = "k1" each token also costs its divergence from the reference."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        microbatches = zip(self._forward.microbatches(plan, mine, weights), known, strict=True)
        outputs = self._forward.run(microbatches, plan.microbatches, _values, self._loss)
        totals = torch.zeros(len(SUMS), dtype=torch.float64, device=self._forward.device)
        for part in outputs:
            totals += part["sums"]
        s = dict(zip(SUMS, self._forward.over_step(totals).tolist(), strict=True))
        n = max(s["tokens"], 1.0)
        spread, missed = (s[f"{name}_squared"] / n - (s[name] / n) ** 2 for name in ("returns", "errors"))
        advantages = _normalized([part["advantages"] for part in outputs])
        return Judgement([k | {"advantages": a} for k, a in zip(known, advantages, strict=True)] if outputs else known, s["loss"],
                         [part["sums"][0] for part in outputs], 1 - missed / spread if spread > 0 else math.nan)

    def step(self, lr: float) -> float:
        """Collective: update the critic. Returns the norm of its gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return float(self.optimizer.step()[1])

    def _loss(self, tokens: SampledRows, values: torch.Tensor) -> tuple[torch.Tensor, Figures]:
        penalty = torch.zeros_like(values)
        if self._penalty:
            penalty = self._penalty * (tokens.of("logprobs") - tokens.known["reference"])
        whole = tokens.gathered(torch.stack([values.detach(), penalty])).cpu().numpy()  # of all context-parallel ranks
        packed, sampled = tokens.packed, np.flatnonzero(tokens.packed.mask)
        found = np.zeros(len(packed.mask))
        found[sampled] = gae_of_sequences(packed.advantages[sampled], -whole[1, sampled], whole[0, sampled], packed.sequence[sampled],
                                          gamma=self.config.gamma, lam=self.config.lam)
        advantages = torch.from_numpy(found[tokens.rows][tokens.selected]).to(values)
        returns = advantages + values.detach()
        errors = returns - values
        loss = 0.5 * (tokens.of("weights") * errors**2).sum()
        exact, missed = returns.double(), errors.detach().double()
        sums = torch.stack([loss.detach().double(), torch.ones_like(exact).sum(), exact.sum(), (exact**2).sum(), missed.sum(), (missed**2).sum()])
        return loss, {"sums": sums, "advantages": advantages}


def _values(hidden: torch.Tensor, weight: torch.Tensor, tokens: SampledRows) -> torch.Tensor:
    """float32 [n]."""
    return (hidden.float() @ weight.float().t())[:, 0]


def _normalized(advantages: list[torch.Tensor]) -> list[torch.Tensor]:
    """(A - mean) / (std + eps) over all sampled tokens of the step. On the last pipeline stage; elsewhere there are none."""
    if not advantages:
        return []
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def total(values: list[torch.Tensor]) -> torch.Tensor:
        out = torch.stack([v.double().sum() for v in values]).sum()
        dist.all_reduce(out, group=group)
        return out

    count = total([torch.ones_like(a) for a in advantages]).clamp(min=1)
    mean = total(advantages) / count
    std = (total([(a - mean) ** 2 for a in advantages]) / count).sqrt()
    return [((a - mean) / (std + EPS)).float() for a in advantages]
