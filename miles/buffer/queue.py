"""The consuming side: the trainer leader takes ready groups in the order of `buffer.order`, each exactly once on the lineage of the weights."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from miles.buffer.frontier import Frontier, check
from miles.buffer.segments import SegmentName, read_segment, segments
from miles.buffer.state import GroupInfo, Status, choose
from miles.buffer.storage import group_path, parts_dir, stored_groups
from miles.buffer.view import BufferView, journal_name
from miles.core import Role
from miles.rundir import JournalWriter, RunDir

_CLOSED = (Status.TRAINED, Status.DROPPED)


@dataclass(frozen=True)
class Taken:
    """A step's groups, and those found too old while taking them."""

    groups: tuple[GroupInfo, ...]
    stale: tuple[GroupInfo, ...]


class TrainerQueue:
    """Staleness is counted here, at training time. Journal order: `restore` once at start, then per step `taken`, `trained`."""

    def __init__(self, run: RunDir, epoch: int, restored_step: int, frontier: Frontier | None = None):
        """`restored_step`: optimizer steps in the weights that training starts from; later work of older epochs is undone. `frontier`: of the checkpoint
        that they come from.

        Raises EnvironmentFault when the journals do not go on from the frontier.
        """
        self._run, self._epoch = run, epoch
        run.check_epoch(Role.TRAINER, epoch)
        self._journal = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.TRAINER, epoch))
        self._view = BufferView(run)
        self._append({"kind": "restore", "step": restored_step})
        self._view.poll()
        if frontier is not None:
            check(frontier, self.state)
        self._done = [g for g in stored_groups(run.buffer_dir) if g in self.state.groups and self.state.groups[g].status in _CLOSED]  # not in `_kept` yet
        self._files = set(self._done)  # closed groups whose file is there
        self._kept: list[tuple[int, int, int]] = []  # heap of (step, group, bytes): files that a checkpoint no longer needs
        self._kept_bytes = 0
        self._held: dict[SegmentName, set[int]] = {}  # groups of full segments that are not gone yet

    @property
    def state(self):
        return self._view.state

    def poll(self) -> int:
        """Look for new groups; returns how many are ready."""
        self._view.poll()
        return len(self.state.with_status(Status.READY))

    def take(self, count: int, version: int, step: int) -> Taken | None:
        """`count` groups for `step`, at most `buffer.max_staleness` versions old, or None while there are too few.

        Groups over the limit are dropped (and journalled as `stale`) whether or not enough fresh ones are there.
        """
        c = self._run.config.buffer
        retried = [kind for kind, then in (("stale", c.on_stale), ("filter", c.on_filtered)) if then == "retry"]
        fresh, stale = choose(self.state, count, version, c.max_staleness, by_index=c.order == "index", retried=retried)
        self._close(g.group_id for g in stale)
        for g in stale:
            self._append({"kind": "stale", "group": g.group_id, "step": step, "version": version,
                          "oldest_version": g.oldest_version, "tokens": g.tokens, "reward_mean": g.reward_mean})
        if len(fresh) < count:
            self._view.poll()
            return Taken((), tuple(stale)) if stale else None
        self._append({"kind": "taken", "groups": [g.group_id for g in fresh], "step": step, "version": version})
        self._view.poll()
        return Taken(tuple(fresh), tuple(stale))

    def drop(self, group_id: int, reason: str) -> None:
        """Drop a group whose file does not verify, or is gone."""
        self._close([group_id])
        self._append({"kind": "drop", "group": group_id, "reason": reason})
        self._view.poll()

    def trained(self, groups: list[int], version: int, step: int) -> None:
        self._append({"kind": "trained", "groups": groups, "step": step, "version": version})
        self._close(groups)
        self._view.poll()

    def retire(self, up_to_step: int) -> int:
        """Remove the oldest groups trained at or before `up_to_step` beyond `buffer.keep_trained_gb`, dropped ones first, and the segments of which every
        group is gone. Returns how many groups. Looks at the groups that are new since the last call."""
        self._run.check_epoch(Role.TRAINER, self._epoch)
        later = []
        for group_id in self._done:
            g = self.state.groups[group_id]
            if g.trained and g.step > up_to_step:
                later.append(group_id)
            else:
                heapq.heappush(self._kept, (g.step if g.trained else 0, group_id, g.bytes))
                self._kept_bytes += g.bytes
        self._done, removed = later, 0
        while self._kept and self._kept_bytes > self._run.config.buffer.keep_trained_gb * 1e9:
            _, group_id, size = heapq.heappop(self._kept)
            group_path(self._run.buffer_dir, group_id).unlink(missing_ok=True)
            self._kept_bytes -= size
            self._files.discard(group_id)
            removed += 1
        self._retire_segments()
        return removed

    def _retire_segments(self) -> None:
        folder = parts_dir(self._run.buffer_dir)
        names = segments(folder)
        last = {(n.source, n.writer): n.number for n in names}
        epochs = {pool: self._run.pool_epoch(pool) for pool in {n.source.pool for n in names}}
        for name in names:
            if name.source.epoch >= epochs[name.source.pool] and name.number == last[name.source, name.writer]:
                continue  # its writer may still append to it
            held = self._held[name] if name in self._held else self._groups_in(name)
            self._held[name] = {g for g in held if self._needed(g)}
            if not self._held[name]:  # look once more: what a fenced process appended since may have been sealed by a leader that started after that
                self._held[name] = {g for g in self._groups_in(name) if self._needed(g)}
            if not self._held[name]:
                (folder / str(name)).unlink(missing_ok=True)
                del self._held[name]

    def _groups_in(self, name: SegmentName) -> set[int]:
        return {header.group for header, _ in read_segment(parts_dir(self._run.buffer_dir), name)}.union(self.state.in_segment.get(str(name), ()))

    def _needed(self, group_id: int) -> bool:
        """Its bytes may still be asked for, or are kept for analysis. A group that was dropped before it was sealed has nothing to keep."""
        g = self.state.groups.get(group_id)
        return g is None or g.status not in _CLOSED or group_id in self._files

    def close(self) -> None:
        self._journal.close()

    def _close(self, groups: Iterable[int]) -> None:
        new = set(groups) - self._files
        self._done += new
        self._files |= new

    def _append(self, record: dict) -> None:
        self._run.check_epoch(Role.TRAINER, self._epoch)
        self._journal.append(record)
