"""Rank 0 of a pool: carries messages between the pool's ranks and the journals of `miles.rollout.pool`. The run's leader makes all decisions.

Sessions of a pool move only within it when an engine dies: engines of the run may listen on a loopback address, and those of another pool may be preempted
at any time. So the table of engines, which a rank of the run has from its leader, is made here.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from miles.comm import World
from miles.core import Role
from miles.rollout.pool import BEAT_S, OUT, POLL_S, Inbox
from miles.rundir import JournalWriter, PoolDir

LOOK_S = 1.0  # how often ranks are told to look at the files, and which engines of the pool live


class PoolLeader:
    """What `Leader` is to the ranks of the run. Its epoch ends when the pool's supervisor, or the run's leader, raises it: then `tick` raises."""

    def __init__(self, pool: PoolDir, epoch: int, world: World):
        self._pool, self._epoch, self._world = pool, epoch, world
        pool.check_epoch(Role.ROLLOUT, epoch)
        folder = pool.pool_epoch_dir(pool.pool, epoch)
        self._out, self._inbox = JournalWriter(folder / OUT), Inbox(folder)
        self._records: list[dict[str, Any]] = []  # not written yet
        self._said: dict[int, tuple] = {}  # rank -> what its last `up` said
        self._running: dict[tuple[int, int], tuple[int, list[str]]] = {}  # (group, sample) -> rank, numbers of its assignments
        self._polled = self._beat_at = self._looked = 0.0
        self._heard = time.monotonic()  # when the run's leader last wrote
        self._stopped = False

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """One message of a rank (counted within the pool)."""
        rank += self._pool.first_rank
        match message["kind"]:
            case "up":
                said = (message["version"], message["url"], tuple(map(tuple, message["moved"])))
                if self._said.get(rank) == said:
                    return  # a rank repeats it every second
                self._said[rank] = said
                self._records.append({**message, "rank": rank})
            case "held" if message["samples"]:
                self._records.append({**message, "rank": rank})
            case "down":
                self._said.pop(rank, None)
                self._records.append({"kind": "down", "rank": rank})
            case "finished":
                sample = (message["group"], message["sample"])
                player, numbers = self._running.get(sample, (None, []))
                if player != rank:
                    return  # it was overdue
                del self._running[sample]
                self._records.append({"kind": "finished", "numbers": numbers, **{k: message[k] for k in ("cause", "part") if k in message}})

    async def tick(self) -> None:
        now = time.monotonic()
        if now - self._beat_at > BEAT_S:
            self._beat_at = now
            self._records.append({"kind": "beat"})
        if now - self._polled > POLL_S:
            self._polled = now
            self._take_orders(now)
            if self._records:
                self._pool.check_epoch(Role.ROLLOUT, self._epoch)
                self._out.append(*self._records)
                self._records.clear()
        if now - self._looked > LOOK_S:
            self._looked = now
            self._world.post_all({"kind": "look", "over": -1})
            self._tell_engines()

    def _take_orders(self, now: float) -> None:
        for record in self._inbox.poll():
            self._heard = now
            if record["kind"] == "assign":
                self._start(record)
            elif record["kind"] == "over":
                self._give_up(record["number"])
            elif record["kind"] == "order":
                self._world.post(record["rank"] - self._pool.first_rank, record["message"])
        wait = self._pool.config.rollout.pool_wait_s
        if now - self._heard > wait and not self._stopped:
            self._stopped = True
            print(f"no leader of the run has written for {wait:.0f} s (rollout.pool_wait_s): this pool ends", flush=True)
            self._world.post_all({"kind": "stop"})

    def _start(self, record: dict[str, Any]) -> None:
        message, rank = record["message"], record["rank"]
        sample = (message["group"], message["sample"])
        if sample in self._running:
            self._running[sample][1].append(record["number"])
            return
        self._running[sample] = (rank, [record["number"]])
        self._world.post(rank - self._pool.first_rank, message)

    def _give_up(self, number: str) -> None:
        """The sample may be given to any rank again. Its engine is announced anew when the rank, which may be frozen, says that it lives."""
        for sample, (rank, numbers) in list(self._running.items()):
            if number in numbers:
                numbers.remove(number)
                self._said.pop(rank, None)
                if not numbers:
                    del self._running[sample]

    def _tell_engines(self) -> None:
        if self._world.size > 1:
            active = Counter(rank for rank, _ in self._running.values())
            table = {rank: {"url": url, "version": version, "active": active[rank]} for rank, (version, url, _) in self._said.items()}
            self._world.post_all({"kind": "engines", "table": table})

    def close(self) -> None:
        self._out.close()
