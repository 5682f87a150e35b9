"""Checkpoints of a run: RUN/checkpoints/step_000040/, written beside its final name while training goes on, COMMIT last, then renamed into place whole.

    begin  ->  (steps of training; `poll` after each)  ->  every rank has written  ->  metadata, COMMIT, rename  ->  older ones go

COMMIT holds size and digest of every file. A checkpoint that does not match its COMMIT is set aside at a start as damaged_step_000040, and the one before
it is taken: so its step gets a whole one when training comes by again. One that cannot be read just now is not damaged: the rank ends, and its step starts again. With trainer.lora the folder is one that PEFT loads, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch.distributed as dist

from miles.buffer import Frontier
from miles.comm import World
from miles.core import EnvironmentFault, Role
from miles.rundir import RunDir, publish_dir, remove_tree, remove_unfinished
from miles.rundir.publish import explain_os_errors
from miles.rundir.patience import patiently
from miles.trainer.checkpoint import Saving, begin_checkpoint, describe_file, load_checkpoint
from miles.trainer.critic import Critic
from miles.weights.adapters import PEFT_FILES, write_peft
from miles.weights.mapping import export_hf, hf_names
from miles.weights.mapping.tables import parameters


class Commit(msgspec.Struct, frozen=True):
    """COMMIT: what the checkpoint is. A folder without it is not a checkpoint."""

    step: int
    epoch: int
    time: float
    files: dict[str, tuple[int, str]]  # name -> (bytes, xxh3-128), all but COMMIT


@dataclass(frozen=True)
class Committed:
    """A checkpoint that became one."""

    step: int
    oldest: int  # step of the oldest checkpoint that is kept
    copy_s: float  # seconds in which training stood still for it
    write_s: float  # seconds in which this rank wrote beside training
    bytes: int  # of all ranks


class Checkpoints:
    """Collective methods are called by all ranks; the leader names folders and publishes them."""

    def __init__(self, run: RunDir, world: World, epoch: int):
        self._run, self._world, self._epoch, self._dir = run, world, epoch, run.checkpoints_dir
        self._saving: Saving | None = None
        self._step, self._copy_s = 0, 0.0

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, oldest first."""
        return sorted(int(p.name[5:]) for p in self._dir.glob("step_[0-9]*") if (p / "COMMIT").is_file())

    def newest(self) -> int | None:
        """Collective: the step of the newest checkpoint that is whole, None when there is none yet; the same on every rank.

        Raises EnvironmentFault when there are checkpoints and none is whole.
        """
        if self._world.leader:
            self._run.check_epoch(Role.TRAINER, self._epoch)
            remove_unfinished(self._dir)
        steps = self._agreed_steps()
        passed_over = []
        for step in reversed(steps):
            damaged = self._damaged(step)
            if not damaged:
                if self._world.leader:
                    for other in passed_over:
                        self._set_aside(other)
                return step
            passed_over.append(step)
            if self._world.leader:
                print(f"checkpoint {self._path(step)} is passed over: {', '.join(damaged[:3])} differ from its COMMIT", flush=True)
        if steps:
            raise EnvironmentFault(f"none of the checkpoints of {self._dir} matches its COMMIT", "one whole checkpoint",
                                   "restore one of them from a copy; to begin anew, start a new run")
        return None

    def _set_aside(self, step: int) -> None:
        aside = self._dir / f"damaged_{self._path(step).name}"
        remove_tree(aside)  # of the same step, before
        self._path(step).rename(aside)

    def load(self, step: int, model, optimizer, critic: Critic | None) -> Frontier:
        """Collective: restore models, optimizers and random state. Returns what else was true at that step."""
        load_checkpoint(self._path(step), model, optimizer, critic)
        return msgspec.json.decode((self._path(step) / "frontier.json").read_bytes(), type=Frontier)

    def begin(self, step: int, model, optimizer, critic: Critic | None, frontier: Frontier | None) -> None:
        """Collective: start the checkpoint of `step`, unless it is there or being written already. None other may be in progress. `frontier`: the
        leader's."""
        if step in self._agreed_steps() or (self._saving is not None and self._step == step):
            return
        start, tmp = time.monotonic(), self._temporary(step)
        if self._world.leader:
            remove_tree(tmp)
            tmp.mkdir()
            (tmp / "frontier.json").write_bytes(msgspec.json.encode(frontier))
        if model.adapters is not None:
            adapters = dict(export_hf(model.chunks, model.arch, adapters=True))
            if self._world.leader:
                how = model.arch.adapters
                with explain_os_errors(self._path(step)):
                    write_peft(tmp, (hf_names(*of) for of in parameters(model.arch)), adapters, base=self._run.config.model.path, rank=how.rank, alpha=how.alpha)
        dist.barrier()
        self._saving, self._step = begin_checkpoint(tmp, model, optimizer, critic), step
        self._copy_s = time.monotonic() - start

    @property
    def written(self) -> bool:
        """This rank's part of a checkpoint in progress is written: `poll` may publish it."""
        return self._saving is not None and self._saving.done

    def poll(self, *, wait: bool = False) -> Committed | None:
        """Collective: publish the checkpoint in progress once every rank has written its part, and remove those beyond checkpoint.keep. None: there is
        none, or it is not written yet.

        Raises EnvironmentFault on all ranks when one could not write.
        """
        saving = self._saving
        if saving is None:
            return None
        if wait:
            saving.wait()
        ranks = [msgspec.json.decode(r) for r in self._world.gather_bytes(msgspec.json.encode((saving.done, saving.error)))]
        if errors := [error for _, error in ranks if error]:
            raise EnvironmentFault(f"checkpoint {saving.folder} could not be written: {errors[0]}", "a writable folder with enough space",
                                   "free space or choose another run root; the run goes on from the last complete checkpoint")
        if not all(done for done, _ in ranks):
            return None
        saving.finish()
        self._saving = None
        return self._commit(saving)

    def _commit(self, saving: Saving) -> Committed:
        files: dict[str, tuple[int, str]] = {}
        for mine in self._world.gather_bytes(msgspec.json.encode(saving.files)):
            files |= msgspec.json.decode(mine, type=dict[str, tuple[int, str]])
        if self._world.leader:
            self._run.check_epoch(Role.TRAINER, self._epoch)
            files |= {p.name: describe_file(p) for p in (saving.folder / name for name in ("frontier.json", *PEFT_FILES)) if p.exists()}
            (saving.folder / "COMMIT").write_bytes(msgspec.json.encode(Commit(self._step, self._epoch, time.time(), files)))
            publish_dir(saving.folder, self._path(self._step))
        kept = self._agreed_steps()
        if self._world.leader:
            for old in kept[: -self._run.config.checkpoint.keep]:
                remove_tree(self._path(old))
        oldest = min(kept[-self._run.config.checkpoint.keep:])
        return Committed(self._step, oldest, self._copy_s, saving.write_s, sum(size for size, _ in files.values()))

    def _damaged(self, step: int) -> list[str]:
        """Collective: files of a checkpoint that differ from its COMMIT, or are gone. Each rank reads some. Raises UnreadableNow: one cannot be read."""
        folder = self._path(step)
        data = patiently((folder / "COMMIT").read_bytes, str(folder))
        try:
            commit = msgspec.json.decode(data, type=Commit)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            files, bad = {}, ["COMMIT"]
        else:
            files, bad = commit.files, []
        for name in sorted(files)[self._world.rank::self._world.size]:
            try:
                found = patiently(partial(describe_file, folder / name), str(folder))
            except FileNotFoundError:
                found = None
            if found != files[name]:
                bad.append(name)
        return sorted({name for rank in self._world.gather_bytes(msgspec.json.encode(bad)) for name in msgspec.json.decode(rank)})

    def _agreed_steps(self) -> list[int]:
        data = self._world.broadcast_bytes(msgspec.json.encode(self.steps()) if self._world.leader else None)
        return msgspec.json.decode(data)

    def _path(self, step: int) -> Path:
        return self._dir / f"step_{step:06d}"

    def _temporary(self, step: int) -> Path:
        return self._dir / f".step_{step:06d}.e{self._epoch:06d}.tmp"
