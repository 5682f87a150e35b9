"""From the buffer to this rank's sequences: the leader takes groups and plans, every rank reads only what it trains on.

One message per step goes from the leader to all ranks: which trajectories, their advantages, and the weight version being trained; or
that it is time to stop. The message says where each trajectory lies, and each rank reads there what it trains on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, repeat

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from miles.buffer import UNREADABLE, GroupInfo, GroupReader, Lineage, Sealed, Stored, TrainerQueue
from miles.comm import Link, World
from miles.config import MilesConfig
from miles.core import ConfigError, EnvironmentFault, Trajectory
from miles.rundir import RunDir
from miles.rundir.patience import patiently
from miles.trainer.algorithms import load_advantage, step_advantages
from miles.trainer.batching import BatchPlan, Sequence
from miles.trainer.step import TrainStep

LOOK_S = 1.0
IDLE_S = 0.005
MOST_UNREADABLE = 8
"""Groups in a row that are dropped because they are damaged or gone. More of them are no accident of single files."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory of a step: where it lies and what its group makes of its sample's reward."""

    stored: Stored
    length: int
    reward: float
    sampled_by: list[int]
    exact: bool
    routed: bool  # with routes of this model
    advantage: float = 0.0  # known when the step is complete

    @property
    def group(self) -> int:
        return self.stored.group

    @property
    def sample(self) -> int:
        """Which it is a leaf of."""
        return self.stored.place.sample


class Plan(msgspec.Struct, frozen=True):
    """The leader's message of one step. Instead of work: `stop` is a reason to end, `commit` asks to publish the checkpoint that is written,
    `republish` to gather and publish the weights again; `items` are then what was taken until now."""

    step: int
    version: int
    items: list[Item] = []
    wait_s: float = 0.0
    dropped_stale: int = 0
    stop: str = ""
    commit: bool = False
    republish: bool = False
    branches: list[tuple[int, int]] = []  # of the lineage of versions (miles.buffer.versions)

    @property
    def rollouts(self) -> dict[tuple[int, int], list[Item]]:
        """The leaves of each rollout, by (group, sample), in the order of the plan."""
        found: dict[tuple[int, int], list[Item]] = {}
        for i in self.items:
            found.setdefault((i.group, i.sample), []).append(i)
        return found


@dataclass(frozen=True)
class Batch:
    """What this rank trains on: its sequences in the order of `bins.of_rank(its data rank)`, and the plan they come from."""

    plan: Plan
    bins: BatchPlan
    sequences: list[Sequence]
    fetch_s: float

    @property
    def groups(self) -> list[int]:
        return sorted({i.group for i in self.plan.items})


class Feed:
    """`next` is collective. Only the leader has a queue and a link."""

    def __init__(self, run: RunDir, world: World, train_step: TrainStep, queue: TrainerQueue | None, link: Link | None,
                 stop_requested: Callable[[], str], checkpoint_written: Callable[[], bool], while_waiting: Callable[[], int],
                 late: Callable[[], bool], republish: Callable[[], None]):
        """`checkpoint_written`: the leader has written its part of a checkpoint that nobody published yet. `while_waiting` is called now and then while there is no batch; it returns the weight version being trained.
        `late`: the leader sees that only all ranks together can give an engine its weights; `republish` (collective) does it."""
        self._run, self._world, self._train_step = run, world, train_step
        self._queue, self._link = queue, link
        self._advantage = load_advantage(run.config.algorithm.advantage)
        self._stop_requested, self._checkpoint_written, self._while_waiting = stop_requested, checkpoint_written, while_waiting
        self._late, self._republish = late, republish
        self._reader = GroupReader(run.buffer_dir)
        self._unreadable = 0  # leader: groups in a row

    def next(self, step: int) -> Batch:
        """The batch of `step` (1-based). Waits for groups; returns a plan with `stop` set when a signal asks for the end, with `commit` set when a
        checkpoint can be published meanwhile.

        A group whose file does not verify on some rank is dropped and replaced before training starts. Raises EnvironmentFault: so it is with MOST_UNREADABLE
        in a row. UnreadableNow: a file cannot be read at the moment.
        """
        kept: list[Item] = []
        waited, stale = 0.0, 0
        while True:
            plan = self._plan(step, kept, waited, stale) if self._world.leader else None
            plan = msgspec.msgpack.decode(self._world.broadcast_bytes(msgspec.msgpack.encode(plan) if plan else None), type=Plan)
            if plan.stop or plan.commit:
                return Batch(plan, BatchPlan(()), [], 0.0)
            if plan.republish:
                self._republish()
                kept, waited, stale = plan.items, plan.wait_s, plan.dropped_stale
                continue
            start = time.monotonic()
            bins = self._train_step.plan([i.length for i in plan.items])
            sequences, bad = self._read(plan, bins)
            if not bad:
                self._unreadable = 0
                return Batch(plan, bins, sequences, time.monotonic() - start)
            if self._queue is not None:
                known = {i.group for i in kept}
                self._note_read({i.group: i.group in bad for i in plan.items if i.group not in known or i.group in bad})
                for group in bad:
                    self._queue.drop(group, "digest")
            kept, waited, stale = [i for i in plan.items if i.group not in bad], plan.wait_s, plan.dropped_stale

    def close(self) -> None:
        self._reader.close()

    # -- leader --------------------------------------------------------------------------------------------------------------
    def _plan(self, step: int, kept: list[Item], waited: float, stale: int) -> Plan:
        c: MilesConfig = self._run.config
        wanted = c.trainer.groups_per_step
        start, looked = time.monotonic(), 0.0
        taken: dict[int, list[Item]] = {}
        for item in kept:
            taken.setdefault(item.group, []).append(item)
        version = self._while_waiting()
        while len(taken) < wanted:
            if reason := self._stop_requested():
                return Plan(step, version, stop=reason)
            if not taken and self._checkpoint_written():
                return Plan(step, version, commit=True)
            self._link.tick()
            if self._link.woken() or time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self._queue.poll()
                version = self._while_waiting()
                if self._late():
                    return Plan(step, version, [i for items in taken.values() for i in items], waited + time.monotonic() - start, stale, republish=True)
                if old := self._queue.recheck(taken, version, step):  # the version rises while a step waits, too
                    stale, taken = stale + len(old), {group: items for group, items in taken.items() if group not in old}
                    self._link.wake()
                got = self._queue.take(wanted - len(taken), version, step)
                if got is not None:
                    stale += len(got.stale)
                    found = {g.group_id: self._items_or_drop(g) for g in got.groups}
                    taken |= {group: items for group, items in found.items() if items}
                    looked = looked if all(found.values()) else 0.0  # what was dropped is replaced at once by what waits
                    if got.stale:
                        self._link.wake()
            if len(taken) < wanted:
                time.sleep(IDLE_S)
        self._link.wake()  # the buffer has room again
        items = [i for items in taken.values() for i in items]
        return Plan(step, version, self._with_advantages(items), waited + time.monotonic() - start, stale, branches=self._queue.state.lineage.branches)

    def _items_or_drop(self, group: GroupInfo) -> list[Item]:
        """Items of a group; none when its sealed record is gone or damaged: then it is dropped, and another takes its place."""
        try:
            sealed = patiently(lambda: self._reader.sealed(group.sealed), f"group {group.group_id}")
        except UNREADABLE as e:
            reason = "missing" if isinstance(e, FileNotFoundError) else "digest"
            print(f"group {group.group_id} is dropped as {reason}: {e}", flush=True)
            self._note_read({group.group_id: True})
            self._queue.drop(group.group_id, reason)
            return []
        return self._items(sealed)

    def _note_read(self, found: dict[int, bool]) -> None:
        """Count groups that were read or not (True), in this order."""
        for group, bad in found.items():
            self._unreadable = self._unreadable + 1 if bad else 0
            if self._unreadable == MOST_UNREADABLE:
                raise EnvironmentFault(
                    f"{MOST_UNREADABLE} groups in a row are damaged or gone, the last is group {group}", f"whole files in {self._run.buffer_dir}",
                    "the output of the rank says which files and why: look for what removes or changes files there, and at the mount of the node; "
                    "then `miles-submit resume` the run: the last of the groups were not dropped")

    def _items(self, sealed: Sealed) -> list[Item]:
        """Raises ConfigError: a trajectory without the routes that replay needs. No restart mends that, and the next group would be no better."""
        expected, out = self._train_step.routes_shape, []
        for stored, s in zip(sealed.trajectories, sealed.summaries, strict=True):
            found = s["routes_shape"]
            routed = expected is not None and found is not None and tuple(found) == expected
            if self._train_step.routing_replay and not routed:
                raise ConfigError(f"group {sealed.group}: routes of shape {found} [MoE layers, experts per token]", f"{list(expected)} for this model",
                                  "record routes in the engine, or set trainer.routing_replay = false")
            out.append(Item(stored, s["length"], s["reward"], s["sampled_by"], s["exact"], routed))
        return out

    def _with_advantages(self, items: list[Item]) -> list[Item]:
        found = step_advantages([i.reward for i in items], [i.group for i in items], [i.sample for i in items], self._advantage)
        return [msgspec.structs.replace(i, advantage=a) for i, a in zip(items, found.tolist(), strict=True)]

    # -- every rank ----------------------------------------------------------------------------------------------------------
    def _read(self, plan: Plan, bins: BatchPlan) -> tuple[list[Sequence], set[int]]:
        """This rank's sequences, and the groups that any rank found damaged."""
        sequences, mine = self._sequences(plan, [plan.items[i] for i in bins.of_rank(self._train_step.data_rank)])
        groups = sorted({i.group for i in plan.items})
        flags = torch.tensor([g in mine for g in groups], dtype=torch.int32)
        if torch.cuda.is_available():
            flags = flags.cuda()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return sequences, {g for g, bad in zip(groups, flags.tolist(), strict=True) if bad}

    def _sequences(self, plan: Plan, items: list[Item]) -> tuple[list[Sequence], set[int]]:
        """Those of `items` that can be read, in their order, with the routes of this pipeline stage's layers at the rows of this context-parallel rank, where
        all of the step have some; and the groups of the others."""
        layers, number = self._train_step.layers if all(i.routed for i in plan.items) else [], {key: n for n, key in enumerate(plan.rollouts)}
        sequences, bad, lineage = [], set(), Lineage(plan.branches)
        reads = self._reader.slices((i.stored for i in items), layers, self._train_step.held_rows)
        for item, read in zip(items, reads, strict=True):
            try:
                t, routes = self._again_if_failed(read, item, layers)
            except UNREADABLE as e:
                print(f"group {item.group} is dropped as digest, sample {item.sample}: {e}", flush=True)
                bad.add(item.group)
                continue
            sequences.append(Sequence(
                tokens=t.tokens, loss_mask=t.loss_mask, logprobs=t.logprobs, versions=lineage.counted_back(plan.version, t.versions), routes=routes if layers else None,
                advantage=item.advantage, exact=t.exact and not lineage.staleness(plan.version, item.sampled_by), rollout=number[item.group, item.sample]))
        return sequences, bad

    def _again_if_failed(self, read: Future, item: Item, layers: list[int]) -> tuple[Trajectory, np.ndarray | None]:
        """What was read; where that failed, with files opened anew (miles.buffer.files)."""
        tries = chain([read.result], repeat(lambda: self._reader.slice(item.stored, layers, self._train_step.held_rows)))
        return patiently(lambda: next(tries)(), f"group {item.group}, sample {item.sample}")
