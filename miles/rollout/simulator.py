"""The real schedule on a simulated cluster: virtual time, no process, no file.

Drives the very `Scheduler`, `BufferState` and choice of groups (`miles.buffer.choose`) that a run uses; only what takes time is a model:

- an engine gives each of its n running trajectories `speed(n)` of its work per second, and holds them for `pause_s` at each new version;
- a trajectory is an amount of work, in seconds at speed 1, drawn from `work`;
- a step takes `train_s`; its weights reach every engine `publish_s` later;
- from `frozen` on an engine's rank says nothing and what it runs never ends.

Use it to see what a schedule would do with more engines than there are, or other lengths, before asking for the nodes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from miles.buffer import BufferState, choose
from miles.rollout.scheduler import Assign, Drop, Rules, Scheduler, Seal, Start


@dataclass(frozen=True)
class Cluster:
    """What takes time. Seconds."""

    engines: int
    speed: Callable[[int], float]  # work per second and trajectory, of n that run together on one engine
    work: Callable[[random.Random], float]
    train_s: float
    publish_s: float
    pause_s: float = 0.0
    groups_per_step: int = 4
    frozen: Mapping[int, float] = field(default_factory=dict)  # rank -> from when on it answers nothing


@dataclass
class _Engine:
    """Trajectories in progress. `done` is the work that each trajectory which was there from the beginning would have got by `at`."""

    at: float = 0.0
    done: float = 0.0
    version: int = 0
    paused_until: float = 0.0
    running: list[tuple[float, int, tuple[int, int]]] = field(default_factory=list)  # heap of (done at which it ends, order, sample)
    event: int = 0  # only the newest planned end of an engine counts
    frozen: bool = False


@dataclass
class Outcome:
    """What happened, in virtual seconds."""

    step_ends: list[float] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)  # trajectories of each step
    in_flight: list[tuple[float, int]] = field(default_factory=list)  # (time, trajectories running from then on)
    last_start: float = 0.0  # when the last group was opened: from here on there is nothing to refill slots with
    stale_groups: int = 0
    overdue: int = 0  # samples
    staleness: list[int] = field(default_factory=list)  # of trained groups

    def per_minute(self, skip: int = 0) -> float:
        """Trained trajectories per minute, without the first `skip` steps: engines start empty."""
        start = self.step_ends[skip - 1] if skip else 0.0
        return 60 * sum(self.trained[skip:]) / (self.step_ends[-1] - start)

    def mean_in_flight(self, start: float, end: float) -> float:
        """Time average of running trajectories between two times."""
        total, (at, count) = 0.0, (0.0, 0)
        for time, n in [*self.in_flight, (end, 0)]:
            total += count * max(0.0, min(time, end) - max(at, start))
            at, count = time, n
        return total / (end - start)


class Simulation:
    """One run of `rules.total_groups` groups. `run()` once."""

    def __init__(self, rules: Rules, cluster: Cluster, tasks: int = 32):
        self._rules, self._cluster, self._rng = rules, cluster, random.Random(rules.seed)
        self._state = BufferState()
        self._scheduler = Scheduler(rules, [f"t{i}" for i in range(tasks)], self._state)
        self._engines = [_Engine() for _ in range(cluster.engines)]
        self._oldest: dict[tuple[int, int], int] = {}  # sample -> version of its engine when it began
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now, self._version, self._training = 0.0, 0, False
        self.outcome = Outcome()

    def run(self) -> Outcome:
        for rank in range(self._cluster.engines):
            self._scheduler.engine_up(rank, 0)
        for rank, seconds in self._cluster.frozen.items():
            self._after(seconds, lambda rank=rank: self._freeze(rank))
        steps = self._rules.total_groups // self._cluster.groups_per_step
        self._act()
        while len(self.outcome.step_ends) < steps:
            self._now, _, event = heapq.heappop(self._events)
            event()
            self._act()
        return self.outcome

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), event))

    # -- the rollout leader --------------------------------------------------------------------------------------------------
    def _act(self) -> None:
        self.outcome.overdue += len(self._scheduler.expire(self._now))
        while actions := self._scheduler.actions():
            for action in actions:
                match action:
                    case Start(group, task, retry_of):
                        self.outcome.last_start = self._now
                        self._state.apply({"kind": "start", "group": group, "task": task, "retry_of": retry_of})
                    case Assign(group, sample, _, rank):
                        self._begin(rank, (group, sample))
                    case Seal(group, samples):
                        self._state.apply({"kind": "ready", "group": group, "task": "", "trajectories": len(samples), "samples": len(samples), "tokens": 0,
                                           "reward_mean": 0.0, "oldest_version": min(self._oldest.pop((group, s)) for s in samples)})
                    case Drop(group, reason):
                        self._state.apply({"kind": "drop", "group": group, "reason": reason})
            self._train()
        self.outcome.in_flight.append((self._now, self._scheduler.in_flight))

    # -- engines -------------------------------------------------------------------------------------------------------------
    def _begin(self, rank: int, sample: tuple[int, int]) -> None:
        if math.isfinite(self._rules.sample_s):
            self._after(self._rules.sample_s, lambda: None)  # looks for what is overdue
        engine = self._advance(rank)
        self._oldest[sample] = engine.version
        heapq.heappush(engine.running, (engine.done + self._cluster.work(self._rng), next(self._order), sample))
        self._plan(rank)

    def _advance(self, rank: int) -> _Engine:
        """Credit the work since the engine was last looked at."""
        engine = self._engines[rank]
        seconds = max(0.0, self._now - max(engine.at, engine.paused_until))
        if engine.running and not engine.frozen:
            engine.done += seconds * self._cluster.speed(len(engine.running))
        engine.at = self._now
        return engine

    def _plan(self, rank: int) -> None:
        """Plan the end of the trajectory that ends first."""
        engine = self._engines[rank]
        engine.event += 1
        if engine.running and not engine.frozen:
            seconds = (engine.running[0][0] - engine.done) / self._cluster.speed(len(engine.running))
            self._after(max(0.0, engine.paused_until - self._now) + max(0.0, seconds), lambda event=engine.event: self._end(rank, event))

    def _end(self, rank: int, event: int) -> None:
        engine = self._engines[rank]
        if event != engine.event:
            return
        self._advance(rank)
        _, _, (group, sample) = heapq.heappop(engine.running)
        self._scheduler.finished(group, sample, by=rank)
        self._plan(rank)

    def _freeze(self, rank: int) -> None:
        self._advance(rank).frozen = True
        self._plan(rank)

    def _update(self, version: int) -> None:
        for rank in (r for r, e in enumerate(self._engines) if not e.frozen):
            engine = self._advance(rank)
            engine.version, engine.paused_until = version, self._now + self._cluster.pause_s
            self._scheduler.engine_up(rank, version)
            self._plan(rank)

    # -- the trainer ---------------------------------------------------------------------------------------------------------
    def _train(self) -> None:
        if self._training:
            return
        retried = ["stale"] if self._rules.retry_stale else []
        fresh, stale = choose(self._state, self._cluster.groups_per_step, self._version, self._rules.max_staleness, by_index=self._rules.ordered,
                              retried=retried)
        for g in stale:
            self._state.apply({"kind": "stale", "group": g.group_id})
        self.outcome.stale_groups += len(stale)
        if len(fresh) == self._cluster.groups_per_step:
            self.outcome.staleness += [self._state.staleness(self._version, g) for g in fresh]
            self._training = True
            step, groups = len(self.outcome.step_ends) + 1, [g.group_id for g in fresh]
            self._state.apply({"kind": "taken", "groups": groups, "step": step})
            self._after(self._cluster.train_s, lambda: self._trained(step, groups, sum(g.trajectories for g in fresh)))

    def _trained(self, step: int, groups: list[int], trajectories: int) -> None:
        self._state.apply({"kind": "trained", "groups": groups, "step": step})
        self.outcome.step_ends.append(self._now)
        self.outcome.trained.append(trajectories)
        self._version, self._training = self._version + 1, False
        self._scheduler.version_published(self._version)
        self._after(self._cluster.publish_s, lambda version=self._version: self._update(version))
        self._train()
