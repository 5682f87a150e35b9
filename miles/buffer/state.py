"""What happened to every group: a pure fold over journal records.

Rollout records say what was made (`start`, `ready`, `drop`), trainer records what was consumed (`restore`, `taken`, `trained`, `stale`).
The two halves touch different fields, so the fold gives the same state however the two journals interleave; within one role,
records apply in epoch order. A trainer that restarts from the checkpoint of step s writes `restore` first: whatever an earlier epoch took
or trained after s is undone, because those weights are gone. So a group is trained at most once on the lineage of the final weights.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import Any


class Status(enum.StrEnum):
    OPEN = "open"  # started, samples still running
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass
class GroupInfo:
    """One group's life. `step` is the optimizer step (1-based) that took or trained it."""

    group_id: int
    task_id: str = ""
    retry_of: int | None = None
    ready: bool = False
    ready_order: int = -1
    oldest_version: int = -1
    trajectories: int = 0  # training sequences: all leaves of all samples
    samples: int = 0
    tokens: int = 0
    reward_mean: float = 0.0  # over samples
    dropped: str = ""  # reason
    retried: bool = False  # the rollout side has started a replacement
    step: int | None = None
    trained: bool = False

    @property
    def status(self) -> Status:
        if self.dropped:
            return Status.DROPPED
        if self.trained:
            return Status.TRAINED
        if self.step is not None:
            return Status.TAKEN
        return Status.READY if self.ready else Status.OPEN


class BufferState:
    """Groups by id, folded from records. `apply` is total: an unknown record kind is an error, a repeated record changes nothing.

    Groups are also kept by status, so that the questions of every turn of a loop cost what there is now and not what there ever was.
    """

    def __init__(self):
        self.groups: dict[int, GroupInfo] = {}
        self._ready_count = 0
        self._next_id = 0
        self._status: dict[int, Status] = {}
        self._by_status: dict[Status, dict[int, GroupInfo]] = {s: {} for s in Status}

    def apply(self, record: dict[str, Any]) -> None:
        for group in self._fold(record):
            before, now = self._status.get(group.group_id), group.status
            if before is not now:
                if before is not None:
                    del self._by_status[before][group.group_id]
                self._by_status[now][group.group_id] = group
                self._status[group.group_id] = now

    def _fold(self, record: dict[str, Any]) -> list[GroupInfo]:
        """Apply it; returns the groups that it touched."""
        kind = record["kind"]
        if kind == "start":
            g = self._group(record["group"])
            g.task_id, g.retry_of = record["task"], record.get("retry_of")
            if g.retry_of is None:
                return [g]
            self._group(g.retry_of).retried = True
            return [g, self._group(g.retry_of)]
        if kind == "ready":
            g = self._group(record["group"])
            if not g.ready:
                g.ready, g.ready_order = True, self._ready_count
                g.task_id, g.oldest_version = record["task"], record["oldest_version"]
                g.trajectories, g.samples = record["trajectories"], record["samples"]
                g.tokens, g.reward_mean = record["tokens"], record["reward_mean"]
                self._ready_count += 1
            return [g]
        if kind in ("drop", "stale"):
            g = self._group(record["group"])
            g.dropped = record["reason"] if kind == "drop" else "stale"
            return [g]
        if kind in ("taken", "trained"):
            groups = [self._group(i) for i in record["groups"]]
            for g in groups:
                g.step, g.trained = record["step"], g.trained or kind == "trained"
            return groups
        if kind == "restore":
            undone = [g for g in self.groups.values() if g.step is not None and g.step > record["step"]]
            for g in undone:
                g.step, g.trained = None, False
            return undone
        raise ValueError(f"journal record of unknown kind {kind!r}")

    def _group(self, group_id: int) -> GroupInfo:
        if group_id not in self.groups:
            self.groups[group_id] = GroupInfo(group_id)
            self._next_id = max(self._next_id, group_id + 1)
        return self.groups[group_id]

    # -- questions -----------------------------------------------------------------------------------------------------------
    def with_status(self, status: Status) -> list[GroupInfo]:
        return list(self._by_status[status].values())

    def ready_in_order(self) -> list[GroupInfo]:
        """Ready groups, first sealed first."""
        return sorted(self.with_status(Status.READY), key=lambda g: g.ready_order)

    def counts(self) -> dict[str, int]:
        return {s.value: len(self._by_status[s]) for s in Status}

    def dropped_by_reason(self) -> dict[str, int]:
        return dict(Counter(g.dropped for g in self._by_status[Status.DROPPED].values()))

    def next_group_id(self) -> int:
        return self._next_id


def choose(state: BufferState, count: int, version: int, max_staleness: int) -> tuple[list[GroupInfo], list[GroupInfo]]:
    """(at most `count` ready groups to train at `version`, first sealed first; all ready groups that are too old for it). Pure."""
    ready = state.ready_in_order()
    stale = [g for g in ready if staleness(version, g.oldest_version) > max_staleness]
    fresh = [g for g in ready if staleness(version, g.oldest_version) <= max_staleness]
    return fresh[:count], stale


def staleness(version_being_trained: int, oldest_version: int) -> int:
    """Age of a trajectory or group: version being trained minus the version of its oldest sampled token."""
    return version_being_trained - oldest_version
