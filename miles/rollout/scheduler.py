"""The rollout schedule as a pure state machine: events in, actions out. No process, no file, and no clock but what `expire` is told.

Events are method calls (`engine_up`, `finished`, ...); `actions()` then returns what to do now and assumes that it is done. Every
decision of the rollout side is here:

- a slot is refilled the moment one trajectory ends (or, with refill = "group", when room for a whole group is free);
- a new trajectory goes to the living engine with the fewest active ones; one that a killed process began goes to the rank that has its first turns; an
  engine of a pool brings slots of its own, and has no more than these;
- a new sample goes only to an engine with which it may still be trained: in synchronous mode one of the newest version, otherwise one that is at most
  `max_staleness` versions behind it. So what is refused to an older one would have been dropped, and it gets work again when it has caught up;
- a synchronous batch is begun when the run's engines serve the newest version, or without those that have been behind for too long; pools are not waited for;
- a new group is opened only when no sample of an open group waits, the buffer has room, and the run still needs groups;
- after a restart nothing is given out before every rank has said which samples it holds the first turns of, or a bound is over;
- a failed sample is tried again a bounded number of times; then its group closes short, or is dropped when fewer than `min_samples` are left;
- a sample without an answer for too long has failed. Its rank, and one that says nothing at all, gets no new samples until it speaks again.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from miles.buffer.state import BufferState, GroupInfo, Status

Sample = tuple[int, int]  # (group id, sample number)


@dataclass(frozen=True)
class Start:
    """Journal that a group is open."""

    group_id: int
    task_id: str
    retry_of: int | None


@dataclass(frozen=True)
class Assign:
    """Run one trajectory on a rank's engine. `held_by`: the rank that has its first turns on disk."""

    group_id: int
    sample: int
    task_id: str
    rank: int
    held_by: int | None = None


@dataclass(frozen=True)
class Seal:
    """All samples that will come are there: seal the group."""

    group_id: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Drop:
    """A group of which too little is left."""

    group_id: int
    reason: str


@dataclass(frozen=True)
class Release:
    """What the rank has on disk of a sample is of no use any more: the sample has ended, or is played from its beginning."""

    group_id: int
    sample: int
    rank: int


Action = Start | Assign | Seal | Drop | Release


@dataclass(frozen=True)
class Rules:
    """The numbers of the config that the schedule obeys."""

    in_flight: int
    group_size: int
    capacity_groups: int
    total_groups: int  # groups the whole run trains
    retries: int = 2
    min_samples: int = 2  # of a group that is trained
    refill: str = "trajectory"
    groups_per_version: int | None = None  # synchronous mode: groups made with one version; None = asynchronous
    max_staleness: int = 4  # versions; asynchronous mode
    behind_s: float = math.inf  # for this long a synchronous batch waits for an engine of the run that lives and serves an older version
    retry_stale: bool = False
    retry_filtered: bool = False
    ordered: bool = False  # groups are trained in the order of their prompts
    seed: int = 0
    sample_s: float = math.inf  # a sample without an answer for this long is overdue
    held_s: float = math.inf  # for this long ranks are waited for that have not said what they hold
    silent_s: float = math.inf  # an engine of the run of which nothing was heard for this long gets no new samples


@dataclass(frozen=True)
class Overdue:
    """A sample that its rank has not answered in time."""

    group_id: int
    sample: int
    task_id: str
    rank: int


OVERDUE = "retried:overdue"


@dataclass
class _Open:
    """A group whose samples are not all there yet."""

    task_id: str
    done: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)  # sample -> cause
    tries: dict[int, int] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)  # sample -> rank with which it was overdue last


@dataclass
class _Run:
    """A sample that runs."""

    player: int  # the rank that it was given to, whose answer counts
    engine: int  # the rank whose engine serves it
    overdue_at: float


class Scheduler:
    """Built from the journal (`BufferState`) and the parts on disk, so that a restart carries on: open groups come first."""

    def __init__(self, rules: Rules, tasks: Sequence[str], state: BufferState, parts: dict[int, list[int]] | None = None, holders: Collection[int] = ()):
        """`holders`: ranks that are going to say what they hold (`held`, then `told_held`)."""
        self.rules, self._tasks, self._state = rules, list(tasks), state
        self._open: dict[int, _Open] = {}
        self._waiting: deque[Sample] = deque()
        self._running: dict[Sample, _Run] = {}  # in the order in which they are overdue, since time only rises
        self._held: dict[Sample, tuple[int, int]] = {}  # waiting sample -> (turns on disk, rank that has them)
        self._copies: dict[Sample, set[int]] = {}  # sample that has not ended -> ranks that have turns of it
        self._released: list[Release] = []
        self._active: Counter[int] = Counter()  # rank -> how many of them
        self._by_load: list[tuple[int, int]] = []  # heap of (active, rank); an entry that is no longer true is passed over
        self._complete: list[int] = []  # open groups of which every sample has ended
        self._sealed: set[int] = set()  # sealed by an action, not yet ready in the journal
        self._engines: dict[int, int] = {}  # living rank -> version it serves
        self._slots: dict[int, int] = {}  # rank of a pool -> most trajectories it may have at once
        self._now = 0.0
        self._heard: dict[int, float] = {}  # living rank of the run -> when its engine was last said to live, the most silent first
        self._newest_version = -1
        self._behind: dict[int, float] = {}  # living rank whose engine is too old to be given work -> since when
        self._over = -1  # the version whose turn on shared GPUs has ended
        self._next_id = state.next_group_id()
        self._cursor = sum(1 for g in state.groups.values() if g.retry_of is None)
        self._pass: tuple[int, list[str]] = -1, []  # (number, order of the tasks) of the newest pass: to shuffle 100,000 tasks takes a sixth of a second
        for g in sorted(state.with_status(Status.OPEN), key=lambda g: g.group_id):
            self._open[g.group_id] = _Open(g.task_id, done=set((parts or {}).get(g.group_id, ())))
            self._waiting.extend((g.group_id, s) for s in range(rules.group_size) if s not in self._open[g.group_id].done)
            self._note_complete(g.group_id)
        self._holders = set(holders) if self._waiting else set()

    # -- events --------------------------------------------------------------------------------------------------------------
    def engine_up(self, rank: int, version: int, slots: int | None = None) -> None:
        """The rank's engine serves `version` and may be given work. `slots`: of a pool's rank, always the same: it may have so many at once, besides what
        the run's own engines have."""
        if slots is not None:
            self._slots[rank] = slots
        else:
            if version != self._engines.get(rank):
                self._load(rank, 0)
            self._heard.pop(rank, None)
            self._heard[rank] = self._now
        self._engines[rank] = version
        if self._may_sample(rank):
            self._behind.pop(rank, None)
        else:
            self._behind.setdefault(rank, self._now)
        self.version_published(version)

    def held(self, rank: int, group_id: int, sample: int, turns: int) -> bool:
        """A process of this rank was killed while it played the sample, and that many turns are on disk. Whether they are of use."""
        if (group_id, sample) not in self._waiting:
            return False
        self._held[group_id, sample] = max((turns, rank), self._held.get((group_id, sample), (0, rank)))
        self._copies.setdefault((group_id, sample), set()).add(rank)
        return True

    def told_held(self, rank: int) -> None:
        """The rank has said all that it holds."""
        self._holders.discard(rank)

    def engine_down(self, rank: int) -> None:
        """No new work for this rank. Its running samples go on with another engine (`moved`), or report their own failure."""
        self._engines.pop(rank, None)
        self._heard.pop(rank, None)
        self._behind.pop(rank, None)

    def moved(self, group_id: int, sample: int, rank: int, by: int | None = None) -> None:
        """A running sample, whose own engine died, is served by that of `rank` now. `by`: as of `finished`."""
        if (run := self._run(group_id, sample, by)) is not None:
            self._load(run.engine, -1)
            self._load(rank, +1)
            run.engine = rank

    def adopt(self, group_id: int, sample: int, rank: int, slots: int) -> bool:
        """A sample that waits here was given to a pool's rank by an earlier leader. False: it does not wait, it has ended or runs elsewhere."""
        if (group_id, sample) not in self._waiting:
            return False
        self._slots[rank] = slots
        self._waiting.remove((group_id, sample))
        self._begin((group_id, sample), rank)
        return True

    def released(self, group_id: int, sample: int, rank: int) -> bool:
        """A running sample that `rank` played was given up with its pool, through no fault of its own: it is the next to be started, and that counts as no
        retry. The turns that it had are on disk. False: it does not play it any more."""
        if (run := self._run(group_id, sample, rank)) is None:
            return False
        del self._running[group_id, sample]
        self._load(run.engine, -1)
        if group_id in self._open:
            self._waiting.appendleft((group_id, sample))
            self._held[group_id, sample] = (0, rank)  # newer than any other; its ranks, started again, say what they hold
        return True

    def version_published(self, version: int) -> None:
        if version > self._newest_version:
            self._newest_version = version
            for rank in self._engines:
                if not self._may_sample(rank):
                    self._behind.setdefault(rank, self._now)

    def finished(self, group_id: int, sample: int, cause: str | None = None, by: int | None = None) -> None:
        """A trajectory's part is on disk (`cause` None), or the trajectory failed for `cause`. `by`: the rank that says so; of one that does not play the
        sample any more it is not heard: the sample was overdue, and who has it now answers for it. None: whoever plays it."""
        if (run := self._run(group_id, sample, by)) is None:
            return
        del self._running[group_id, sample]
        self._load(run.engine, -1)
        # Not before: who plays the sample may still be reading them.
        self._released += [Release(group_id, sample, rank) for rank in sorted(self._copies.pop((group_id, sample), ()))]
        group = self._open.get(group_id)
        if group is None:
            return
        if cause is None:
            group.done.add(sample)
        else:
            group.tries[sample] = group.tries.get(sample, 0) + 1
            if group.tries[sample] <= self.rules.retries:
                self._waiting.appendleft((group_id, sample))
            else:
                group.lost[sample] = cause
        self._note_complete(group_id)

    def expire(self, now: float) -> list[Overdue]:
        """It is `now` (seconds of any clock that only rises): samples without an answer for `sample_s` have failed. What the ranks that were given them say of
        them from now on is not heard, and a part that comes late is one more of the same sample, or of a closed group. Call it every second or so."""
        self._now = now
        if now >= self.rules.held_s:
            self._holders.clear()
        for rank, _ in list(takewhile(lambda heard: now - heard[1] >= self.rules.silent_s, self._heard.items())):
            self.engine_down(rank)
        overdue = takewhile(lambda item: now >= item[1].overdue_at, self._running.items())
        late = [Overdue(group_id, sample, self._open[group_id].task_id, run.player) for (group_id, sample), run in overdue]
        for o in late:
            self.engine_down(o.rank)
            self._open[o.group_id].late[o.sample] = o.rank
            self.finished(o.group_id, o.sample, OVERDUE)
        return late

    def end_turn(self) -> None:
        """Shared GPUs: nothing more is started with the newest version, whatever is missing (the job is about to end)."""
        self._over = self._newest_version

    # -- decisions -----------------------------------------------------------------------------------------------------------
    def turn_over(self) -> int:
        """Shared GPUs: the newest version with which nothing is left to do: its batch is complete, or the run needs no more groups. Once said it stays so."""
        if not self._running and not self._open and not self._unjournalled() and not self._room(self._to_retry()):
            self.end_turn()
        return self._over

    def actions(self) -> list[Action]:
        """What to do now. The journal state given at construction is read afresh, so poll it before."""
        released, self._released = self._released, []
        return [*released, *self._closings(), *self._starts_and_assignments()]

    def _closings(self) -> Iterable[Action]:
        complete, self._complete = self._complete, []
        for group_id in complete:
            group = self._open.pop(group_id)
            if len(group.done) >= self.rules.min_samples:
                self._sealed.add(group_id)
                yield Seal(group_id, tuple(sorted(group.done)))
            else:
                yield Drop(group_id, next(iter(group.lost.values())))

    def _note_complete(self, group_id: int) -> None:
        group = self._open[group_id]
        if len(group.done) + len(group.lost) == self.rules.group_size and group_id not in self._complete:
            self._complete.append(group_id)

    def _starts_and_assignments(self) -> Iterable[Action]:
        if self._holders:  # a sample that is given to another rank now would lose the turns that they have
            return
        while self._newest_version > self._over and self._next_rank() is not None:
            if not self._waiting:
                start = self._next_start()
                if start is None:
                    return
                yield start
            group_id, sample = self._waiting.popleft()
            _, held_by = self._held.pop((group_id, sample), (0, None))
            rank = self._rank_for((group_id, sample), held_by)
            self._begin((group_id, sample), rank)
            yield Assign(group_id, sample, self._open[group_id].task_id, rank, held_by)

    def _next_start(self) -> Start | None:
        again = self._to_retry()
        if not self._may_start(again):
            return None
        group_id, retry_of = self._next_id, None
        if again is not None:
            retry_of, task_id = again.group_id, again.task_id
            again.retried = True
        else:
            task_id = self.task_at(self._cursor)
            self._cursor += 1
        self._next_id += 1
        self._open[group_id] = _Open(task_id)
        self._waiting.extend((group_id, s) for s in range(self.rules.group_size))
        return Start(group_id, task_id, retry_of)

    def _may_start(self, again: GroupInfo | None) -> bool:
        if self.rules.refill == "group" and self._free_slots() < self.rules.group_size:
            return False
        return not (self.rules.groups_per_version is not None and self._awaits_engines()) and self._room(again)

    def _awaits_engines(self) -> bool:
        """Whether an engine of the run may soon serve the newest version: one that has been behind for too long is waited for again when it has caught up."""
        return any(self._now - since < self.rules.behind_s for rank, since in self._behind.items() if rank not in self._slots)

    def _may_sample(self, rank: int) -> bool:
        """Whether it lives, and what its engine samples now may be trained."""
        allowed = self.rules.max_staleness if self.rules.groups_per_version is None else 0
        return rank in self._engines and self._newest_version - self._engines[rank] <= allowed

    def _room(self, again: GroupInfo | None) -> bool:
        """Whether one more group is wanted. Synchronous: one batch; what the trainer has taken and not dropped is a part of it."""
        c = self._state.counts()
        open_groups = len(self._open) + self._unjournalled()
        if c["trained"] + c["taken"] + c["ready"] + open_groups >= self.rules.total_groups:
            return False
        if self.rules.ordered and again is not None:  # groups that are ready wait for it: no room is made before it is there
            return True
        if self.rules.groups_per_version is not None:
            return c["taken"] + c["ready"] + open_groups < self.rules.groups_per_version
        return c["ready"] + open_groups < self.rules.capacity_groups

    def _unjournalled(self) -> int:
        """Groups that an action sealed and that the journal does not have yet."""
        self._sealed = {g for g in self._sealed if g not in self._state.groups or self._state.groups[g].status is Status.OPEN}
        return len(self._sealed)

    def _to_retry(self) -> GroupInfo | None:
        """The dropped group whose prompt is sampled again next, if any."""
        stale = self._state.to_retry("stale") if self.rules.retry_stale else None
        return stale or (self._state.to_retry("filter") if self.rules.retry_filtered else None)

    def _rank_for(self, sample: Sample, held_by: int | None) -> int:
        """The rank that a sample goes to, where `_next_rank` has one: that which has its turns, or the emptiest, but another than it was overdue with."""
        if held_by is not None and self._may_have_more(held_by):
            return held_by
        rank, late = self._next_rank(), self._open[sample[0]].late.get(sample[1])
        others = [r for r in self._engines if r != late and self._may_have_more(r)] if rank == late else []
        return min(others, key=lambda r: (self._active[r], r), default=rank)

    def _begin(self, sample: Sample, rank: int) -> None:
        self._running[sample] = _Run(rank, rank, self._now + self.rules.sample_s)
        self._load(rank, +1)

    def _run(self, group_id: int, sample: int, player: int | None) -> _Run | None:
        """A running sample, if this rank plays it (None: whichever does)."""
        run = self._running.get((group_id, sample))
        return run if run is not None and player in (None, run.player) else None

    def _next_rank(self) -> int | None:
        """The rank with the fewest active trajectories among those that may have one more, of equals the first."""
        free = [(self._active[rank], rank) for rank in self._slots if self._may_have_more(rank)]
        if self._own_running < self.rules.in_flight and (own := self._least_active()) is not None:
            free.append(own)
        return min(free)[1] if free else None

    def _may_have_more(self, rank: int) -> bool:
        return self._may_sample(rank) and (self._active[rank] < self._slots[rank] if rank in self._slots else self._own_running < self.rules.in_flight)

    def _least_active(self) -> tuple[int, int] | None:
        """(active, rank) of the run's own engine with the fewest active trajectories, of those that may sample."""
        if len(self._by_load) > 4 * len(self._engines) + 64:
            self._by_load = [(self._active[rank], rank) for rank in self._engines if rank not in self._slots]
            heapq.heapify(self._by_load)
        while self._by_load and (not self._may_sample((top := self._by_load[0])[1]) or top[0] != self._active[top[1]]):
            heapq.heappop(self._by_load)
        return self._by_load[0] if self._by_load else None

    def _load(self, rank: int, change: int) -> None:
        self._active[rank] += change
        if rank not in self._slots:
            heapq.heappush(self._by_load, (self._active[rank], rank))

    @property
    def _own_running(self) -> int:
        return len(self._running) - sum(self._active[rank] for rank in self._slots)

    def _free_slots(self) -> int:
        pools = sum(max(0, slots - self._active[rank]) for rank, slots in self._slots.items() if self._may_sample(rank))
        return self.rules.in_flight - self._own_running + pools

    def task_at(self, cursor: int) -> str:
        """The task of the `cursor`-th fresh group: each pass over the tasks is one seeded shuffle. A pure function of (seed, cursor)."""
        number, index = divmod(cursor, len(self._tasks))
        if self._pass[0] != number:
            order = list(self._tasks)
            random.Random(f"{self.rules.seed}/{number}").shuffle(order)
            self._pass = number, order
        return self._pass[1][index]

    def engines(self) -> dict[int, tuple[int, int]]:
        """Living rank -> (version its engine serves, trajectories on it)."""
        return {rank: (version, self._active[rank]) for rank, version in self._engines.items()}

    def behind(self) -> dict[int, tuple[int, float]]:
        """Living rank whose engine is too old to be given work -> (version it serves, seconds since when)."""
        return {rank: (self._engines[rank], self._now - since) for rank, since in self._behind.items()}

    # -- figures -------------------------------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def open_groups(self) -> int:
        return len(self._open)

    @property
    def blocked(self) -> bool:
        """Free slots that the buffer, the end of the run or synchronous mode keeps empty."""
        return self._next_rank() is not None and not self._waiting and not self._may_start(self._to_retry())
