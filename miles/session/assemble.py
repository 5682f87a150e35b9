"""Turns to training sequences. Pure: every token is accounted for, or the sample is refused with a cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from miles.core import NO_VERSION, Drafts, StructureError, Trajectory, Turn
from miles.session.history import Checkpoint, History


@dataclass(frozen=True)
class Assembled:
    """The arrays of a `Trajectory`."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]
    logprobs: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T]
    routes: np.ndarray | None  # uint8|uint16 [T-1, L, K]


@dataclass(frozen=True)
class Leaf:
    """A kept conversation of a history and its sequence, in which the turns that an earlier leaf trains are given text."""

    arrays: Assembled
    turns: tuple[Checkpoint, ...]  # of the whole conversation
    trained: tuple[Checkpoint, ...]  # those of them that are trained here; the last one always is


def assemble(turns: Sequence[Turn]) -> Assembled:
    """Join turns whose inputs each start with everything before. T = tokens of the last input + those it sampled.

    Raises StructureError with cause assembly:empty | prefix | length | routes.
    """
    if not turns:
        raise StructureError("no turn", "at least one", cause="assembly:empty")
    total = len(turns[-1].input_ids) + len(turns[-1].output_ids)
    tokens = np.zeros(total, dtype=np.int32)
    mask = np.zeros(total, dtype=np.uint8)
    logprobs = np.zeros(total, dtype=np.float32)
    versions = np.full(total, NO_VERSION, dtype=np.int32)
    at = 0
    for k, turn in enumerate(turns):
        start, end = len(turn.input_ids), len(turn.input_ids) + len(turn.output_ids)
        if start < at or (k and start == at) or end > total or not np.array_equal(turn.input_ids[:at], tokens[:at]):
            raise StructureError(f"turn {k}: its {start} input tokens do not extend the {at} tokens before it", "all earlier tokens, then new ones",
                                 cause="assembly:prefix")
        if not len(turn.output_ids) == len(turn.logprobs) == len(turn.versions) or end == start:
            raise StructureError(f"turn {k}: {len(turn.output_ids)} output tokens, {len(turn.logprobs)} log-probabilities, {len(turn.versions)} versions",
                                 "equal, at least 1", cause="assembly:length")
        tokens[at:start] = turn.input_ids[at:]
        tokens[start:end], mask[start:end], logprobs[start:end], versions[start:end] = turn.output_ids, 1, turn.logprobs, turn.versions
        at = end
    if int(mask.sum()) != sum(len(t.output_ids) for t in turns):
        raise StructureError(f"{int(mask.sum())} tokens marked as sampled", f"{sum(len(t.output_ids) for t in turns)}, the turns' outputs", cause="assembly:length")
    return Assembled(tokens, mask, logprobs, versions, _join_routes(turns, total))


def assemble_leaves(history: History) -> list[Leaf]:
    """One training sequence for each kept leaf, at least one; a linear history has one. What several leaves share was sampled once and is trained
    once: in the first of them; in the others it is given text (mask 0), so their losses add up to that of every sampled token of the kept
    conversations, once.

    Raises StructureError like `assemble`, and with cause assembly:shared when that does not come out.
    """
    found, trained = [], set()
    for leaf in history.leaves():
        path = history.path(leaf)
        a = assemble([history.nodes[i].turn for i in path])
        for i in trained.intersection(path):
            turn = history.nodes[i].turn
            span = slice(len(turn.input_ids), len(turn.input_ids) + len(turn.output_ids))
            a.loss_mask[span], a.logprobs[span], a.versions[span] = 0, 0.0, NO_VERSION
        found.append(Leaf(a, tuple(history.nodes[i] for i in path), tuple(history.nodes[i] for i in path if i not in trained)))
        trained.update(path)
    if not found:
        raise StructureError("no turn", "at least one", cause="assembly:empty")
    masked, sampled = sum(int(leaf.arrays.loss_mask.sum()) for leaf in found), sum(len(history.nodes[i].turn.output_ids) for i in trained)
    if masked != sampled:
        raise StructureError(f"{masked} tokens to train in {len(found)} sequences", f"{sampled}, each sampled token once", cause="assembly:shared")
    return found


def _join_routes(turns: Sequence[Turn], total: int) -> np.ndarray | None:
    """Row t = experts that processed token t. The last token of a turn is processed by the next one; the very last by none."""
    if all(t.routes is None for t in turns):
        return None
    rows = 0
    for k, turn in enumerate(turns):
        end = len(turn.input_ids) + len(turn.output_ids) - 1
        if turn.routes is None or turn.routes_start != rows or len(turn.routes) != end - rows:
            found = "none" if turn.routes is None else f"rows {turn.routes_start} .. {turn.routes_start + len(turn.routes)}"
            raise StructureError(f"turn {k}: routes {found}", f"rows {rows} .. {end}, right after the turn before", cause="assembly:routes")
        rows = end
    if rows != total - 1:
        raise StructureError(f"{rows} route rows", f"{total - 1}, tokens - 1", cause="assembly:routes")
    return np.concatenate([t.routes for t in turns if t.routes is not None])


def is_exact(turns: Iterable[Turn], opened_at: int) -> bool:
    """Whether every token sampled in a conversation and the KV prefix it saw come from one weight version.

    The session's prefix cache is a namespace named after `opened_at`, the version served when it was opened, and versions only rise. So if
    all its tokens have that version, no update came before the last of them, and everything in that namespace until then was computed with it.
    """
    return all(bool((t.versions == opened_at).all()) for t in turns)


def to_trajectories(
    history: History, *, group_id: int, sample: int, task_id: str, reward: float, finish_reason: str, opened_at: int, seconds: float,
    meta: dict[str, Any] | None = None,
) -> list[Trajectory]:
    """The trajectories of a sample, one for each kept leaf. How many of the `cacheable_tokens` came from the prefix cache is kept in `meta` as
    reused_tokens, because `cached_tokens` also counts prefixes that other sessions had computed; and there too what speculative decoding did (`Drafts` as a list, where
    there was some). Raises StructureError like `assemble_leaves`."""
    return [
        Trajectory(
            group_id=group_id, sample=sample, leaf=n, task_id=task_id, tokens=leaf.arrays.tokens, loss_mask=leaf.arrays.loss_mask,
            logprobs=leaf.arrays.logprobs, versions=leaf.arrays.versions, routes=leaf.arrays.routes, reward=reward, finish_reason=finish_reason,
            turns=len(leaf.trained), exact=is_exact((c.turn for c in leaf.turns), opened_at), cached_tokens=sum(c.turn.cached_tokens for c in leaf.trained),
            cacheable_tokens=sum(c.cacheable_tokens for c in leaf.trained), prompt_tokens=sum(len(c.turn.input_ids) for c in leaf.trained),
            seconds=seconds, meta={**(meta or {}), "reused_tokens": sum(c.reused_tokens for c in leaf.trained), **_drafted(leaf.trained)},
        )
        for n, leaf in enumerate(assemble_leaves(history))
    ]


def _drafted(turns: Iterable[Checkpoint]) -> dict[str, list[int]]:
    total = sum((c.turn.drafts for c in turns), Drafts())
    return {"drafts": list(astuple(total))} if total.passes else {}
