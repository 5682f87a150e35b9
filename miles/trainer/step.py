"""One optimizer step: sequences in, updated parameters and truthful figures out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP

from miles.config.schema import AlgorithmConfig, OptimizerConfig, TrainerConfig
from miles.core import NO_VERSION, ConfigError, StructureError
from miles.trainer.algorithms import SUMS, Apart, PolicyLoss, SampledTokens, Truth, apart, k3, truth_of
from miles.trainer.batching import BatchPlan, Sequence, token_weights
from miles.trainer.critic import Critic, Judgement
from miles.trainer.forward import Figures, LossFunction, PackedForward, SampledRows
from miles.trainer.logprob import token_logprobs
from miles.trainer.model import PolicyModel
from miles.trainer.mtp import MtpLoss
from miles.trainer.nonfinite import Fed, NonFinite
from miles.trainer.reference import ReferencePolicy

MAX_SKIPPED = 3
STEP_SUMS = ("loss", "entropy", "reference_kl")  # over the tokens of a step, beside those of Truth


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one step, equal on all ranks; names are columns of the run log's `steps` table, but for `by_staleness`, whose rows are those of `truth`.

    `logprob_diff_*` and `exact_logprob_diff_*` are |trainer - rollout| log-probabilities of sampled tokens (nats), before the update.
    """

    loss: float
    grad_norm: float  # 0 while the critic alone is trained
    lr: float  # likewise
    tokens: int  # tokens of the batch, given and sampled
    sampled_tokens: int
    exact_tokens: int  # sampled tokens whose whole context was sampled by the very version being trained
    exact_logprob_diff_mean: float
    exact_logprob_diff_max: float
    logprob_diff_mean: float
    logprob_diff_p99: float  # rounded up to a histogram edge, at most 2.4 %
    logprob_diff_max: float
    kl_mean: float  # KL(rollout || trainer), k3
    reference_kl_mean: float  # KL(trainer || reference), k3; not a number without a reference
    entropy_mean: float  # nats, of the trainer's distribution over the vocabulary where a token was sampled
    ess: float  # effective sample size over sampled tokens, (sum r)^2 / (n sum r^2), in (0, 1]
    clip_fraction: float
    importance_cut_fraction: float
    advantage_abs_mean: float
    critic_loss: float  # this and the next two: not a number without a critic
    critic_grad_norm: float
    critic_explained_variance: float  # 1 - Var(return - value) / Var(return)
    mtp_loss: float  # cross entropy of the draft layer, nats a token; this and the next two: not a number where none is trained
    mtp_agreement: float  # share of sampled tokens that were the draft layer's most likely ones
    mtp_grad_norm: float  # of the draft layer alone, which `grad_norm` leaves out; not a number either with trainer.optimizer.clip_grad = 0
    routing_differs: float  # share of (token, MoE layer) at which the trainer's router itself chooses another set of experts than the engine did
    routing_experts_differ: float  # share of the engine's experts that it leaves out; both are not a number for dense models and where no routes were recorded
    microbatches: int
    skipped: bool  # loss or gradient was not finite: parameters and optimizer state are unchanged
    by_staleness: tuple[tuple[int, Apart], ...]  # (staleness, figures over its tokens), of those that there are; the last, 3, is 3 or more


class TrainStep:
    """Runs optimizer steps of one model.

    >>> step = TrainStep(model, optimizer, config.trainer, config.algorithm, temperature=config.rollout.temperature)
    >>> metrics = step.run(sequences, number=41)                 # the whole batch on every rank, or:
    >>> plan = step.plan([len(t.tokens) for t in batch])
    >>> metrics = step.run_planned(plan, [read(i) for i in plan.of_rank(step.data_rank)], number=41)
    """

    def __init__(self, model: PolicyModel, optimizer, trainer: TrainerConfig, algorithm: AlgorithmConfig, *, temperature: float,
                 constant_tokens: int = 1, reference: ReferencePolicy | None = None, critic: Critic | None = None, nonfinite: NonFinite | None = None):
        """`constant_tokens`: the length by which reduction = "constant" divides. `nonfinite` keeps what was fed to steps that were skipped."""
        self.model, self.optimizer, self.reference, self.critic = model, optimizer, reference, critic
        self.trainer, self.algorithm, self.temperature = trainer, algorithm, temperature
        self.constant_tokens, self.policy_loss = constant_tokens, PolicyLoss(algorithm)
        self.forward = PackedForward(model, trainer.max_tokens_per_microbatch)
        self.routes_shape = (len(model.arch.moe_layers), model.arch.top_k) if model.arch.experts else None  # (L, K) to be recorded
        self.device = self.forward.device
        self.nonfinite, self.skipped_in_a_row = nonfinite, 0
        self._version = NO_VERSION  # being trained

    @property
    def data_rank(self) -> int:
        return self.forward.data_rank

    @property
    def routing_replay(self) -> bool:
        return self.model.routing_replay

    @property
    def layers(self) -> list[int]:
        """Of the recorded routes, the MoE layers of this pipeline stage."""
        return self.forward.replay.layers

    def held_rows(self, fed: int) -> tuple[tuple[int, int], ...]:
        """Of the recorded routes of a sequence of `fed` tokens, the rows that this context-parallel rank holds."""
        return self.forward.held_rows(fed)

    def plan(self, lengths: list[int]) -> BatchPlan:
        """Where each sequence of `lengths` tokens goes. Equal on all ranks for equal input. Raises StructureError: a sequence is too long."""
        return self.forward.plan(lengths)

    def run(self, sequences: list[Sequence], *, number: int, version: int = NO_VERSION) -> StepMetrics:
        """`run_planned` for callers that have the whole batch on every rank."""
        plan = self.plan([len(s.tokens) for s in sequences])
        return self.run_planned(plan, [self.forward.of_this_rank(sequences[i]) for i in plan.of_rank(self.data_rank)], number=number, version=version)

    def run_planned(self, plan: BatchPlan, mine: list[Sequence], *, number: int, version: int = NO_VERSION) -> StepMetrics:
        """One step over this data-parallel rank's sequences, in the order of `plan.of_rank(data_rank)`. `number` counts from 0 (learning rate).
        Their routes are those of this rank: `layers` and `held_rows` of the recorded ones. `version`: of the weights that are trained; without it
        staleness is not known.

        Raises StructureError: routes do not fit the model, or a rollout's number the step. ConfigError: loss or gradients were not finite
        MAX_SKIPPED times in a row, which a restart cannot mend.
        """
        self._version = version
        total_tokens, drafted, total_sampled, weights = self._count(plan, mine)
        known = self._known(plan, mine, weights)
        judgement = self.critic.judge(plan, mine, weights, known) if self.critic else None
        known = judgement.known if judgement else known
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        mtp = MtpLoss(self.model.arch.vocab, self.temperature, drafted) if self.model.arch.draft_layers else None
        outputs = self._pass(plan, mine, weights, known, self._loss, mtp=mtp)
        routing_differs, routing_experts_differ = self.forward.routing_differences()
        sums, truth = self._reduce(outputs)
        mtp_loss, mtp_agreement = self._reduce_mtp(outputs) if mtp else (math.nan, math.nan)
        loss = sums["loss"]

        skipped = not math.isfinite(loss) or self._gradients_not_finite()
        if skipped:
            self._keep(Fed(plan, self.data_rank, mine, weights, known, self.layers, version), number, loss, outputs, judgement)
        self._count_skipped(skipped, number)
        lr = learning_rate(self.trainer.optimizer, number) if self.critic is None or number >= self.critic.config.alone_steps else 0.0
        grad_norm, critic_grad_norm = (math.nan, math.nan) if skipped else self._update(lr, number)
        totals = dict(zip(SUMS, truth.sums.sum(0).tolist(), strict=True))
        n, exact_n = max(totals["tokens"], 1.0), max(totals["exact_tokens"], 1.0)
        every = apart(truth.sums.sum(0), truth.histograms.sum(0), float(truth.maxima[:-1].max()))
        return StepMetrics(
            loss=loss, grad_norm=grad_norm, lr=lr, tokens=total_tokens, sampled_tokens=total_sampled, exact_tokens=int(totals["exact_tokens"]),
            exact_logprob_diff_mean=totals["exact_abs_diff"] / exact_n, exact_logprob_diff_max=float(truth.maxima[-1]),
            logprob_diff_mean=every.logprob_diff_mean, logprob_diff_p99=every.logprob_diff_p99, logprob_diff_max=every.logprob_diff_max,
            kl_mean=every.kl_mean, reference_kl_mean=sums["reference_kl"] / n if self.reference else math.nan, entropy_mean=sums["entropy"] / n,
            ess=every.ess, clip_fraction=every.clip_fraction, importance_cut_fraction=totals["cut"] / n, advantage_abs_mean=totals["abs_advantage"] / n,
            critic_loss=judgement.loss if judgement else math.nan, critic_grad_norm=critic_grad_norm,
            critic_explained_variance=judgement.explained_variance if judgement else math.nan,
            mtp_loss=mtp_loss, mtp_agreement=mtp_agreement,
            mtp_grad_norm=self.optimizer.grad_norms_by_group.get(MTP_GRAD_NORM_GROUP, math.nan) if mtp and lr and not skipped else math.nan,
            routing_differs=routing_differs, routing_experts_differ=routing_experts_differ, microbatches=plan.microbatches, skipped=skipped,
            by_staleness=() if version == NO_VERSION else tuple(
                (k, found) for k, row in enumerate(zip(*truth, strict=False)) if (found := apart(row[0], row[1], float(row[2]))).tokens),
        )

    def _count(self, plan: BatchPlan, mine: list[Sequence]) -> tuple[int, int, int, list[float]]:
        """Collective: tokens of the step, those that a draft layer has as targets, sampled tokens of it, and the loss weight of each sampled token of each of `mine`."""
        counts = np.zeros(2 + plan.sequences, np.int64)  # tokens, targets of drafts; then those sampled in each rollout, whose leaves may lie on several ranks
        for s in mine:
            if not 0 <= s.rollout < plan.sequences:
                raise StructureError(f"a sequence of rollout {s.rollout} in a step of {plan.sequences} sequences", f"0 .. {plan.sequences - 1}",
                                     "number the rollouts of the step from 0", cause="rollout")
            counts[0] += len(s.tokens)
            counts[1] += np.count_nonzero(s.loss_mask[2:])
            counts[2 + s.rollout] += np.count_nonzero(s.loss_mask[1:])
        totals = torch.from_numpy(counts).to(self.device)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        total_tokens, drafted, *sampled = totals.tolist()
        weights = token_weights([s.rollout for s in mine], np.array(sampled), self.algorithm.reduction, self.constant_tokens)
        return total_tokens, drafted, sum(sampled), weights

    def _update(self, lr: float, number: int) -> tuple[float, float]:
        """Collective: the optimizer steps, that of the policy unless `lr` is 0. Returns the norms of the gradients of policy and critic."""
        critic_grad_norm = self.critic.step(self.critic.config.lr * warmth(self.trainer.optimizer, number)) if self.critic else math.nan
        if not lr:
            return 0.0, critic_grad_norm
        for group in self.optimizer.param_groups:
            group["lr"] = group["max_lr"] * warmth(self.trainer.optimizer, number)
        grad_norm = float(self.optimizer.step()[1])
        self.model.updated()
        return grad_norm, critic_grad_norm

    # -- passes --------------------------------------------------------------------------------------------------------------------

    def _pass(self, plan: BatchPlan, mine: list[Sequence], weights: list[float], known: list[Figures], loss: LossFunction, *, forward_only: bool = False,
              mtp: MtpLoss | None = None) -> list[Figures]:
        microbatches = zip(self.forward.microbatches(plan, mine, weights), known, strict=True)
        return self.forward.run(microbatches, plan.microbatches, self._logprobs_of_targets, loss, forward_only=forward_only, mtp=mtp)

    def _known(self, plan: BatchPlan, mine: list[Sequence], weights: list[float]) -> list[Figures]:
        """What must be known of the tokens of each micro-batch before the policy is trained; on the last pipeline stage, where the loss is made."""
        nothing: list[Figures] = [{}] * plan.microbatches
        if self.reference is None:
            return nothing
        with self.reference.in_place():
            return self._pass(plan, mine, weights, nothing, _reference_logprobs, forward_only=True) or nothing

    def _logprobs_of_targets(self, hidden: torch.Tensor, weight: torch.Tensor, tokens: SampledRows) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(hidden, weight, tokens.of("targets"), temperature=self.temperature, vocab=self.model.arch.vocab,
                              tp_group=parallel_state.get_tensor_model_parallel_group())[:2]

    def _loss(self, tokens: SampledRows, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Figures]:
        logprobs, entropy = output
        rollout, advantages = tokens.of("logprobs"), tokens.known["advantages"] if self.critic else tokens.of("advantages")
        t = SampledTokens(
            logprobs, entropy, self.policy_loss.proximal(logprobs, rollout), rollout, advantages, tokens.of("weights"), tokens.of("sequence"), tokens.sequences,
            reference=tokens.known.get("reference"), group=parallel_state.get_context_parallel_group())
        loss, clipped, cut = self.policy_loss(t)
        truth = truth_of(logprobs, rollout, advantages, tokens.of("exact"), self._version - tokens.of("versions"), clipped, cut)
        distance = torch.zeros_like(logprobs) if t.reference is None else k3(t)
        ours = torch.stack([x.detach().double() for x in (loss, entropy.sum(), distance.sum())])
        return loss, {"add": torch.cat([ours, truth.sums.view(-1), truth.histograms.view(-1)]), "max": truth.maxima}

    # -- figures -------------------------------------------------------------------------------------------------------------------

    def _reduce(self, outputs: list[Figures]) -> tuple[dict[str, float], Truth]:
        """Sums over micro-batches and ranks, made on the last pipeline stage and given to all."""
        nothing = Truth.nothing(self.device)
        shapes = (nothing.sums.shape, nothing.histograms.shape)
        add = torch.zeros(len(STEP_SUMS) + sum(shape.numel() for shape in shapes), dtype=torch.float64, device=self.device)
        top = nothing.maxima
        for part in outputs:
            add += part["add"]
            top = torch.maximum(top, part["max"])
        add, top = self.forward.over_step(add).cpu(), self.forward.over_step(top, dist.ReduceOp.MAX).cpu()
        ours, sums, histograms = add.split([len(STEP_SUMS), *(shape.numel() for shape in shapes)])
        return dict(zip(STEP_SUMS, ours.tolist(), strict=True)), Truth(sums.view(shapes[0]), histograms.view(shapes[1]), top)

    def _reduce_mtp(self, outputs: list[Figures]) -> list[float]:
        """Collective: loss of the draft layer, and the share of tokens that were its most likely ones."""
        return self.forward.over_step(sum((part["mtp"] for part in outputs), torch.zeros(2, dtype=torch.float64, device=self.device))).tolist()

    def _gradients_not_finite(self) -> bool:
        models = [self.model, *([self.critic.model] if self.critic else [])]
        buffers = [b for model in models for chunk in model.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        bad = torch.stack([~torch.isfinite(b.grad_data).all() for b in buffers]).any().int()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad)

    def _keep(self, fed: Fed, number: int, loss: float, outputs: list[Figures], judgement: Judgement | None) -> None:
        """Collective: keep the micro-batches whose loss was not finite, the critic's before the policy's, which follows from it; all of them where a gradient
        alone was not."""
        losses = [part["add"][0] for part in outputs]
        if judgement is not None and not math.isfinite(judgement.loss):
            loss, losses = judgement.loss, judgement.losses
        suspects = range(fed.plan.microbatches) if math.isfinite(loss) else self._not_finite(losses, fed.plan.microbatches)
        if self.nonfinite is None:
            return
        whole = [self.forward.with_all_rows(s) if m in suspects else s for s, m in zip(fed.sequences, fed.microbatch_of, strict=True)]
        path = self.nonfinite.keep(replace(fed, sequences=whole), number + 1, suspects)
        if path:
            print(f"step {number + 1}: loss or gradients were not finite, nothing is changed; what was fed: {path}", flush=True)

    def _not_finite(self, losses: list[torch.Tensor], count: int) -> list[int]:
        """Collective over the ranks of a replica: which of its micro-batches. `losses`: what each adds, on the last pipeline stage."""
        bad = torch.zeros(count, dtype=torch.int32, device=self.device)
        if losses:
            bad += ~torch.isfinite(torch.stack(losses))
        dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=parallel_state.get_context_parallel_group())
        if self.model.layout.pp > 1:
            dist.broadcast(bad, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group())
        return bad.nonzero()[:, 0].tolist()

    def _count_skipped(self, skipped: bool, number: int) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= MAX_SKIPPED:
            # a restart would feed the same steps to the same configuration, and count from 0
            raise ConfigError(f"step {number + 1}: loss or gradients were not finite {MAX_SKIPPED} times in a row; nothing was changed by these steps",
                             "finite losses and gradients", "start another run with a lower trainer.optimizer.lr, or look at the log-probability differences of "
                              "the last steps" + (f", and at what was fed: {self.nonfinite.folder}" if self.nonfinite else ""))


def _reference_logprobs(tokens: SampledRows, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Figures]:
    logprobs, _ = output
    return logprobs.sum(), {"reference": logprobs}


def learning_rate(config: OptimizerConfig, number: int) -> float:
    """lr * min(1, (number + 1) / warmup_steps): linear warm-up, then constant. `number` counts steps from 0."""
    return config.lr * warmth(config, number)


def warmth(config: OptimizerConfig, number: int) -> float:
    """Share of the learning rate that step `number` has."""
    return 1.0 if config.warmup_steps == 0 else min(1.0, (number + 1) / config.warmup_steps)
