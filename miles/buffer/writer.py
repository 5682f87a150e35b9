"""The producing side: any rollout rank publishes parts, the rollout leader opens, seals and drops groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from miles.buffer import storage
from miles.buffer.filters import load_filter
from miles.buffer.segments import Source, Written
from miles.buffer.view import journal_name
from miles.core import Role, Trajectory
from miles.rundir import JournalWriter, RunDir


def write_part(run: RunDir, epoch: int, leaves: Sequence[Trajectory]) -> Written:
    """Make a finished sample durable, all its leaves at once; where it is. Fenced: a rank of an older epoch cannot begin a segment, and the leader of a newer one does
    not look at what it appends to the one that it has. `epoch`: of the rollout role, or of the pool whose handle `run` is."""
    return storage.write_part_file(run.buffer_dir, leaves, Source(run.pool, epoch), lambda: run.check_epoch(Role.ROLLOUT, epoch))


class BufferWriter:
    """The rollout leader's end of the buffer. Order of durability: parts, sealed group, `ready` record; killed at any line before the last, the next leader finds
    the parts and seals. All of it is removed by whole segments, by `TrainerQueue.retire`. `journal`: what it has said, for a `BufferView` of this process."""

    def __init__(self, run: RunDir, epoch: int):
        self._run, self._epoch = run, epoch
        run.check_epoch(Role.ROLLOUT, epoch)
        self._filter = load_filter(run.config.buffer.filter)
        self.journal = JournalWriter(run.buffer_dir / "journal" / journal_name(Role.ROLLOUT, epoch))
        self._parts = storage.Parts(run.buffer_dir, Source(0, epoch))
        self._sealed = storage.sealed_writer(run.buffer_dir, Source(0, epoch), self._check)

    def finished_parts(self, groups: Collection[int]) -> dict[int, list[int]]:
        """Samples on disk of these groups, which are open; those of all others are forgotten."""
        for group in self._parts.groups.keys() - set(groups):
            self._parts.forget(group)
        return {group: sorted(parts) for group, parts in self._parts.groups.items()}

    def follow(self, pool: int, epoch: int) -> None:
        """Seal this pool's samples too. Those of each epoch of it have to be followed anew."""
        self._parts.follow(Source(pool, epoch))

    def leave(self, pool: int, epoch: int) -> None:
        """Keep the samples that this pool has written, and look at none that it writes from now on."""
        self._parts.leave(Source(pool, epoch))

    def has_part(self, group_id: int, sample: int) -> bool:
        """Whether a finished sample was on disk when parts were last looked for."""
        return sample in self._parts.groups.get(group_id, {})

    def told(self, group_id: int, sample: int, segment: str, offset: int) -> None:
        """What `write_part` returned for a sample of an open group."""
        self._parts.told(group_id, sample, Written(segment, offset))

    def start(self, group_id: int, task_id: str, retry_of: int | None = None) -> None:
        self._parts.expect(group_id)
        self._append({"kind": "start", "group": group_id, "task": task_id, **({} if retry_of is None else {"retry_of": retry_of})})

    def seal(self, group_id: int, samples: Sequence[int]) -> list[int]:
        """Seal the parts of `samples` into the group and announce it; or drop the group, where `buffer.filter` says so.

        Parts that cannot be read are left out: returns their samples. Where that leaves fewer than `rollout.min_samples`, the group is dropped (`damaged_parts`).
        """
        parts = self._parts.of(group_id, samples)
        if lost := sorted(set(samples) - parts.keys()):
            print(f"g{group_id}: the parts of samples {lost} cannot be read and are left out", flush=True)
        items = [i for part in parts.values() for i in part.summaries]
        if lost and len(parts) < self._run.config.rollout.min_samples:
            self._append({"kind": "drop", "group": group_id, "reason": "damaged_parts", **_figures(items)})
        elif reason := self._filter(items):
            self._append({"kind": "drop", "group": group_id, "reason": f"filter:{reason}", **_figures(items)})
        else:
            at = storage.seal(self._sealed, group_id, parts)
            places = [part.place for part in parts.values()]
            self._append({"kind": "ready", "group": group_id, **_figures(items), "bytes": at.size + sum(p.size for p in places),
                          "segments": sorted({p.segment for p in places}), "sealed": [at.segment, at.offset, at.size]})
        self._parts.forget(group_id)
        return lost

    def drop(self, group_id: int, reason: str) -> None:
        """Drop a group of which too little is left, with the figures of the samples that it has."""
        items = [i for part in self._parts.all_of(group_id).values() for i in part.summaries]
        self._append({"kind": "drop", "group": group_id, "reason": reason, **_figures(items)})
        self._parts.forget(group_id)

    def close(self) -> None:
        self._parts.close()
        self._sealed.close()
        self.journal.close()

    def _append(self, record: dict) -> None:
        self._check()
        self.journal.append(record)

    def _check(self) -> None:
        self._run.check_epoch(Role.ROLLOUT, self._epoch)


def _figures(items: list[dict]) -> dict:
    """What the journal says of a group, nothing where nothing is there. `trajectories` and `tokens` count all leaves, `reward_mean` each sample once."""
    if not items:
        return {}
    rewards = {i["sample"]: i["reward"] for i in items}
    return {
        "task": items[0]["task_id"], "trajectories": len(items), "samples": len(rewards), "oldest_version": min(i["oldest_version"] for i in items),
        "sampled_by": sorted({v for i in items for v in i["sampled_by"]}),
        "tokens": sum(i["length"] for i in items), "reward_mean": float(np.mean(list(rewards.values()))),
    }
