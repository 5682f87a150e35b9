"""One optimizer step: sequences in, updated parameters and truthful figures out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

import miles.platform
from miles.config.schema import AlgorithmConfig, OptimizerConfig, TrainerConfig
from miles.core import MilesError, StructureError
from miles.platform.context_parallel import zigzag_positions
from miles.trainer.algorithms import HISTOGRAM_EDGES, MAXIMA, SUMS, PolicyLoss, SampledTokens, quantile_of_histogram, truth_sums
from miles.trainer.batching import BatchPlan, PackedMicrobatch, Sequence, pack, plan_batch, token_weights
from miles.trainer.logprob import token_logprobs
from miles.trainer.model import PolicyModel
from miles.trainer.replay import RoutingReplay, check_routes

MAX_SKIPPED = 3


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one step, equal on all ranks; names are columns of the run log's `steps` table.

    `logprob_diff_*` and `exact_logprob_diff_*` are |trainer - rollout| log-probabilities of sampled tokens (nats), before the update.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int  # tokens of the batch, given and sampled
    sampled_tokens: int
    exact_tokens: int  # sampled tokens whose whole context was sampled by the very version being trained
    exact_logprob_diff_mean: float
    exact_logprob_diff_max: float
    logprob_diff_mean: float
    logprob_diff_p99: float  # rounded up to a histogram edge, at most 2.4 %
    logprob_diff_max: float
    kl_mean: float
    ess: float  # effective sample size over sampled tokens, (sum r)^2 / (n sum r^2), in (0, 1]
    clip_fraction: float
    importance_cut_fraction: float
    advantage_abs_mean: float
    microbatches: int
    skipped: bool  # loss or gradient was not finite: parameters and optimizer state are unchanged


class TrainStep:
    """Runs optimizer steps of one model.

    >>> step = TrainStep(model, optimizer, config.trainer, config.algorithm, temperature=config.rollout.temperature)
    >>> metrics = step.run(sequences, number=41)                 # the whole batch on every rank, or:
    >>> plan = step.plan([len(t.tokens) for t in batch])
    >>> metrics = step.run_planned(plan, [read(i) for i in plan.of_rank(step.data_rank)], number=41)
    """

    def __init__(self, model: PolicyModel, optimizer, trainer: TrainerConfig, algorithm: AlgorithmConfig, *, temperature: float,
                 constant_tokens: int = 1):
        """`constant_tokens`: the length by which reduction = "constant" divides."""
        self.model, self.optimizer = model, optimizer
        self.trainer, self.algorithm, self.temperature = trainer, algorithm, temperature
        self.constant_tokens, self.policy_loss = constant_tokens, PolicyLoss(algorithm)
        self.replay = RoutingReplay(model.chunks, model.arch.moe_layers)
        self.routes_shape = (len(model.arch.moe_layers), model.arch.top_k) if model.routing_replay else None  # (L, K) to be recorded
        self.device = miles.platform.current().device
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_ranks = parallel_state.get_data_parallel_world_size()
        cp, tp = model.layout.cp, model.layout.tp
        self.align = 2 * cp if cp > 1 else 1
        self.total_align = math.lcm(self.align, tp * cp)
        self.skipped_in_a_row = 0

    def plan(self, lengths: list[int]) -> BatchPlan:
        """Where each sequence of `lengths` tokens goes. Equal on all ranks for equal input. Raises StructureError: a sequence is too long."""
        fed = [-(-max(n - 1, 1) // self.align) * self.align for n in lengths]
        return plan_batch(fed, self.data_ranks, self.trainer.max_tokens_per_microbatch * self.model.layout.cp)

    def run(self, sequences: list[Sequence], *, number: int) -> StepMetrics:
        """`run_planned` for callers that have the whole batch on every rank."""
        plan = self.plan([len(s.tokens) for s in sequences])
        return self.run_planned(plan, [self._of_this_stage(sequences[i]) for i in plan.of_rank(self.data_rank)], number=number)

    def run_planned(self, plan: BatchPlan, mine: list[Sequence], *, number: int) -> StepMetrics:
        """One step over this data-parallel rank's sequences, in the order of `plan.of_rank(data_rank)`. `number` counts from 0 (learning rate).
        Their routes are those of this pipeline stage: layers `replay.layers` of the recorded ones.

        Raises StructureError: routes do not fit the model, or a rollout's number the step. MilesError: loss or gradients were not finite
        MAX_SKIPPED times in a row.
        """
        counts = np.zeros(1 + plan.sequences, np.int64)  # tokens; then those sampled in each rollout, whose leaves may lie on several ranks
        for s in mine:
            if not 0 <= s.rollout < plan.sequences:
                raise StructureError(f"a sequence of rollout {s.rollout} in a step of {plan.sequences} sequences", f"0 .. {plan.sequences - 1}",
                                     "number the rollouts of the step from 0", cause="rollout")
            counts[0] += len(s.tokens)
            counts[1 + s.rollout] += np.count_nonzero(s.loss_mask[1:])
        totals = torch.from_numpy(counts).to(self.device)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        total_tokens, *sampled = totals.tolist()
        total_sampled = sum(sampled)
        weights = token_weights([s.rollout for s in mine], np.array(sampled), self.algorithm.reduction, self.constant_tokens)

        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.replay.clear()
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=self._microbatches(plan, mine, weights), model=self.model.chunks,
            num_microbatches=plan.microbatches, seq_length=self.trainer.max_tokens_per_microbatch, micro_batch_size=1, forward_only=False,
        )
        self.replay.clear()
        loss, sums, maxima, histogram = self._reduce(outputs)

        lr = learning_rate(self.trainer.optimizer, number)
        skipped = not math.isfinite(loss) or self._gradients_not_finite()
        grad_norm = math.nan
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            _, grad_norm, _ = self.optimizer.step()
        self._count_skipped(skipped, number)
        n, exact_n = max(sums["tokens"], 1.0), max(sums["exact_tokens"], 1.0)
        return StepMetrics(
            loss=loss, grad_norm=float(grad_norm), lr=lr, tokens=total_tokens, sampled_tokens=total_sampled, exact_tokens=int(sums["exact_tokens"]),
            exact_logprob_diff_mean=sums["exact_abs_diff"] / exact_n, exact_logprob_diff_max=maxima["exact_max_diff"],
            logprob_diff_mean=sums["abs_diff"] / n, logprob_diff_p99=min(quantile_of_histogram(histogram, 0.99), maxima["max_diff"]), logprob_diff_max=maxima["max_diff"],
            kl_mean=sums["kl"] / n, ess=sums["ratio"] ** 2 / (n * sums["ratio_squared"]) if sums["ratio_squared"] else 1.0,
            clip_fraction=sums["clipped"] / n, importance_cut_fraction=sums["cut"] / n, advantage_abs_mean=sums["abs_advantage"] / n,
            microbatches=plan.microbatches, skipped=skipped,
        )

    def _of_this_stage(self, s: Sequence) -> Sequence:
        return s if s.routes is None or self.model.layout.pp == 1 else replace(s, routes=s.routes[:, self.replay.layers])

    # -- forward -------------------------------------------------------------------------------------------------------------------

    def _microbatches(self, plan: BatchPlan, mine: list[Sequence], weights: list[float]) -> Iterator[PackedMicrobatch]:
        routes_shape = (len(self.replay.layers), self.model.arch.top_k) if self.replay.active else None
        start = 0
        for bin_ in plan.bins[self.data_rank]:
            part = slice(start, start + len(bin_))
            start = part.stop
            packed = pack(mine[part], weights[part], align=self.align, total_align=self.total_align, routes_shape=routes_shape)
            if packed.routes is not None:
                check_routes(packed.routes, self.model.arch.experts)
            yield packed

    def _forward(self, microbatches: Iterator[PackedMicrobatch], chunk: torch.nn.Module):
        packed = next(microbatches)
        rows = self._rows_of_this_rank(packed.bounds)
        selected = np.flatnonzero(packed.mask[rows])

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        if self.replay.active:
            routes = packed.routes[rows]
            if self.model.config.sequence_parallel:
                routes = np.split(routes, self.model.layout.tp)[parallel_state.get_tensor_model_parallel_rank()]
            self.replay.load(tensor(routes))
        bounds = tensor(packed.bounds)
        packed_params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds,
            max_seqlen_q=packed.longest, max_seqlen_kv=packed.longest,
        )
        targets = {"selected": tensor(selected), "targets": tensor(packed.targets[rows][selected])}
        with self.replay.forward():
            output = chunk(tensor(packed.input_ids[rows])[None], tensor(packed.positions[rows])[None], None, packed_seq_params=packed_params,
                           output_processor=self._logprobs_of_targets, output_processor_context=targets)
        chosen = {name: tensor(getattr(packed, name)[rows][selected]) for name in ("logprobs", "advantages", "weights", "exact", "sequence")}
        return output, partial(self._loss, chosen, len(packed.bounds) - 1)

    def _rows_of_this_rank(self, bounds: np.ndarray) -> np.ndarray:
        """Rows of the packed micro-batch that this context-parallel rank holds, in its order."""
        cp = self.model.layout.cp
        if cp == 1:
            return np.arange(bounds[-1])
        rank = parallel_state.get_context_parallel_rank()
        return np.concatenate([a + zigzag_positions(int(b - a), cp, rank).numpy() for a, b in zip(bounds[:-1], bounds[1:], strict=True)])

    def _logprobs_of_targets(self, *, hidden_states, output_layer, output_weight, context, **_unused):
        """megatron-core's output hook on the last stage: log-probabilities of the sampled tokens only, float32 [n]."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self.model.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
        elif group.size() > 1:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        weight = output_layer.weight if output_weight is None else output_weight
        return token_logprobs(hidden_states[:, 0][context["selected"]], weight, context["targets"], temperature=self.temperature,
                              vocab=self.model.arch.vocab, tp_group=group)

    def _loss(self, chosen: dict[str, torch.Tensor], sequences: int, logprobs: torch.Tensor):
        rollout, advantages = chosen["logprobs"], chosen["advantages"]
        loss, clipped, cut = self.policy_loss(SampledTokens(
            logprobs, self.policy_loss.proximal(logprobs, rollout), rollout, advantages, chosen["weights"], chosen["sequence"], sequences,
            parallel_state.get_context_parallel_group()))
        sums, maxima, histogram = truth_sums(logprobs, rollout, advantages, chosen["exact"], clipped, cut)
        counted = torch.zeros((), dtype=torch.int, device=loss.device)  # megatron's own token count is not used
        return loss, counted, {"add": torch.cat([loss.detach().double()[None], sums, histogram]), "max": maxima}

    # -- figures -------------------------------------------------------------------------------------------------------------------

    def _reduce(self, outputs: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, float], dict[str, float], torch.Tensor]:
        """Sums over micro-batches and ranks, made on the last pipeline stage and given to all."""
        add = torch.zeros(1 + len(SUMS) + len(HISTOGRAM_EDGES) + 1, dtype=torch.float64, device=self.device)
        top = torch.zeros(len(MAXIMA), dtype=torch.float64, device=self.device)
        for part in outputs:
            add += part["add"]
            top = torch.maximum(top, part["max"])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(add, group=group)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        if self.model.layout.pp > 1:
            for values in (add, top):
                dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group())
        values = add[: 1 + len(SUMS)].tolist()
        return values[0], dict(zip(SUMS, values[1:], strict=True)), dict(zip(MAXIMA, top.tolist(), strict=True)), add[1 + len(SUMS) :].cpu()

    def _gradients_not_finite(self) -> bool:
        buffers = [b for chunk in self.model.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        bad = torch.stack([~torch.isfinite(b.grad_data).all() for b in buffers]).any().int()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad)

    def _count_skipped(self, skipped: bool, number: int) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise MilesError(f"step {number}: loss or gradients were not finite {MAX_SKIPPED} times in a row; nothing was changed by these steps",
                             "finite losses and gradients", "lower trainer.optimizer.lr, or look at the log-probability differences of the last steps")


def learning_rate(config: OptimizerConfig, number: int) -> float:
    """lr * min(1, (number + 1) / warmup_steps): linear warm-up, then constant. `number` counts steps from 0."""
    return config.lr if config.warmup_steps == 0 else config.lr * min(1.0, (number + 1) / config.warmup_steps)
