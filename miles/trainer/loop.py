"""The training loop.

    while step < steps:
        batch    = take groups from the buffer            (waits; drops what is too stale; or stops on a signal)
        metrics  = forward, backward, optimizer step
        version  = publish the new weights to the engines (gathered and compared; written beside the next step)
        journal  the groups as trained
        checkpoint now and then, and before stopping      (a copy is taken; it is written beside the next steps)
        log      the step, once its version is there

A version that was begun is settled, and its error raised, before anything is said that needs it: the next version; the COMMIT of a checkpoint that names it;
the step in the log; the end of the run. The journal does not need it: killed before the version is there, a trainer goes on from its checkpoint, whatever the
journal says of later steps, and publishes that under the next number. No engine has seen what was not there.

On GPUs shared with the engines, publishing comes last: it gives them the GPUs, which each batch then waits for (miles.weights.turns).

Every rank runs this code; the leader alone touches journals, weight versions and the log.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import miles.platform
from miles.buffer import TrainerQueue, cut
from miles.comm import Link, World
from miles.config import load_site
from miles.core import Layout, Role
from miles.engine.command import DTYPES
from miles.engine.digest import combined_checksum, expected_checksums
from miles.log import RunLog
from miles.optim import check_folder, claim, folder_of, release
from miles.rundir import RunDir, remove_unfinished
from miles.trainer.checkpoints import Checkpoints
from miles.trainer.critic import Critic
from miles.trainer.distributed import close_distributed, init_distributed
from miles.trainer.feed import Batch, Feed
from miles.trainer.lora import describe_base
from miles.trainer.memory import DeviceMemory
from miles.trainer.model import build_model, build_optimizer
from miles.trainer.nonfinite import NonFinite
from miles.trainer.reference import ReferencePolicy, reference_folder
from miles.trainer.step import StepMetrics, TrainStep
from miles.trainer.turns import Turns
from miles.weights.choose import ways
from miles.weights.mapping import Replicas, export_hf
from miles.weights.p2p.filled import Filled
from miles.weights.p2p.send import Sender
from miles.weights.p2p.source import source_of
from miles.weights.patch import State
from miles.weights.precision.export import Export
from miles.weights.publish import Published, Publisher, there
from miles.weights.store import WeightStore

EXIT_REQUEUE = 75  # EX_TEMPFAIL: stopped on purpose with a checkpoint; start me again
TERM = "TERM"
LATE = "a late engine"


class Trainer:
    """One rank of the trainer. `run()` returns the exit code."""

    def __init__(self, run: RunDir, world: World, epoch: int, attempt: int):
        c = run.config
        lay = c.trainer.layout
        run.check_epoch(Role.TRAINER, epoch)  # before anything that a successor may have is touched
        self.dir, self.world, self.epoch, self.config = run, world, epoch, c
        self.layout = Layout(world.size, lay.tp, lay.pp, lay.cp, lay.ep, lay.etp)
        self.state_dir = self._state_dir()
        init_distributed(world.rank, self.layout, world.broadcast_bytes, seed=c.run.seed)
        self.turns = Turns(run, world)
        self.turns.wait()
        self.checkpoints = Checkpoints(run, world, epoch)
        newest = self.checkpoints.newest()
        how = {"precision": c.model.trainer_precision, "recompute": c.trainer.recompute, "stages": lay, "max_context": c.model.max_context, "load": newest is None}
        self.model = build_model(c.model.path, self.layout, routing_replay=c.trainer.routing_replay, mtp=c.trainer.mtp is not None, lora=c.trainer.lora, seed=c.run.seed, **how)
        self.frozen = describe_base(self.model.chunks, self.model.arch) if self.model.adapters is not None else None  # what the adapters go with
        self.optimizer = build_optimizer(self.model, c.trainer.optimizer, self.state_dir, c.trainer.mtp.lr if c.trainer.mtp else None)
        self.critic = None
        if c.algorithm.critic is not None:
            self.critic = Critic.build(self.model, c.model.path, c.trainer, c.algorithm, self.state_dir / "critic" if self.state_dir else None, **how)
        frontier = self.checkpoints.load(newest, self.model, self.optimizer, self.critic) if newest else None
        reference = ReferencePolicy(self.model, reference_folder(c)) if c.algorithm.kl_coefficient else None
        self.step = newest or 0
        if self.turns.shared:
            self.turns.memory = DeviceMemory.of((self.model, self.optimizer), *([(self.critic.model, self.critic.optimizer)] if self.critic else []),
                                                file=self.state_dir / "paused" if c.trainer.paused_state == "disk" else None)
        self.train_step = TrainStep(self.model, self.optimizer, c.trainer, c.algorithm, temperature=c.rollout.temperature,
                                    constant_tokens=c.rollout.max_session_tokens, reference=reference, critic=self.critic,
                                    nonfinite=NonFinite(run.attempt_dir(attempt) / "nonfinite", epoch))
        self._stop = ""
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "_stop", "USR2: time limit or preemption"))
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stop", TERM))
        self.queue = self.link = self.publisher = self.log = None
        self.publication: Future[Published] | None = None  # leader: the newest version, there or on its way
        self.unlogged: dict[str, Any] | None = None  # leader: row of the step that made it
        if world.leader:
            remove_unfinished(run.weights_dir)
            self.log = RunLog(run.log_path(attempt, Role.TRAINER, world.rank, epoch), role="trainer", rank=world.rank, attempt=attempt, epoch=epoch)
            store = WeightStore(run)
            self.queue = TrainerQueue(run, epoch, restored_step=self.step, frontier=frontier, newest=store.newest() or 0)
            self.link = Link(run, Role.TRAINER, epoch)
            self.publisher = Publisher(run, epoch, store, self.link.wake, self._engine_checksum, after=self.queue.newest,
                                       checksum_of=self._checksum_of(), adapters=self.frozen, adapters_before=frontier.adapters if frontier else None)
        self.replicas = Replicas(self.model.chunks, self.model.arch)
        self.quantize = Export.of(c, self.model.arch.family)
        self.sender = Sender(run, world, epoch, source_of(self.model.chunks, self.model.arch, c.model.path)) if "p2p" in ways(c) else None
        self.feed = Feed(run, world, self.train_step, self.queue, self.link, lambda: self._stop, lambda: self.checkpoints.written, self._serve_late, self._late,
                         lambda: self.publish(LATE))

    def run(self) -> int:
        self.publish()  # engines start from what this trainer holds, a checkpoint or the model folder
        while self.step < self.config.run.steps:
            start, began = time.time(), time.monotonic()
            batch = self.feed.next(self.step + 1)
            if batch.plan.commit or batch.plan.stop:
                self.settle_together()
            if batch.plan.commit:
                self.commit_checkpoint(wait=True)
                continue
            if batch.plan.stop:
                # Before the first step the model folder is the checkpoint. TERM ends the engines too, and nobody says that their memory is free.
                if self.step and not (self.turns.shared and batch.plan.stop == TERM):
                    self.turns.take()
                    self.checkpoint(due=True, wait=True)
                return self.close(EXIT_REQUEUE)
            turn_s, resume_s = self.turns.take()
            t0 = time.monotonic()
            metrics = self.train_step.run_planned(batch.bins, batch.sequences, number=self.step, version=batch.plan.version)
            t1 = time.monotonic()
            self.step += 1
            if not self.turns.shared:
                self.publish()
            t2 = time.monotonic()
            if self.queue is not None:
                self.queue.trained(batch.groups, batch.plan.version, self.step)
                self.link.wake()
            last = self.step == self.config.run.steps
            self.checkpoint(due=last or self.step % self.config.checkpoint.every_steps == 0, wait=last, published=not self.turns.shared)
            t3 = time.monotonic()
            if self.turns.shared:
                self.publish()
            times = {"time": time.time(), "start": start, "train_s": t1 - t0, "publish_s": t2 - t1 + time.monotonic() - t3 - self.release_s,
                     "checkpoint_s": t3 - t2, "turn_s": turn_s, "resume_s": resume_s, "release_s": self.release_s, "step_s": time.monotonic() - began}
            self.log_step(batch, metrics, times)
        self.settle_together()
        if self.world.leader:
            self.dir.finish(f"{self.step} steps\n")
            self.link.wake()
        return self.close(0)

    def _state_dir(self) -> Path | None:
        """This rank's folder for state on disk; checked before anything else takes its time."""
        o = self.config.trainer.optimizer
        if not self.config.trainer.on_disk:
            return None
        base = Path(o.state_dir or load_site(self.config.cluster.site).scratch)
        check_folder(base, network=o.state_on_network)
        return claim(folder_of(base, self.dir.path.name), self.epoch, self.world.rank)

    # -- parts ---------------------------------------------------------------------------------------------------------------
    def publish(self, note: str = "") -> None:
        """Collective: give the engines the new weights, straight from all ranks or gathered bucket by bucket on the leader (note: why, where it is not for how
        things are sent); and where GPUs are shared, these before they get them. The weights may change when this returns. Raises StructureError, before anybody
        sees them, when it is found that ranks which hold the same weights do not hold the same."""
        self.settle_together()
        self.replicas.check_now_and_then()
        if self.sender is not None and not note:
            start = time.monotonic()
            found = self.sender.fill(self.publisher.fillable() if self.publisher is not None else None)
            if isinstance(found, Filled):
                if self.publisher is not None:
                    self.publication = self.publisher.publish_filled(self.step, found, time.monotonic() - start)
                return
            note = found
        tensors = export_hf(self.model.chunks, self.model.arch, adapters=self.model.adapters is not None)
        if self.publisher is not None:
            self.publication = self.publisher.begin(self.step, self.quantize(tensors), gathered=self._give, note=note)
            return
        for _ in tensors:
            pass  # the others send their shares
        self._give()

    def settle(self, *, wait: bool = True) -> None:
        """Leader: when the newest version is there (`wait`: wait for it), log the step that made it. Raises what kept it from that."""
        if self.publication is None or not (wait or self.publication.done()):
            return
        published, row = there(self.publication), self.unlogged
        if row is not None:
            self.unlogged = None
            self.log.row("steps", **row, published_version=published.version, transport=published.transport, published_bytes=published.bytes,
                         published_s=published.seconds, note=published.note)

    def settle_together(self) -> None:
        """Collective: `settle`. The others wait for the leader here, as long as it takes: torch.distributed would give it up after its time limit."""
        self.settle()
        self.world.broadcast_bytes(b"" if self.world.leader else None)

    def _give(self) -> None:
        self.release_s = self.turns.give()

    def checkpoint(self, *, due: bool, wait: bool, published: bool = True) -> None:
        """Collective: go on with the checkpoint in progress; when one is `due`, start that of `self.step`: weights, optimizer, random state, and where
        this cuts through the buffer. With `wait` it is published when this returns. `published`: the weights have their version; else they get the next."""
        self.commit_checkpoint(wait=due)
        if due:
            frontier = None
            if self.queue is not None:
                frontier = cut(self.queue.state, self.step, self.publisher.version + (not published), self.epoch, self.dir.current_epoch(Role.ROLLOUT), self.frozen)
            self.checkpoints.begin(self.step, self.model, self.optimizer, self.critic, frontier)
        if wait:
            self.settle()
            self.commit_checkpoint(wait=True)

    def commit_checkpoint(self, *, wait: bool = False) -> None:
        """Collective: publish the checkpoint in progress when all of it is written; with `wait`, when that is so. The version that it names was settled
        before, if only because the next one was begun."""
        done = self.checkpoints.poll(wait=wait)
        if done is not None and self.queue is not None:
            self.queue.retire(up_to_step=done.oldest)
            self.log.row("checkpoints", committed_at=self.step, **asdict(done))

    def _checksum_of(self) -> dict[str, Any] | None:
        """How an engine's checksum follows from Hugging Face tensors (arguments of `expected_checksums`); None where SGLang's cannot be foretold
        (miles.engine.digest), and then it is not compared."""
        if miles.platform.current().name != "cpu" or self.config.model.rollout_precision not in DTYPES:
            return None
        return {"dtype": DTYPES[self.config.model.rollout_precision], "tied": self.model.arch.tied, "layers": self.model.arch.layers}

    def _engine_checksum(self, state: State) -> str:
        """What an engine's memory must sum to, or nothing."""
        how = self._checksum_of()
        return combined_checksum(expected_checksums(state, **how)) if how is not None else ""

    def _serve_late(self) -> int:
        """Leader, while it waits: log the last step when its version is there; send the weights again to an engine that came late, or whose batch has holes.
        Returns the version being trained."""
        self.settle(wait=False)
        self.publisher.serve_late()
        if self.turns.given_back():
            self.publisher.again("the batch is not complete")
        return self.publisher.version

    def _late(self) -> bool:
        """Leader: an engine waits for weights that nobody holds whole."""
        return not self.publisher.holds and self.publisher.late()

    def log_step(self, batch: Batch, metrics: StepMetrics, times: dict[str, float]) -> None:
        """Leader: the row of a step, which is logged when its version is there."""
        if self.log is None:
            return
        plan = batch.plan
        rollouts = plan.rollouts.values()  # a rollout counts once, whatever the number of its leaves
        rewards = np.array([leaves[0].reward for leaves in rollouts])
        lineage = self.queue.state.lineage
        ages = np.array([max(lineage.staleness(plan.version, i.sampled_by) for i in leaves) for leaves in rollouts])
        figures = asdict(metrics)
        for staleness, found in figures.pop("by_staleness"):
            self.log.row("truth", step=self.step, version=plan.version, staleness=staleness, **found._asdict())
        recorded = sum(self.queue.state.groups[g].tokens for g in batch.groups)
        self.unlogged = dict(
            step=self.step, version=plan.version, epoch=self.epoch, wait_s=plan.wait_s, fetch_s=batch.fetch_s, **times,
            groups=len(batch.groups), trajectories=len(rollouts), leaves=len(plan.items), reward_mean=rewards.mean(), reward_std=rewards.std(),
            reward_min=rewards.min(), reward_max=rewards.max(), staleness_mean=ages.mean(), staleness_max=int(ages.max()),
            queue_groups=len(self.queue.state.ready_in_order()), dropped_stale=plan.dropped_stale,
            unaccounted_tokens=abs(recorded - metrics.tokens), **figures)
        self.settle(wait=False)

    def close(self, code: int) -> int:
        dist.barrier()
        self.feed.close()
        if self.log is not None:
            self.publisher.settle()  # versions that are being removed are removed whole
            self.log.close()
        close_distributed()
        if self.state_dir is not None:
            release(self.state_dir)  # who goes on makes it anew
        return code
