"""The producing side: any rollout rank publishes parts, the rollout leader opens, seals and drops groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles.buffer import storage
from miles.buffer.filters import load_filter
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
        self._filter = load_filter(run.config.buffer.filter)
        self._journal = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.ROLLOUT, epoch))

    def start(self, group_id: int, task_id: str, retry_of: int | None = None) -> None:
        self._append({"kind": "start", "group": group_id, "task": task_id, **({} if retry_of is None else {"retry_of": retry_of})})

    def seal(self, group_id: int, samples: list[int]) -> None:
        """Seal the parts of `samples` into the group file and announce it; or drop the group, where `buffer.filter` says so.

        Parts that cannot be read are left out. Where that leaves a group of one, which has no baseline, the group is dropped (`damaged_parts`).
        """
        self._run.check_epoch(Role.ROLLOUT, self._epoch)
        folder = self._run.buffer_dir
        items, damaged = storage.read_part_summaries(folder, group_id, samples)
        if damaged:
            if self._sealed_before(group_id):  # its parts were being removed when our predecessor died
                self._announce(group_id, storage.read_summaries(folder, group_id), samples)
                return
            print(f"g{group_id}: the parts of samples {damaged} cannot be read and are left out", flush=True)
        whole = [s for s in samples if s not in damaged]
        if damaged and len(whole) < 2:
            self._drop(group_id, "damaged_parts", items)
        elif reason := self._filter(items):
            self._drop(group_id, f"filter:{reason}", items)
        else:
            try:
                storage.seal_parts(folder, group_id, whole)
            except FileExistsError:  # by our predecessor just before it died: only the record is missing
                if self._sealed_before(group_id):
                    items = storage.read_summaries(folder, group_id)
                else:
                    storage.group_path(folder, group_id).unlink()  # damaged, and believed by no record
                    storage.seal_parts(folder, group_id, whole)
            self._announce(group_id, items, samples)

    def drop(self, group_id: int, reason: str) -> None:
        """Drop a group of which too little is left, with the figures of the samples that it has."""
        folder = self._run.buffer_dir
        self._drop(group_id, reason, storage.read_part_summaries(folder, group_id, storage.finished_parts(folder).get(group_id, []))[0])

    def _sealed_before(self, group_id: int) -> bool:
        """There is a whole file of this group."""
        try:
            return bool(storage.read_summaries(self._run.buffer_dir, group_id))
        except storage.UNREADABLE:
            return False

    def _announce(self, group_id: int, items: list[dict], samples: list[int]) -> None:
        self._append({"kind": "ready", "group": group_id, **_figures(items)})
        storage.remove_parts(self._run.buffer_dir, group_id, samples)

    def _drop(self, group_id: int, reason: str, items: list[dict]) -> None:
        self._append({"kind": "drop", "group": group_id, "reason": reason, **(_figures(items) if items else {})})
        storage.remove_parts(self._run.buffer_dir, group_id)

    def close(self) -> None:
        self._journal.close()

    def _append(self, record: dict) -> None:
        self._run.check_epoch(Role.ROLLOUT, self._epoch)
        self._journal.append(record)


def _figures(items: list[dict]) -> dict:
    """What the journal says of a group. `trajectories` and `tokens` count all leaves, `reward_mean` each sample once."""
    rewards = {i["sample"]: i["reward"] for i in items}
    return {
        "task": items[0]["task_id"], "trajectories": len(items), "samples": len(rewards), "oldest_version": min(i["oldest_version"] for i in items),
        "tokens": sum(i["length"] for i in items), "reward_mean": float(np.mean(list(rewards.values()))),
    }
