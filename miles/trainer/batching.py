"""From trajectories to packed micro-batches. Pure: numpy only.

Tokens of a sequence of length T: the model is fed tokens[:-1] and predicts tokens[1:]. So a packed row t has input `tokens[t]`, target
`tokens[t+1]`, and the recorded routes of `tokens[t]`: exactly the T-1 rows that the engine recorded. The last token is never fed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from miles.core import NO_VERSION, StructureError


@dataclass(frozen=True)
class Sequence:
    """One training sequence, a leaf of a rollout, with the rollout's advantage."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], 1 = sampled, trained
    logprobs: np.ndarray  # float32 [T], of the rollout, at the rollout's temperature; 0 where given
    versions: np.ndarray  # int32 [T], weight version that sampled each token, counted back from the one being trained (miles.buffer.Lineage.counted_back)
    routes: np.ndarray | None  # uint8|uint16 [rows, L, K], any order along K: the rows that this context-parallel rank holds (`held_rows`), the MoE layers of this pipeline stage; None where there are none, or nothing was recorded
    advantage: float
    exact: bool  # every token and its KV prefix come from the very weights being trained
    rollout: int  # which rollout of the step it is a leaf of, 0 .. sequences of the step - 1

    @property
    def fed(self) -> int:
        """Tokens the model processes."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class BatchPlan:
    """Which sequence goes where: `bins[rank][microbatch]` = indices of sequences. Every rank has equally many micro-batches."""

    bins: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def microbatches(self) -> int:
        return len(self.bins[0])

    @property
    def sequences(self) -> int:
        """Of the whole step."""
        return sum(len(part) for bins in self.bins for part in bins)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Indices of all sequences of a data-parallel rank."""
        return tuple(i for part in self.bins[rank] for i in part)


def plan_batch(lengths: Seq[int], ranks: int, max_tokens: int) -> BatchPlan:
    """Distribute sequences of `lengths` tokens over data-parallel ranks and micro-batches of at most `max_tokens` tokens.

    Longest first, each into the least loaded of `ranks * m` bins, with the smallest m for which all fit. Bins of similar load get the
    same micro-batch index on all ranks, because ranks that share experts wait for each other in every micro-batch.

    Raises StructureError: a sequence longer than `max_tokens`, or none at all.
    """
    if not lengths:
        raise StructureError("a training batch without sequences", "at least one", "lower the buffer's staleness drop or wait for groups")
    if max(lengths) > max_tokens:
        raise StructureError(f"a sequence of {max(lengths)} tokens does not fit a micro-batch of {max_tokens}", f"<= {max_tokens} tokens",
                             "raise trainer.max_tokens_per_microbatch", cause="too-long")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    m = -(-sum(lengths) // (ranks * max_tokens))
    while (bins := _fill(lengths, order, ranks * m, max_tokens)) is None:
        m += 1
    bins.sort(key=lambda b: (-sum(lengths[i] for i in b), b))
    rows = [bins[j * ranks : (j + 1) * ranks] for j in range(m)]
    # within a row loads fall from left to right: reverse every other row so that no rank always gets the larger share
    rows = [row if j % 2 == 0 else row[::-1] for j, row in enumerate(rows)]
    return BatchPlan(tuple(tuple(tuple(rows[j][r]) for j in range(m)) for r in range(ranks)))


def _fill(lengths: Seq[int], order: list[int], count: int, max_tokens: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in order:
        b = min(range(count), key=load.__getitem__)
        if load[b] + lengths[i] > max_tokens:
            return None
        bins[b].append(i)
        load[b] += lengths[i]
    return bins


def padded_rows(fed: int, cp: int) -> int:
    """Rows that a sequence of `fed` tokens takes in a micro-batch: under context parallelism 2 * cp equal chunks."""
    return -(-fed // (2 * cp)) * 2 * cp if cp > 1 else fed


def held_rows(fed: int, cp: int, rank: int) -> tuple[tuple[int, int], ...]:
    """The rows of a sequence of `fed` tokens that a context-parallel rank holds, without padding, as ranges [start, stop) in order: of its 2 * cp chunks those
    numbered `rank` and 2 * cp - 1 - rank (miles.platform.context_parallel)."""
    if cp == 1:
        return ((0, fed),)
    chunk = padded_rows(fed, cp) // (2 * cp)
    return tuple((min(i * chunk, fed), min((i + 1) * chunk, fed)) for i in (rank, 2 * cp - 1 - rank))


@dataclass(frozen=True)
class PackedMicrobatch:
    """Sequences end to end, N rows. Rows that are padding, or whose target was given, have mask 0 and weight 0."""

    input_ids: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N], position in its sequence
    bounds: np.ndarray  # int32 [S+1], row at which each sequence starts; the last entry is N
    targets: np.ndarray  # int64 [N], the next token
    mask: np.ndarray  # bool [N], target was sampled
    logprobs: np.ndarray  # float32 [N], rollout log-probability of the target
    versions: np.ndarray  # int64 [N], weight version that sampled the target
    advantages: np.ndarray  # float32 [N]
    weights: np.ndarray  # float32 [N], share of this token in the loss of the whole step; sums to 1 over the step
    exact: np.ndarray  # bool [N]
    sequence: np.ndarray  # int64 [N], which of the S sequences
    routes: np.ndarray | None  # int64 [N / cp, L, K], of the rows that this context-parallel rank holds, in its order
    recorded: np.ndarray  # bool [N / cp], which of these rows of `routes` were recorded

    @property
    def draft_targets(self) -> np.ndarray:
        """int64 [N]: the token after the next, which a draft layer predicts from a row."""
        return np.append(self.targets[1:], 0)

    @property
    def draft_mask(self) -> np.ndarray:
        """bool [N]: that one was sampled, in the same sequence."""
        return np.append(self.mask[1:] & (self.sequence[1:] == self.sequence[:-1]), False)

    @property
    def longest(self) -> int:
        return int(np.diff(self.bounds).max())


def pack(sequences: Seq[Sequence], token_weights: Seq[float], *, cp: int = 1, cp_rank: int = 0, total_align: int = 1,
         routes_shape: tuple[int, int] | None = None, routes_needed: bool = True) -> PackedMicrobatch:
    """Pack sequences; `token_weights[i]` is the loss weight of each sampled token of sequence i.

    Every sequence is padded for `cp` context-parallel ranks (`padded_rows`) and the whole to a multiple of `total_align` (sequence parallelism; a multiple of
    2 * cp where cp > 1) by a last sequence of padding. An empty list gives padding alone, so that a rank without work still takes part in its group's
    communication. `routes_shape` = (MoE layers of this pipeline stage, K); padding rows are routed to experts 0..K-1, and so are, unless `routes_needed`, those of a
    sequence without routes.

    Raises StructureError: routes are missing or of another shape.
    """
    lengths = [padded_rows(s.fed, cp) for s in sequences]
    total = sum(lengths)
    tail = -total % total_align if total else total_align
    bounds = np.cumsum([0, *lengths, *([tail] if tail else [])], dtype=np.int32)
    n = int(bounds[-1])
    out = PackedMicrobatch(
        input_ids=np.zeros(n, np.int64), positions=np.concatenate([np.arange(k) for k in np.diff(bounds)]), bounds=bounds,
        targets=np.zeros(n, np.int64), mask=np.zeros(n, bool), logprobs=np.zeros(n, np.float32), versions=np.full(n, NO_VERSION, np.int64), advantages=np.zeros(n, np.float32),
        weights=np.zeros(n, np.float32), exact=np.zeros(n, bool), sequence=np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)),
        routes=None if routes_shape is None else np.broadcast_to(np.arange(routes_shape[1]), (n // cp, *routes_shape)).copy(),
        recorded=np.zeros(n // cp, bool),
    )
    for s, start, weight in zip(sequences, bounds, token_weights, strict=False):
        rows = slice(start, start + s.fed)
        sampled = s.loss_mask[1:].astype(bool)
        out.input_ids[rows], out.targets[rows] = s.tokens[:-1], s.tokens[1:]
        out.mask[rows], out.logprobs[rows], out.versions[rows] = sampled, s.logprobs[1:], s.versions[1:]
        out.advantages[rows], out.exact[rows] = s.advantage, s.exact
        out.weights[rows] = np.where(sampled, weight, 0.0)
        if routes_shape is not None and (routes_needed or s.routes is not None):
            held = [stop - first for first, stop in held_rows(s.fed, cp, cp_rank)]
            if s.routes is None or s.routes.shape != (sum(held), *routes_shape):
                raise StructureError(f"routes of shape {None if s.routes is None else s.routes.shape} for a sequence of {len(s.tokens)} tokens",
                                     f"[{sum(held)}, {routes_shape[0]}, {routes_shape[1]}], the rows of this context-parallel rank over the MoE layers of this stage",
                                     "record routes in the engine, or set trainer.routing_replay = false", cause="routes")
            here = slice(start // cp, (start + padded_rows(s.fed, cp)) // cp)
            chunks = zip(*(np.split(a[here], len(held)) for a in (out.routes, out.recorded)), strict=True)  # of equal size; padding ends one
            for (chunk, recorded), found in zip(chunks, np.split(s.routes, np.cumsum(held)[:-1]), strict=True):
                chunk[: len(found)], recorded[: len(found)] = found, True
    return out


def token_weights(rollout_of: Seq[int], sampled: np.ndarray, reduction: str, constant: int) -> list[float]:
    """Loss weight of each sampled token of this rank's sequences, which are leaves of the rollouts `rollout_of`. `sampled`: int [R], sampled tokens
    trained over all leaves of each rollout of the step, on all ranks; 0 where there is no such rollout.

    `token`: 1 / (sampled tokens of the step). `sequence`: 1 / (rollouts of the step * sampled tokens of this rollout), so that every rollout has
    the same weight, however often its context was folded or forked. Sums over micro-batches and ranks are the mean over the step. `constant`:
    1 / (rollouts of the step * constant), a weight that depends on no length (Dr.GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2).
    """
    if reduction == "token":
        return [1.0 / int(sampled.sum())] * len(rollout_of)
    rollouts = int((sampled > 0).sum())
    if reduction == "constant":
        return [1.0 / (rollouts * constant) if sampled[r] else 0.0 for r in rollout_of]
    return [1.0 / (rollouts * int(sampled[r])) if sampled[r] else 0.0 for r in rollout_of]
