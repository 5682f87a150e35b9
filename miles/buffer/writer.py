"""The producing side: any rollout rank publishes parts, the rollout leader opens, seals and drops groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles.buffer import storage
from miles.buffer.view import journal_name
from miles.core import Role, Trajectory
from miles.rundir import JournalWriter, RunDir


def write_part(run: RunDir, epoch: int, leaves: Sequence[Trajectory]) -> None:
    """Make a finished sample durable, all its leaves at once. Fenced: a rank of an older epoch cannot publish."""
    run.check_epoch(Role.ROLLOUT, epoch)
    storage.write_part_file(run.buffer_dir, leaves)


class BufferWriter:
    """The rollout leader's end of the buffer. Order of durability: parts, sealed file, `ready` record, then parts are removed; killed
    at any line, the next leader finds either the parts (and seals again) or the sealed file (and journals it)."""

    def __init__(self, run: RunDir, epoch: int):
        self._run, self._epoch = run, epoch
        run.check_epoch(Role.ROLLOUT, epoch)
        self._journal = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.ROLLOUT, epoch))

    def start(self, group_id: int, task_id: str, retry_of: int | None = None) -> None:
        self._append({"kind": "start", "group": group_id, "task": task_id, **({} if retry_of is None else {"retry_of": retry_of})})

    def seal(self, group_id: int, samples: list[int]) -> None:
        """Seal the parts of `samples` into the group file and announce it."""
        self._run.check_epoch(Role.ROLLOUT, self._epoch)
        try:
            storage.seal_parts(self._run.buffer_dir, group_id, samples)
        except FileExistsError:
            pass  # sealed by our predecessor just before it died; its file is whole, only the record is missing
        self.announce(group_id)

    def announce(self, group_id: int) -> None:
        """Journal a sealed group as ready, from what is in its file. `trajectories` and `tokens` count all leaves, `reward_mean` each sample once."""
        items = storage.read_summaries(self._run.buffer_dir, group_id)
        rewards = {i["sample"]: i["reward"] for i in items}
        self._append({
            "kind": "ready", "group": group_id, "task": items[0]["task_id"], "trajectories": len(items), "samples": len(rewards),
            "oldest_version": min(i["oldest_version"] for i in items), "tokens": sum(i["length"] for i in items),
            "reward_mean": float(np.mean(list(rewards.values()))),
        })
        storage.remove_parts(self._run.buffer_dir, group_id)

    def drop(self, group_id: int, reason: str) -> None:
        self._append({"kind": "drop", "group": group_id, "reason": reason})
        storage.remove_parts(self._run.buffer_dir, group_id)

    def close(self) -> None:
        self._journal.close()

    def _append(self, record: dict) -> None:
        self._run.check_epoch(Role.ROLLOUT, self._epoch)
        self._journal.append(record)
