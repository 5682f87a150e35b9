"""The pools of a run, seen by its rollout leader: finds them, gives their ranks work, and takes it back when they are gone.

    no pool ── out.log is there ──> joined: samples that it runs are adopted ── it writes more ──> living: its engines get work
                                      └────────── silent for rollout.pool_lease_s, or its epoch was raised ──────────┘
                                                                    │
                                 over: its finished parts are kept, the rest of its samples are started again, its epoch is raised

A pool that was only paused and writes on is thereby fenced: none of what it writes is looked at, so that of each sample one part is sealed, and it ends or joins
again under its next epoch. Whether it is alive is judged by its journal growing, on this process's monotonic clock.
"""

from __future__ import annotations

import os
import time
from itertools import count
from typing import Any

from miles.buffer import BufferWriter
from miles.core import EnvironmentFault, Role
from miles.log import RunLog
from miles.rollout.pool import BEAT_S, OUT, POLL_S, Assigned, in_name, read_state
from miles.rollout.scheduler import Overdue, Scheduler
from miles.rollout.worker import log_lost
from miles.rundir import POOL_RANKS, JournalWriter, PoolDir, RunDir

SCAN_S = 2.0  # how often the folder of pools is listed


class _Member:
    """One epoch of one pool."""

    def __init__(self, pool: PoolDir, epoch: int, leader: int):
        """Raises EnvironmentFault: a journal is damaged."""
        folder = pool.pool_epoch_dir(pool.pool, epoch)
        self.pool, self.epoch = pool, epoch
        self.state, self.out = read_state(folder)
        self.orders = JournalWriter(folder / in_name(leader))
        self.unwritten: list[dict[str, Any]] = [{"kind": "beat"}]
        self.living = False  # it has written since it was joined
        self.silent_s = 0.0  # seconds in which we looked and found nothing new
        self.beat_at = time.monotonic()


class Pools:
    """Feeds what pools say into the scheduler, and its assignments to them."""

    def __init__(self, run: RunDir, epoch: int, scheduler: Scheduler, writer: BufferWriter, log: RunLog):
        self._run, self._epoch, self._scheduler, self._writer, self._log = run, epoch, scheduler, writer, log
        self._members: dict[int, _Member] = {}
        self._numbers = count()
        self._scanned = self._polled = 0.0
        self.tick()  # before the first decision: what pools run already is not started again

    def assign(self, rank: int, message: dict[str, Any]) -> None:
        """Give a sample to a pool's rank. `message` is what a rank of the run itself would get."""
        member = self._members[rank // POOL_RANKS]
        record = {"kind": "assign", "number": f"{self._epoch}.{next(self._numbers)}", "rank": rank, "message": message}
        member.state.apply(record)
        member.unwritten.append(record)

    def order(self, rank: int, message: dict[str, Any]) -> None:
        """Tell a pool's rank something that it may miss: of a pool that is over nobody needs to know it."""
        if (member := self._members.get(rank // POOL_RANKS)) is not None:
            member.unwritten.append({"kind": "order", "rank": rank, "message": message})

    def give_up(self, late: Overdue) -> None:
        """A sample that a pool's rank has not answered in time is not its any more."""
        if (member := self._members.get(late.rank // POOL_RANKS)) is None:
            return
        for number in [n for n, a in member.state.running.items() if (a.group, a.sample, a.rank) == (late.group_id, late.sample, late.rank)]:
            record = {"kind": "over", "number": number}
            member.state.apply(record)
            member.unwritten.append(record)

    def tick(self) -> None:
        """Called every few milliseconds."""
        now = time.monotonic()
        if now - self._polled < POLL_S:
            return
        # A process that was stopped itself, or waited for a file system, has not listened: that is not the silence of others.
        listened, self._polled = min(now - self._polled, 1.0), now
        if now - self._scanned > SCAN_S:
            self._scanned = now
            self._scan()
        for member in list(self._members.values()):
            self._follow(member, listened)
        for member in self._members.values():
            self._write(member, now)

    def close(self) -> None:
        for member in self._members.values():
            member.orders.close()

    # -- joining and leaving -------------------------------------------------------------------------------------------------
    def _scan(self) -> None:
        for number in self._run.pools():
            epoch, member = self._run.pool_epoch(number), self._members.get(number)
            if member is not None and member.epoch < epoch:
                self._over(member, "its epoch was raised: its ranks were started again, or have ended")
                member = None
            if member is None and epoch and OUT in os.listdir(self._run.pool_epoch_dir(number, epoch)):
                self._join(PoolDir(self._run.path, number), epoch)

    def _join(self, pool: PoolDir, epoch: int) -> None:
        self._run.check_epoch(Role.ROLLOUT, self._epoch)
        try:
            member = _Member(pool, epoch, self._epoch)
        except EnvironmentFault as e:
            print(f"pool {pool.pool} of epoch {epoch} is refused: {e}", flush=True)
            pool.new_epoch()
            return
        self._members[pool.pool] = member
        self._writer.follow(pool.pool, epoch)  # after its journals were read: the part of a sample that they call finished is seen
        for a, record in member.state.done:
            if self._adopt(pool, a):
                self._told(a, record)
                self._scheduler.finished(a.group, a.sample, by=a.rank)
        adopted = [self._adopt(pool, a) for a in member.state.running.values()]
        self._hear_of_held(member)
        print(f"pool {pool.pool} joins with epoch {epoch}: {pool.config.cluster.rollout.ranks} ranks, {pool.facts.in_flight} in flight, "
              f"{sum(adopted)} samples under way", flush=True)

    def _adopt(self, pool: PoolDir, a: Assigned) -> bool:
        return self._scheduler.adopt(a.group, a.sample, a.rank, pool.slots(a.rank - pool.first_rank))

    def _over(self, member: _Member, why: str) -> None:
        """Its epoch ends before its parts are looked at for the last time, and before its samples are given to others."""
        pool = member.pool
        if pool.current_epoch(Role.ROLLOUT) == member.epoch:
            pool.new_epoch()
        del self._members[pool.pool]
        member.orders.close()
        for rank in member.state.engines:
            self._scheduler.engine_down(rank)
        self._writer.leave(pool.pool, member.epoch)
        lost = 0
        for a in member.state.running.values():
            if self._writer.has_part(a.group, a.sample):
                self._scheduler.finished(a.group, a.sample, by=a.rank)
            elif self._scheduler.released(a.group, a.sample, a.rank):
                lost += 1
                log_lost(self._log, a.group, a.sample, a.task, a.rank, "retried:pool")
        print(f"pool {pool.pool} of epoch {member.epoch} is over: {why}; {lost} samples are started again", flush=True)

    # -- a pool's journals ---------------------------------------------------------------------------------------------------
    def _follow(self, member: _Member, listened: float) -> None:
        try:
            records = member.out.poll()
        except EnvironmentFault as e:
            self._over(member, e.found)
            return
        if not records:
            member.silent_s += listened
            if member.silent_s > (lease := self._run.config.rollout.pool_lease_s):
                self._over(member, f"silent for {lease:.0f} s (rollout.pool_lease_s)")
            return
        member.silent_s = 0.0
        for record in records:
            ended = member.state.apply(record)
            if record["kind"] == "down":
                self._scheduler.engine_down(record["rank"])
            elif record["kind"] == "up" and member.living:
                self._up(member.pool, record)
            for a in ended:
                self._told(a, record)
                self._scheduler.finished(a.group, a.sample, record["cause"], by=a.rank)
        self._hear_of_held(member)
        if not member.living:
            member.living = True
            for record in member.state.engines.values():
                self._up(member.pool, record)

    def _told(self, a: Assigned, record: dict[str, Any]) -> None:
        if part := record.get("part"):
            self._writer.told(a.group, a.sample, *part)

    def _hear_of_held(self, member: _Member) -> None:
        """Trajectories that processes of the pool's ranks had begun when they were killed: the pool goes on with them, or lets them go."""
        for record in member.state.held:
            rank = record["rank"]
            useless = [(group, sample) for group, sample, turns in record["samples"] if not self._scheduler.held(rank, group, sample, turns)]
            if useless:
                self.order(rank, {"kind": "release", "samples": useless})
        member.state.held.clear()

    def _up(self, pool: PoolDir, record: dict[str, Any]) -> None:
        self._scheduler.engine_up(record["rank"], record["version"], pool.slots(record["rank"] - pool.first_rank))
        for group, sample, rank in record["moved"]:
            self._scheduler.moved(group, sample, rank, by=record["rank"])

    def _write(self, member: _Member, now: float) -> None:
        if now - member.beat_at > BEAT_S:
            member.unwritten.append({"kind": "beat"})
        if member.unwritten:
            self._run.check_epoch(Role.ROLLOUT, self._epoch)
            member.orders.append(*member.unwritten)
            member.unwritten, member.beat_at = [], now
