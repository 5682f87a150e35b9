"""Checkpoints of a run: RUN/checkpoints/step_000040/, written beside its final name, COMMIT last, then renamed into place whole."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import torch.distributed as dist

from miles.comm import World
from miles.core import Role
from miles.rundir import RunDir, publish_dir, remove_tree
from miles.trainer.checkpoint import load_checkpoint, save_checkpoint


class Commit(msgspec.Struct, frozen=True):
    """COMMIT: what the checkpoint is. A folder without it is not a checkpoint."""

    step: int
    epoch: int
    time: float


class Checkpoints:
    """Collective methods are called by all ranks; the leader names folders and publishes them."""

    def __init__(self, run: RunDir, world: World):
        self._run, self._world, self._dir = run, world, run.checkpoints_dir

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, oldest first."""
        return sorted(int(p.name[5:]) for p in self._dir.glob("step_[0-9]*") if (p / "COMMIT").is_file())

    def newest(self) -> int | None:
        """Collective: the leader's answer, the same on every rank."""
        step = max(self.steps(), default=-1) if self._world.leader else -1
        step = msgspec.json.decode(self._world.broadcast_bytes(msgspec.json.encode(step) if self._world.leader else None))
        return step if step >= 0 else None

    def load(self, step: int, model, optimizer) -> int:
        """Collective: restore model, optimizer and random state. Returns the step."""
        load_checkpoint(self._path(step), model, optimizer)
        return step

    def save(self, step: int, model, optimizer, epoch: int) -> int:
        """Collective: write and publish the checkpoint of `step`, remove those beyond checkpoint.keep. Returns the oldest step kept.

        A step that has a checkpoint already (a stop right after one) is not written again.
        """
        if step not in self._agreed_steps():
            tmp = self._dir / f".step_{step:06d}.e{epoch:06d}.tmp"
            if self._world.leader:
                remove_tree(tmp)
                tmp.mkdir()
            dist.barrier()
            save_checkpoint(tmp, model, optimizer)
            dist.barrier()
            if self._world.leader:
                self._run.check_epoch(Role.TRAINER, epoch)
                (tmp / "COMMIT").write_bytes(msgspec.json.encode(Commit(step, epoch, time.time())))
                publish_dir(tmp, self._path(step))
        kept = self._agreed_steps()
        if self._world.leader:
            for old in kept[: -self._run.config.checkpoint.keep]:
                remove_tree(self._path(old))
        return min(kept[-self._run.config.checkpoint.keep:])

    def _agreed_steps(self) -> list[int]:
        data = self._world.broadcast_bytes(msgspec.json.encode(self.steps()) if self._world.leader else None)
        return msgspec.json.decode(data)

    def _path(self, step: int) -> Path:
        return self._dir / f"step_{step:06d}"
