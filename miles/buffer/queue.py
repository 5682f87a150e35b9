"""The consuming side: the trainer leader takes ready groups, first sealed first, each exactly once on the lineage of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from miles.buffer.state import GroupInfo, Status, choose
from miles.buffer.storage import group_path
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

    def __init__(self, run: RunDir, epoch: int, restored_step: int):
        """`restored_step`: optimizer steps in the weights that training starts from; later work of older epochs is undone."""
        self._run, self._epoch = run, epoch
        run.check_epoch(Role.TRAINER, epoch)
        self._journal = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.TRAINER, epoch))
        self._view = BufferView(run)
        self._append({"kind": "restore", "step": restored_step})
        self._view.poll()

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
        fresh, stale = choose(self.state, count, version, self._run.config.buffer.max_staleness)
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
        """Drop a group whose file does not verify."""
        self._append({"kind": "drop", "group": group_id, "reason": reason})
        self._view.poll()

    def trained(self, groups: list[int], version: int, step: int) -> None:
        self._append({"kind": "trained", "groups": groups, "step": step, "version": version})
        self._view.poll()

    def retire(self, up_to_step: int) -> int:
        """Remove the files of the oldest groups trained at or before `up_to_step` beyond `buffer.keep_trained_gb`. Returns how many."""
        files = []
        for g in sorted(self.state.with_status(Status.TRAINED) + self.state.with_status(Status.DROPPED), key=lambda g: -(g.step or 0)):
            path = group_path(self._run.buffer_dir, g.group_id)
            if (g.step or 0) <= up_to_step and path.exists():
                files.append((path, path.stat().st_size))
        budget, removed = self._run.config.buffer.keep_trained_gb * 1e9, 0
        for path, size in files:
            budget -= size
            if budget < 0:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _append(self, record: dict) -> None:
        self._run.check_epoch(Role.TRAINER, self._epoch)
        self._journal.append(record)
