"""Where a checkpoint cuts through the run: what the buffer held at that moment, and whether what is there after a restart goes on from it. Pure.

The journals are the record of every group; a checkpoint holds weights. A restart believes both, so they must be of one run: each group that the weights
have seen is trained in the journals at the same step, and each group that was on its way then is still known.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from miles.buffer.state import BufferState, Status
from miles.core import EnvironmentFault


class Frontier(msgspec.Struct, frozen=True):
    """The cut of one checkpoint, stored with it as frontier.json."""

    step: int
    version: int  # that has, or is about to get, the weights of this step
    trainer_epoch: int
    rollout_epoch: int
    cursor: int  # prompts begun, retries not counted: the data source goes on with this one
    trained: int  # groups that the weights have seen
    trained_digest: str  # xxh3-128 of their (group, step), in the order of both
    taken: list[int]
    ready: list[int]
    open: dict[int, str]  # group -> task of unfinished prompts; a restart samples them first
    adapters: dict[str, Any] | None = None  # of low-rank adapters: the frozen weights that they were trained with


def cut(state: BufferState, step: int, version: int, trainer_epoch: int, rollout_epoch: int, adapters: dict[str, Any] | None = None) -> Frontier:
    """The frontier of the weights of `step`, from the journals as they are read now."""
    return Frontier(
        step, version, trainer_epoch, rollout_epoch, cursor=sum(g.retry_of is None for g in state.groups.values()),
        trained=len(state.with_status(Status.TRAINED)), trained_digest=_digest(state),
        taken=sorted(g.group_id for g in state.with_status(Status.TAKEN)), ready=sorted(g.group_id for g in state.with_status(Status.READY)),
        open={g.group_id: g.task_id for g in sorted(state.with_status(Status.OPEN), key=lambda g: g.group_id)}, adapters=adapters)


def check(frontier: Frontier, state: BufferState) -> None:
    """Raises EnvironmentFault unless `state`, restored to the checkpoint's step, goes on from the frontier."""
    found = len(state.with_status(Status.TRAINED))
    if (found, _digest(state)) != (frontier.trained, frontier.trained_digest):
        raise EnvironmentFault(
            f"the checkpoint of step {frontier.step} has trained {frontier.trained} groups, the journals say {found}, or other ones",
            "checkpoint and RUN/buffer/journal of the same run, both whole",
            "restore RUN/buffer/journal from where it was moved or lost; without it groups would be trained twice")
    lost = sorted(g for g in (*frontier.taken, *frontier.ready, *frontier.open) if g not in state.groups)
    if lost:
        raise EnvironmentFault(f"{len(lost)} groups that were under way at step {frontier.step} are in no journal: {lost[:5]}",
                               "every journal of RUN/buffer/journal that was there at the checkpoint",
                               "restore the rollout journals from where they were moved or lost; without them prompts would be left out")


def _digest(state: BufferState) -> str:
    trained = sorted((g.group_id, g.step) for g in state.with_status(Status.TRAINED))
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(trained))
