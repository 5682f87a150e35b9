"""Rank 0 of the rollout world: reads the schedule's actions and carries them out.

    loop:  poll journals  ->  scheduler.expire()  ->  scheduler.actions()  ->  journal / seal / assign  ->  log the queue

All messages are small: assignments go out, endings and engine states come in. Trajectories never pass through here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from miles.buffer import BufferView, BufferWriter, Status
from miles.comm import Link, World
from miles.config import MilesConfig
from miles.core import Role
from miles.core.at_work import at_work
from miles.log import RunLog
from miles.rollout.pools import Pools
from miles.rollout.scheduler import OVERDUE, Assign, Drop, Release, Rules, Scheduler, Seal, Start
from miles.rollout.worker import log_lost
from miles.rundir import POOL_RANKS, RunDir

LOOK_S = 1.0  # how often files are looked at without a wake-up
LOADS_S = 5.0  # how often all ranks are told how busy the engines are
SILENT_S = 60.0  # ranks say that their engine lives every second, but for the time that a new version takes them
HELD_S = 60.0  # ranks say what they hold as soon as they have read their session file, before they start their engine
SLACK_S = 300.0  # what a sample may take beside its turns and its tests: a sandbox that is made, a slow disk


def rules_from_config(c: MilesConfig, tests_s: float) -> Rules:
    """`tests_s`: the longest limit of a task's tests, seconds."""
    return Rules(
        in_flight=c.rollout.in_flight, group_size=c.rollout.group_size, capacity_groups=c.buffer.capacity_groups,
        total_groups=c.run.steps * c.trainer.groups_per_step, retries=c.rollout.retries, min_samples=c.rollout.min_samples, refill=c.rollout.refill,
        groups_per_version=c.trainer.groups_per_step if c.run.mode == "sync" else None, max_staleness=c.buffer.max_staleness,
        behind_s=c.weights.ack_timeout_s,
        retry_stale=c.buffer.on_stale == "retry", retry_filtered=c.buffer.on_filtered == "retry", ordered=c.buffer.order == "index", seed=c.run.seed,
        sample_s=c.rollout.deadline_s + c.tasks.command_timeout_s + tests_s + SLACK_S, silent_s=SILENT_S, held_s=HELD_S,
    )


class Leader:
    """Owns the scheduler, the rollout journal and the link to the trainer."""

    def __init__(self, run: RunDir, epoch: int, world: World, log: RunLog, tasks: dict[str, float], newest_version: Callable[[], int | None]):
        """`tasks`: name -> limit of its tests, seconds."""
        self._run, self._world, self._log, self._newest_version = run, world, log, newest_version
        self._view = BufferView(run)
        self._view.poll()
        self._writer = BufferWriter(run, epoch)
        self._view.own(self._writer.journal)
        parts = self._writer.finished_parts([g.group_id for g in self._view.state.with_status(Status.OPEN)])
        self._scheduler = Scheduler(rules_from_config(run.config, max(tasks.values())), list(tasks), self._view.state, parts, holders=range(world.size))
        self._pools = Pools(run, epoch, self._scheduler, self._writer, log)
        self._link = Link(run, Role.ROLLOUT, epoch)
        self._looked = self._logged = 0.0
        self._ticked, self._listened = time.monotonic(), 0.0
        self._version = -1  # newest published
        self._shared, self._over = run.config.cluster.placement == "shared", -1
        self._urls: dict[int, str] = {}  # rank -> its living engine
        self._told: dict[int, str] = {}
        self._told_at = 0.0
        self._said_behind: set[int] = set()  # ranks

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """One message of a worker (the leader's own worker included)."""
        match message["kind"]:
            case "up":
                self._scheduler.engine_up(rank, message["version"])
                for group, sample, engine in message["moved"]:
                    self._scheduler.moved(group, sample, engine, by=rank)
                self._urls[rank] = message["url"]
            case "held":
                useless = [(group, sample) for group, sample, turns in message["samples"] if not self._scheduler.held(rank, group, sample, turns)]
                if useless:
                    self._world.post(rank, {"kind": "release", "samples": useless})
                self._scheduler.told_held(rank)
            case "down":
                self._scheduler.engine_down(rank)
                self._urls.pop(rank, None)
            case "finished":
                if part := message.get("part"):
                    self._writer.told(message["group"], message["sample"], *part)
                self._scheduler.finished(message["group"], message["sample"], message["cause"], by=rank)

    async def tick(self) -> None:
        """One turn of the loop. Called every few milliseconds; cheap when nothing happened."""
        self._link.tick()
        if self._link.woken() or time.monotonic() - self._looked > LOOK_S:
            self._look()
        self._pools.tick()
        self._expire()
        for action in self._scheduler.actions():
            await self._carry_out(action)
        if self._shared and self._scheduler.turn_over() != self._over:
            self._tell_look()
        self._tell_engines()
        if time.monotonic() - self._logged > 1.0:
            self._log_queue()
            self._say_behind()

    def _expire(self) -> None:
        """A leader that was itself stopped, or waited for a file system, has not listened: that is not the silence of others."""
        now = time.monotonic()
        self._listened += min(now - self._ticked, 1.0)
        self._ticked = now
        for o in self._scheduler.expire(self._listened):
            print(f"g{o.group_id}s{o.sample} {o.task_id}: no answer from rank {o.rank} in {self._scheduler.rules.sample_s:.0f} s; it has failed there", flush=True)
            log_lost(self._log, o.group_id, o.sample, o.task_id, o.rank, OVERDUE)
            if o.rank >= POOL_RANKS:
                self._pools.give_up(o)

    def _look(self) -> None:
        self._looked = time.monotonic()
        newest = self._newest_version()
        self._view.poll()  # afterwards: on shared GPUs a version comes after the record that its groups are trained
        if newest is not None:
            self._version = newest
            self._scheduler.version_published(newest)
        self._tell_look()

    def _tell_look(self) -> None:
        """Every rank: is there a newer version, is the run finished, is the engines' turn on shared GPUs over?"""
        self._over = self._scheduler.turn_over() if self._shared else -1
        self._world.post_all({"kind": "look", "over": self._over})

    def end_turn(self) -> None:
        """The job is about to end: on shared GPUs the trainer needs their memory for its checkpoint."""
        if self._shared:
            self._scheduler.end_turn()

    def _tell_engines(self) -> None:
        """Every rank must know where its sessions can go when its own engine dies: which engines live, soon; how busy they are, now and then."""
        since = time.monotonic() - self._told_at
        if self._world.size > 1 and since > LOOK_S and (self._told != self._urls or since > LOADS_S):
            self._told, self._told_at = dict(self._urls), time.monotonic()
            table = {rank: {"url": self._urls[rank], "version": version, "active": active} for rank, (version, active) in self._scheduler.engines().items()
                     if rank in self._urls}
            self._world.post_all({"kind": "engines", "table": table})

    async def _carry_out(self, action) -> None:
        match action:
            case Start(group_id, task_id, retry_of):
                self._writer.start(group_id, task_id, retry_of)
            case Assign(group_id, sample, task_id, rank, held_by):
                post = self._world.post if rank < POOL_RANKS else self._pools.assign
                post(rank, {"kind": "assign", "group": group_id, "sample": sample, "task": task_id, "held_by": held_by})
                return
            case Release(group_id, sample, rank):
                post = self._world.post if rank < POOL_RANKS else self._pools.order
                post(rank, {"kind": "release", "samples": [(group_id, sample)]})
                return
            case Seal(group_id, samples):
                for sample in await asyncio.to_thread(at_work(f"sealing a group in {self._run.buffer_dir}")(self._writer.seal), group_id, list(samples)):
                    log_lost(self._log, group_id, sample, self._view.state.groups[group_id].task_id, -1, "dropped:part")
            case Drop(group_id, reason):
                self._writer.drop(group_id, reason)
        self._view.poll_own()
        if isinstance(action, Seal):
            self._link.wake()

    def _log_queue(self) -> None:
        self._logged = time.monotonic()
        c, ages = self._view.state.counts(), self._view.state.waiting_ages(self._version)
        self._log.row("queue", in_flight=self._scheduler.in_flight, open_groups=self._scheduler.open_groups, ready_groups=c["ready"],
                      taken_groups=c["taken"], trained_groups=c["trained"], dropped_groups=c["dropped"], blocked=int(self._scheduler.blocked),
                      waiting_age_mean=sum(ages) / len(ages) if ages else float("nan"), waiting_age_max=float(max(ages)) if ages else float("nan"),
                      behind_engines=len(self._scheduler.behind()))

    def _say_behind(self) -> None:
        """Once for each engine that does not take new versions: otherwise it would stand idle unseen."""
        limit = self._scheduler.rules.behind_s
        long = {rank: version for rank, (version, seconds) in self._scheduler.behind().items() if seconds >= limit}
        for rank in sorted(long.keys() - self._said_behind):
            print(f"rank {rank} gets no samples: its engine serves v{long[rank]}, v{self._version} is the newest, and it has been too old for work for "
                  f"{limit:.0f} s (weights.ack_timeout_s). It gets some when it has caught up; its log says what it waits for or refuses", flush=True)
        self._said_behind = set(long)

    def close(self) -> None:
        self._pools.close()
        self._writer.close()
