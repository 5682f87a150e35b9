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
    """Groups by id, folded from records. `apply` is total: an unknown record kind is an error, a repeated record changes nothing."""

    def __init__(self):
        self.groups: dict[int, GroupInfo] = {}
        self._ready_count = 0

    def apply(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "start":
            g = self._group(record["group"])
            g.task_id, g.retry_of = record["task"], record.get("retry_of")
            if g.retry_of is not None:
                self._group(g.retry_of).retried = True
        elif kind == "ready":
            g = self._group(record["group"])
            if not g.ready:
                g.ready, g.ready_order = True, self._ready_count
                g.task_id, g.oldest_version = record["task"], record["oldest_version"]
                g.trajectories, g.samples = record["trajectories"], record["samples"]
                g.tokens, g.reward_mean = record["tokens"], record["reward_mean"]
                self._ready_count += 1
        elif kind == "drop":
            self._group(record["group"]).dropped = record["reason"]
        elif kind == "taken":
            for i in record["groups"]:
                self._group(i).step = record["step"]
        elif kind == "trained":
            for i in record["groups"]:
                g = self._group(i)
                g.step, g.trained = record["step"], True
        elif kind == "stale":
            self._group(record["group"]).dropped = "stale"
        elif kind == "restore":
            for g in self.groups.values():
                if g.step is not None and g.step > record["step"]:
                    g.step, g.trained = None, False
        else:
            raise ValueError(f"journal record of unknown kind {kind!r}")

    def _group(self, group_id: int) -> GroupInfo:
        return self.groups.setdefault(group_id, GroupInfo(group_id))

    # -- questions -----------------------------------------------------------------------------------------------------------
    def with_status(self, status: Status) -> list[GroupInfo]:
        return [g for g in self.groups.values() if g.status is status]

    def ready_in_order(self) -> list[GroupInfo]:
        """Ready groups, first sealed first."""
        return sorted(self.with_status(Status.READY), key=lambda g: g.ready_order)

    def counts(self) -> dict[str, int]:
        c = Counter(g.status for g in self.groups.values())
        return {s.value: c.get(s, 0) for s in Status}

    def dropped_by_reason(self) -> dict[str, int]:
        return dict(Counter(g.dropped for g in self.groups.values() if g.dropped))

    def next_group_id(self) -> int:
        return max(self.groups, default=-1) + 1


def staleness(version_being_trained: int, oldest_version: int) -> int:
    """Age of a trajectory or group: version being trained minus the version of its oldest sampled token."""
    return version_being_trained - oldest_version
