"""What happened to every group: a pure fold over journal records.

Rollout records say what was made (`start`, `ready`, `drop`), trainer records what was consumed (`restore`, `taken`, `trained`, `stale`).
The two halves touch different fields, so the fold gives the same state however the two journals interleave; within one role,
records apply in epoch order. Of two `ready` records of a group the last in this order counts, which is that of the newest epoch: what a fenced leader, past
its check, still says of a group that its successor has sealed changes nothing, whenever it is read. A trainer that restarts from the checkpoint of step s
writes `restore` first: whatever an earlier epoch took or trained after s is undone, because those weights are gone; the record also says which version's
weights it starts from, behind which number (miles.buffer.versions). So a group is trained at most once on the lineage of the final weights.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from miles.buffer.versions import Lineage


class Status(enum.StrEnum):
    OPEN = "open"  # started, samples still running
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True)
class SealedAt:
    """Where the record of a sealed group lies (miles.buffer.storage)."""

    group: int
    segment: str  # file name
    offset: int
    size: int  # bytes


@dataclass
class GroupInfo:
    """One group's life. `step` is the optimizer step (1-based) that took or trained it."""

    group_id: int
    task_id: str = ""
    retry_of: int | None = None
    index: int = -1  # place of its prompt: groups of fresh prompts count from 0 as they are started, a replacement has the place of what it replaces
    ready: bool = False
    ready_order: int = -1
    oldest_version: int = -1
    sampled_by: tuple[int, ...] = ()  # versions
    trajectories: int = 0  # training sequences: all leaves of all samples
    samples: int = 0
    tokens: int = 0
    reward_mean: float = 0.0  # over samples
    bytes: int = 0  # stored
    sealed: SealedAt | None = None  # of a group that is or was ready; None in the simulator, which stores nothing
    dropped: str = ""  # reason
    retried: bool = False  # the rollout side has started a replacement
    step: int | None = None
    trained: bool = False

    @property
    def status(self) -> Status:
        if self.trained:  # before `dropped`: what the weights hold cannot be dropped any more
            return Status.TRAINED
        if self.dropped:
            return Status.DROPPED
        if self.step is not None:
            return Status.TAKEN
        return Status.READY if self.ready else Status.OPEN


class BufferState:
    """Groups by id, folded from records. `apply` is total: an unknown record kind is an error, a repeated record changes nothing.

    Groups are also kept by status, so that the questions of every turn of a loop cost what there is now and not what there ever was.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forget all records."""
        self.groups: dict[int, GroupInfo] = {}
        self.in_segment: dict[str, list[int]] = {}  # segment of parts -> groups with samples in it, by any of their `ready` records
        self.in_sealed: dict[str, list[int]] = {}  # segment of sealed groups -> groups whose `ready` records name it
        self._to_retry: dict[str, list[int]] = {"stale": [], "filter": []}  # dropped groups; heaps, the first dropped group first
        self.lineage = Lineage()
        self._ready_count = self._fresh_count = 0
        self._next_id = 0
        self._status: dict[int, Status] = {}
        self._by_status: dict[Status, dict[int, GroupInfo]] = {s: {} for s in Status}
        self._left: Counter[Status] = Counter()

    def apply(self, record: dict[str, Any]) -> None:
        for group in self._fold(record):
            before, now = self._status.get(group.group_id), group.status
            if before is not now:
                if before is not None:
                    self._leave(before, group.group_id)
                self._by_status[now][group.group_id] = group
                self._status[group.group_id] = now
                if now is Status.DROPPED and (kind := group.dropped.partition(":")[0]) in self._to_retry:
                    heapq.heappush(self._to_retry[kind], group.group_id)

    def _leave(self, status: Status, group_id: int) -> None:
        """A dict keeps a place for what was deleted, and walks over it: it is made anew when most of its places are empty."""
        del self._by_status[status][group_id]
        self._left[status] += 1
        if self._left[status] > 64 + 2 * len(self._by_status[status]):
            self._by_status[status], self._left[status] = dict(self._by_status[status]), 0

    def _fold(self, record: dict[str, Any]) -> list[GroupInfo]:
        """Apply it; returns the groups that it touched."""
        kind = record["kind"]
        if kind == "start":
            g = self._group(record["group"])
            g.task_id, g.retry_of = record["task"], record.get("retry_of")
            if g.retry_of is None:
                if g.index < 0:
                    g.index, self._fresh_count = self._fresh_count, self._fresh_count + 1
                return [g]
            replaced = self._group(g.retry_of)
            replaced.retried, g.index = True, replaced.index
            return [g, replaced]
        if kind == "ready":
            g = self._group(record["group"])
            at = SealedAt(g.group_id, *record["sealed"]) if "sealed" in record else None
            if not g.ready or g.sealed != at:
                g.ready, g.ready_order, g.sealed = True, self._ready_count, at
                _note_figures(g, record)
                g.bytes = record.get("bytes", 0)
                for segment in record.get("segments", ()):
                    self.in_segment.setdefault(segment, []).append(g.group_id)
                if at is not None:
                    self.in_sealed.setdefault(at.segment, []).append(g.group_id)
                self._ready_count += 1
            return [g]
        if kind in ("drop", "stale"):
            g = self._group(record["group"])
            g.dropped = record["reason"] if kind == "drop" else "stale"
            if kind == "drop" and "trajectories" in record:
                _note_figures(g, record)
            return [g]
        if kind in ("taken", "trained"):
            self.lineage.used(record.get("version", 0))
            groups = [self._group(i) for i in record["groups"]]
            for g in groups:
                g.step, g.trained = record["step"], g.trained or kind == "trained"
            return groups
        if kind == "restore":
            if "version" in record:
                self.lineage.restore(record["version"], record["newest"])
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

    def waiting_ages(self, version: int) -> list[int]:
        """Staleness that each ready group would have at `version`."""
        return [self.staleness(version, g) for g in self._by_status[Status.READY].values()]

    def staleness(self, version: int, group: GroupInfo) -> int:
        """Of a group that is or was ready, trained at `version` (miles.buffer.versions)."""
        return self.lineage.staleness(version, group.sampled_by)

    def to_retry(self, kind: str) -> GroupInfo | None:
        """The first group that was dropped as `stale`, or by a `filter`, and whose prompt has not been started again. A filtered group that
        was itself a retry is not tried a third time: its prompt has nothing to teach now."""
        waiting = self._to_retry[kind]
        while waiting:
            g = self.groups[waiting[0]]
            if _retry_is_due(g, kind):
                return g
            heapq.heappop(waiting)
        return None

    def awaited(self, retried: Collection[str]) -> list[GroupInfo]:
        """Groups that are not ready yet, and those dropped ones of the kinds `retried` whose prompt has still to be started again."""
        again = (self.groups[i] for kind in retried for i in self._to_retry[kind] if _retry_is_due(self.groups[i], kind))
        return [*self.with_status(Status.OPEN), *again]

    def next_group_id(self) -> int:
        return self._next_id


def _retry_is_due(g: GroupInfo, kind: str) -> bool:
    return not (g.retried or g.trained or (kind == "filter" and g.retry_of is not None))


def _note_figures(g: GroupInfo, record: dict[str, Any]) -> None:
    g.task_id, g.oldest_version = record["task"], record["oldest_version"]
    g.sampled_by = tuple(record.get("sampled_by", (g.oldest_version,)))  # the simulator's samples have one version
    g.trajectories, g.samples = record["trajectories"], record["samples"]
    g.tokens, g.reward_mean = record["tokens"], record["reward_mean"]


def choose(state: BufferState, count: int, version: int, max_staleness: int, *, by_index: bool = False,
           retried: Collection[str] = (), pick: Callable[[list[GroupInfo]], list[GroupInfo]] | None = None) -> tuple[list[GroupInfo], list[GroupInfo]]:
    """(at most `count` ready groups to train at `version`, all ready groups that are too old for it). Pure, if `pick` is, which decides in place of any order.

    First sealed first; or `by_index`, in the order of their prompts, whichever group was sealed first: then nothing is given out past a place whose group
    is still being made. `retried`: the drops (`stale`, `filter`) after which a prompt is sampled again, so that its place is still to be filled. The
    place of any other dropped group is empty.
    """
    ready = state.ready_in_order()
    fresh, stale = [], []
    for g in ready:
        (fresh if state.staleness(version, g) <= max_staleness else stale).append(g)
    if by_index:
        awaited = [*state.awaited(retried), *(stale if "stale" in retried else ())]
        missing = min((g.index for g in awaited), default=math.inf)
        fresh = sorted((g for g in fresh if g.index < missing), key=lambda g: (g.index, g.group_id))
    return fresh[:count] if pick is None else pick(fresh), stale
