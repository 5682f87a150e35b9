"""The trainer's side of GPUs that it shares with the engines (miles.weights.turns). With GPUs of its own, every method returns at once."""

from __future__ import annotations

import time

import torch.distributed as dist

from miles.comm import World
from miles.rundir import RunDir
from miles.trainer.memory import DeviceMemory
from miles.weights.store import WeightStore
from miles.weights.turns import all_released

POLL_S = 0.05
LOOKS = 3
"""Looks at the acknowledgements of which the middle one is followed by a look at the journal and an attempt to take groups."""


class Turns:
    """`memory` is set once model and optimizer exist; from then on the trainer has it on the GPU between `take` and `give`."""

    def __init__(self, run: RunDir, world: World):
        self._run, self._world, self._store = run, world, WeightStore(run)
        self.shared = run.config.cluster.placement == "shared"
        self.memory: DeviceMemory | None = None
        self._held = True
        self._looks = 0

    def wait(self) -> float:
        """Collective: until no engine has GPU memory. Returns the seconds."""
        start = time.monotonic()
        if self.shared:
            while self._world.leader and not all_released(self._run, self._store):
                time.sleep(POLL_S)
            self._world.broadcast_bytes(b"" if self._world.leader else None)
        return time.monotonic() - start

    def take(self) -> tuple[float, float]:
        """Collective: this rank's memory, when the engines have given theirs back. Returns the seconds of waiting and of copying."""
        waited, start = self.wait(), time.monotonic()
        if self.shared and not self._held:
            self.memory.take()
            self._held = True
        return waited, time.monotonic() - start

    def give(self) -> float:
        """Collective: free the memory of all ranks; the engines may have it with the next version. Returns the seconds."""
        start = time.monotonic()
        if self.shared and self._held:
            self.memory.release()
            self._held = False
            dist.barrier()
        return time.monotonic() - start

    def given_back(self) -> bool:
        """Leader, at each look for groups: the engines' turn has ended, and what they made is not enough (a group was damaged, or too stale). Then they need
        another one: a new version."""
        self._looks = self._looks + 1 if self.shared and all_released(self._run, self._store) else 0
        if self._looks < LOOKS:
            return False
        self._looks = 0
        return True
