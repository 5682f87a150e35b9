"""The consuming side: the trainer leader takes ready groups in the order of `buffer.order`, each exactly once on the lineage of the weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from miles.buffer.frontier import Frontier, check
from miles.buffer.order import load_order, take_by
from miles.buffer.retention import Retention
from miles.buffer.state import GroupInfo, Status, choose
from miles.buffer.versions import FIRST
from miles.buffer.view import BufferView, journal_name
from miles.core import Role
from miles.rundir import JournalWriter, RunDir


@dataclass(frozen=True)
class Taken:
    """A step's groups, and those found too old while taking them."""

    groups: tuple[GroupInfo, ...]
    stale: tuple[GroupInfo, ...]


class TrainerQueue:
    """Staleness is counted here, at training time. Journal order: `restore` once at start, then per step `taken`, `trained`."""

    def __init__(self, run: RunDir, epoch: int, restored_step: int, frontier: Frontier | None = None, newest: int = 0):
        """`restored_step`: optimizer steps in the weights that training starts from; later work of older epochs is undone. `frontier`: of the checkpoint
        that they come from. `newest`: the highest version number on disk. Afterwards `newest` is the highest ever used as far as anything tells, and the
        trainer's first version must be the next: that number is then known to stand for the weights it started from.

        Raises EnvironmentFault when the journals do not go on from the frontier.
        """
        self._run, self._epoch = run, epoch
        run.check_epoch(Role.TRAINER, epoch)
        self._journal = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.TRAINER, epoch))
        self._view = BufferView(run)
        self._view.own(self._journal)
        self._view.poll()
        self.newest = max(newest, self.state.lineage.newest, frontier.version if frontier else 0)
        self._append({"kind": "restore", "step": restored_step, "version": frontier.version if frontier else min(FIRST, self.newest), "newest": self.newest})
        self._view.poll()
        if frontier is not None:
            check(frontier, self.state)
        self._retention = Retention(run, self.state)
        self._order = load_order(run.config.buffer.order)

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
        pick = None if self._order is None else lambda groups: take_by(self._order, c.order, self.state, version, groups, count, c.capacity_groups)
        fresh, stale = choose(self.state, count, version, c.max_staleness, by_index=c.order == "index", retried=retried, pick=pick)
        self._drop_stale(stale, version, step)
        if len(fresh) < count:
            self._view.poll_own()
            return Taken((), tuple(stale)) if stale else None
        self._append({"kind": "taken", "groups": [g.group_id for g in fresh], "step": step, "version": version})
        self._view.poll_own()
        return Taken(tuple(fresh), tuple(stale))

    def recheck(self, groups: Collection[int], version: int, step: int) -> set[int]:
        """Of groups taken for `step` when an older version was newest, those that are over the limit at `version`: they are dropped, as in `take`."""
        limit, found = self._run.config.buffer.max_staleness, (self.state.groups[i] for i in groups)
        stale = [g for g in found if self.state.staleness(version, g) > limit]
        if stale:
            self._drop_stale(stale, version, step)
            self._view.poll_own()
        return {g.group_id for g in stale}

    def _drop_stale(self, groups: list[GroupInfo], version: int, step: int) -> None:
        self._retention.closed(g.group_id for g in groups)
        for g in groups:
            self._append({"kind": "stale", "group": g.group_id, "step": step, "version": version,
                          "oldest_version": g.oldest_version, "tokens": g.tokens, "reward_mean": g.reward_mean})

    def drop(self, group_id: int, reason: str) -> None:
        """Drop a group of which a file does not verify, or is gone."""
        self._retention.closed([group_id])
        self._append({"kind": "drop", "group": group_id, "reason": reason})
        self._view.poll_own()

    def trained(self, groups: list[int], version: int, step: int) -> None:
        self._append({"kind": "trained", "groups": groups, "step": step, "version": version})
        self._retention.closed(groups)
        self._view.poll_own()

    def retire(self, up_to_step: int) -> int:
        """Give up the oldest groups trained at or before `up_to_step` beyond `buffer.keep_trained_gb`, dropped ones first, and remove the files of which
        every group is given up. Returns how many groups."""
        self._run.check_epoch(Role.TRAINER, self._epoch)
        return self._retention.give_up(up_to_step, self._run.config.buffer.keep_trained_gb * 1e9)

    def close(self) -> None:
        self._journal.close()

    def _append(self, record: dict) -> None:
        self._run.check_epoch(Role.TRAINER, self._epoch)
        self._journal.append(record)
