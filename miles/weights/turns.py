"""Whose turn it is on GPUs that trainer and engines share (cluster.placement = "shared").

    the trainer publishes version v              ->  the engines' turn: they take memory, load v, roll out
    the batch of v is complete                   ->  each rank releases its engine's memory and acknowledges `released = v`
    every rank has released the newest version   ->  the trainer's turn: it takes memory, trains, gives its memory back, publishes v + 1

The newest version and the acknowledgements are files, so a process that was killed at any point and starts again finds whose turn it is:

- an engine has memory only for a version newer than what its rank ever released; a rank that starts in the trainer's turn starts no engine;
- a trainer has memory only while every rank has released the newest version (or there is none yet); one that starts in the engines' turn waits
  until their batch is complete.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from miles.core import Role
from miles.rundir import RunDir
from miles.weights.acks import Ack, read_ack, read_acks, write_ack
from miles.weights.store import WeightStore


def engine_may_hold(newest: int | None, released: int) -> bool:
    """Whether a rank that has released `released` (-1: nothing yet) may have its engine on the GPU while `newest` is published (None: nothing)."""
    return newest is not None and newest > released


def trainer_may_hold(newest: int | None, released: Mapping[int, int], ranks: int) -> bool:
    """Whether the trainer may have its memory. `released`: rank -> version; a rank that never said anything may have an engine."""
    return newest is None or all(released.get(rank, -1) >= newest for rank in range(ranks))


class EngineTurns:
    """One rollout rank's end. With disjoint GPUs it is always the engines' turn."""

    def __init__(self, run: RunDir, rank: int, epoch: int):
        self._run, self._rank, self._epoch, self._store = run, rank, epoch, WeightStore(run)
        self.shared = run.config.cluster.placement == "shared" and not run.pool  # a pool has GPUs of its own
        before = read_ack(run, rank)
        self.released = before.released if before is not None else -1  # of whatever epoch: it was said for good
        self._over: int | None = None  # the leader: the batch of this version is complete; None: it has not spoken yet

    def over(self, version: int) -> None:
        """The rollout leader has said that the batch of `version` is complete."""
        self._over = version

    def may_take(self) -> bool:
        """Whether an engine that has no memory now, or is not started, may take it. For a batch that is complete without it an acknowledgement is enough."""
        if not self.shared:
            return True
        newest = self._store.newest()
        if self._over is not None and newest is not None and self._over >= newest > self.released:
            self.acknowledge(Ack(self._rank, self._epoch, 0, -1, ""), released=newest)
        return self._over is not None and engine_may_hold(newest, self.released)

    def ended(self, version: int) -> bool:
        """Whether the engine, which serves `version`, has to give its memory back."""
        return self.shared and self._over is not None and self._over >= version > self.released

    def acknowledge(self, ack: Ack, released: int | None = None) -> None:
        """Write the rank's acknowledgement, with what it has released. Raises StaleEpochError in a process that was given up for dead."""
        self._run.check_epoch(Role.ROLLOUT, self._epoch)
        self.released = self.released if released is None else released
        write_ack(self._run, msgspec.structs.replace(ack, released=self.released))


def all_released(run: RunDir, store: WeightStore) -> bool:
    """Whether it is the trainer's turn, from the files."""
    released = {rank: ack.released for rank, ack in read_acks(run).items()}
    return trainer_may_hold(store.newest(), released, run.config.cluster.rollout.ranks)
