"""Which engine a session talks to. All turns of a session go to one engine, whose prefix cache knows it, for as long as that engine lives.

A session is placed on the unit (an engine, with dp-attention one of its ranks) with the fewest sessions. When its engine dies it moves to another: the
prefix is computed anew there, the tokens stay as they are. A session whose engine lives never moves, so a new engine takes none of the old ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from miles.core import EnvironmentFault
from miles.engine import EngineClient

PROBE_S = 5.0  # an engine that does not say who it is within this time, after a broken connection, is taken for dead

HEALTH_S = 30.0  # and one that does not generate a token (paused: say who it is) within this time, after a turn that passed its deadline, hangs


@dataclass(eq=False)
class Engine:
    """One incarnation of a rank's engine: an engine that is started again is another one, with an empty cache."""

    rank: int
    client: EngineClient | None
    dp_ranks: int = 1
    alive: bool = True


class Place(NamedTuple):
    engine: Engine
    dp_rank: int | None = None  # None without dp-attention


NOWHERE = Place(Engine(-1, None, alive=False))
"""Where a session is whose engine is dead and that had no turn since."""


async def _answers(engine: Engine) -> bool:
    """Whether it generates a token; or, while it is paused for a version and generates for nobody, whether its server answers."""
    try:
        if not engine.client.paused:
            await engine.client.health(HEALTH_S)
            return True
    except EnvironmentFault:
        if not engine.client.paused:
            return False
    try:
        async with asyncio.timeout(HEALTH_S):
            await engine.client.info()
    except (EnvironmentFault, TimeoutError):
        return False
    return True


class Engines:
    """The engines that sessions of one server may use: the one next to it, and those of other ranks for when that one is gone."""

    def __init__(self, hung: Callable[[Engine], None] = lambda engine: None):
        """`hung` is told of an engine that does not answer, though nothing says that it is dead: sessions have left it."""
        self._hung = hung
        self._living: dict[int, Engine] = {}
        self._placed: Counter[Place] = Counter()  # sessions of this server
        self._elsewhere: Mapping[int, int] = {}  # rank -> sessions of other servers on its engine
        self._changed = asyncio.Event()

    @classmethod
    def of(cls, client: EngineClient, dp_ranks: int = 1) -> Engines:
        """One engine and no other."""
        engines = cls()
        engines.up(Engine(0, client, dp_ranks))
        return engines

    # -- what lives ----------------------------------------------------------------------------------------------------------
    def up(self, engine: Engine) -> None:
        """An engine that serves a weight version of this run. Takes the place of an earlier one of the same rank."""
        if (old := self._living.get(engine.rank)) is not None:
            old.alive = False
        self._living[engine.rank] = engine
        self._changed.set()

    def down(self, rank: int) -> None:
        if (engine := self._living.pop(rank, None)) is not None:
            engine.alive = False

    def living(self, rank: int) -> Engine | None:
        return self._living.get(rank)

    def report(self, elsewhere: Mapping[int, int]) -> None:
        """How many sessions of other servers each rank's engine has."""
        self._elsewhere = elsewhere

    async def lost(self, engine: Engine) -> bool:
        """A connection to the engine broke. Whether it is dead, and no session is placed on it any more."""
        if engine.alive:
            try:
                async with asyncio.timeout(PROBE_S):
                    await engine.client.info()
            except (EnvironmentFault, TimeoutError):
                self._give_up(engine)
        return not engine.alive

    async def overdue(self, engine: Engine) -> bool:
        """A turn on the engine passed its deadline. Whether it hangs, and no session is placed on it any more; otherwise the turn was just too long."""
        if engine.alive and not await _answers(engine) and engine.alive:  # of many turns that found it so the first one tells
            self._give_up(engine)
            self._hung(engine)
        return not engine.alive

    def _give_up(self, engine: Engine) -> None:
        engine.alive = False
        if self._living.get(engine.rank) is engine:
            del self._living[engine.rank]

    # -- placement -----------------------------------------------------------------------------------------------------------
    def place(self, prefer: int | None = None) -> Place:
        """The unit with the fewest sessions, of rank `prefer` while its engine lives. Raises EnvironmentFault when no engine serves a version."""
        serving = [e for e in self._living.values() if e.client.version >= 0]
        preferred = [e for e in serving if e.rank == prefer]
        if not serving:
            raise EnvironmentFault("no engine serves a known weight version now", "a living engine with the current weights",
                                   "wait: engines get traffic after they have started and been updated")
        place = least([Place(e, r) for e in preferred or serving for r in (range(e.dp_ranks) if e.dp_ranks > 1 else [None])], self._placed, self._elsewhere)
        self._placed[place] += 1
        return place

    async def settle(self, place: Place) -> Place:
        """Where a session that was at `place` has its next turn: there, or, when that engine is dead, where it has moved to. Waits for an engine."""
        if place.engine.alive:
            return place
        while True:
            self._changed.clear()
            try:
                moved = self.place()
            except EnvironmentFault:
                await self._changed.wait()
                continue
            self.leave(place)
            return moved

    def leave(self, place: Place) -> None:
        """A session has ended, or moved away."""
        if self._placed[place] > 1:
            self._placed[place] -= 1
        else:
            self._placed.pop(place, None)

    def loads(self) -> dict[int, int]:
        """rank -> sessions of this server on its living engine."""
        return {rank: sum(n for p, n in self._placed.items() if p.engine is engine) for rank, engine in self._living.items()}


def least(units: list[Place], placed: Mapping[Place, int], elsewhere: Mapping[int, int]) -> Place:
    """The emptiest unit of the emptiest engine (of equals the first). Pure; `elsewhere` counts sessions per engine, whose dp rank nobody here knows."""
    total: Counter[Engine] = Counter()
    for place, n in placed.items():
        total[place.engine] += n
    return min(units, key=lambda u: (total[u.engine] + elsewhere.get(u.engine.rank, 0), placed.get(u, 0)))
