"""Which engine a session talks to: the emptiest at first, that one as long as it lives, then another with the same tokens."""

import asyncio
from types import SimpleNamespace

import pytest

from miles.core import EnvironmentFault
from miles.engine import EngineClient, EngineGone, ModelShape
from miles.session import Engine, Engines, SessionLimits, SessionService, affinity
from miles.session.affinity import Place, least
from tests.engine.stub import TOKEN, StubEngine
from tests.session.conftest import user
from tests.session.fake import finish


def engine(rank, version=0, dp_ranks=1):
    return Engine(rank, SimpleNamespace(version=version), dp_ranks)


def test_the_emptiest_engine_and_in_it_the_emptiest_rank():
    a, b = engine(0, dp_ranks=2), engine(1)
    units = [Place(a, 0), Place(a, 1), Place(b)]
    assert least(units, {}, {}) == Place(a, 0)
    assert least(units, {Place(a, 0): 1}, {}) == Place(b)
    assert least(units, {Place(a, 0): 1, Place(b): 2}, {}) == Place(a, 1)
    assert least(units, {Place(a, 0): 1, Place(b): 2}, {0: 5, 1: 3}) == Place(b)  # 6 against 5
    assert least(units, {Place(b): 1}, {0: 1}) == Place(a, 0)  # of equals the first


def test_sessions_spread_and_a_living_engine_keeps_its_own():
    async def scenario():
        engines = Engines()
        a, b = engine(0), engine(1)
        engines.up(a)
        old = [engines.place() for _ in range(3)]
        engines.up(b)
        assert [(await engines.settle(p)) for p in old] == old, "a new engine takes no old session"
        assert [engines.place().engine for _ in range(4)] == [b, b, b, a]
        assert engines.loads() == {0: 4, 1: 3}
        engines.leave(old[0])
        assert engines.place(prefer=1).engine is b and engines.loads() == {0: 3, 1: 4}

    asyncio.run(scenario())


def test_an_engine_without_weights_gets_no_session():
    engines = Engines()
    with pytest.raises(EnvironmentFault, match="no engine serves"):
        engines.place()
    engines.up(engine(0, version=-1))
    with pytest.raises(EnvironmentFault, match="no engine serves"):
        engines.place()


def test_orphans_go_to_the_emptiest_or_wait_for_one():
    async def scenario():
        engines = Engines()
        a, b, c = engine(0), engine(1), engine(2)
        for e in (a, b, c):
            engines.up(e)
        engines.report({1: 3})  # other servers have three sessions there
        orphans = [engines.place(prefer=0) for _ in range(5)]
        engines.down(0)
        moved = [(await engines.settle(p)).engine for p in orphans]
        assert moved == [c, c, c, b, c] and engines.loads() == {1: 1, 2: 4}
        engines.down(1)
        engines.down(2)
        waiting = asyncio.create_task(engines.settle(Place(c)))
        await asyncio.sleep(0)
        again = engine(0)
        engines.up(again)
        assert (await waiting).engine is again

    asyncio.run(scenario())


@pytest.fixture
def two(chat, stub_folder):
    """Runs `async def scenario(w)` with two stub engines `w.stubs` (their clients `w.clients`) and a service over both."""
    def run(scenario):
        hung = []

        async def main():
            stubs = [StubEngine(ModelShape.from_folder(stub_folder), chat.stop_ids[0]) for _ in range(2)]
            clients = [EngineClient(await s.start(), TOKEN, stub_folder, max_context=2048) for s in stubs]
            engines = Engines(hung.append)
            for rank, client in enumerate(clients):
                await client.refresh_version()
                engines.up(Engine(rank, client))
            service = SessionService(engines, chat, SessionLimits(400, 16, 5.0, 1.0))
            try:
                await scenario(SimpleNamespace(stubs=stubs, clients=clients, engines=engines, service=service, hung=hung))
            finally:
                for client, stub in zip(clients, stubs, strict=True):
                    await client.close()
                    await stub.stop()

        asyncio.run(main())

    return run


def test_a_session_whose_engine_dies_goes_on_elsewhere_with_the_same_tokens(two):
    async def scenario(w):
        session, messages = w.service.open("k", rank=0), [user("hello")]
        for i in range(2):
            reply = await session.chat(messages)
            messages += [reply.message, user(f"output {i}")]
        before = session.history.last.tokens.tolist()
        await w.stubs[0].stop()
        reply = await session.chat(messages)
        assert session.moves == 1 and len(w.stubs[0].requests) == 2 and len(w.stubs[1].requests) == 1
        sent = w.stubs[1].requests[0]
        assert sent["input_ids"][: len(before)] == before and (sent["routing_key"], sent["extra_key"]) == ("k", "v0")
        last = session.history.last
        assert (last.turn.cached_tokens, last.cacheable_tokens, last.reused_tokens) == (0, 0, 0), "a cold cache is no missed reuse"
        messages += [reply.message, user("more")]
        await session.chat(messages)
        assert len(w.stubs[1].requests) == 2 and session.moves == 1, "it stays where it is"
        t = finish(session)
        assert t.turns == 4 and t.exact and (t.routes[:, 0, 0] == t.tokens[:-1] % 8).all()
        assert w.engines.loads() == {1: 1}

    two(scenario)


def test_an_engine_that_dies_in_the_middle_of_a_turn(two):
    async def scenario(w):
        session = w.service.open("k", rank=0)
        w.stubs[0].delay = 30.0
        turn = asyncio.create_task(session.chat([user("hello")]))
        while not w.stubs[0].requests:
            await asyncio.sleep(0.01)
        await w.stubs[0].stop()
        await turn
        assert len(session.turns) == 1 and session.moves == 1 and w.stubs[1].requests[0]["input_ids"] == w.stubs[0].requests[0]["input_ids"]

    two(scenario)


def test_a_broken_connection_to_a_living_engine_moves_nothing(two):
    async def scenario(w):
        session, real = w.service.open("k", rank=0), w.clients[0]._post
        broken = [True]

        async def post(path, body, **kw):
            if path == "/generate" and broken.pop() if broken else False:
                raise EngineGone("connection reset")
            return await real(path, body, **kw)

        w.clients[0]._post = post
        await session.chat([user("hello")])
        assert session.moves == 0 and len(w.stubs[0].requests) == 1 and not w.stubs[1].requests

    two(scenario)


def test_when_every_engine_is_dead_the_turn_fails_by_its_deadline_and_changes_nothing(two):
    async def scenario(w):
        w.service.limits = SessionLimits(400, 16, 0.3, 1.0)
        session = w.service.open("k")
        for stub in w.stubs:
            await stub.stop()
        with pytest.raises(EnvironmentFault):
            await session.chat([user("hello")])
        assert not session.turns and not session._busy

    two(scenario)


def test_a_turn_past_its_deadline_on_an_engine_that_generates_has_failed_alone(two):
    async def scenario(w):
        w.service.limits = SessionLimits(400, 16, 0.3, 1.0)
        session, w.stubs[0].delay = w.service.open("k", rank=0), 30.0
        with pytest.raises(EnvironmentFault, match="took longer than"):
            await session.chat([user("hello")])
        assert w.engines.living(0) is session.place.engine and w.hung == []

    two(scenario)


def test_an_engine_that_is_paused_for_a_version_does_not_hang(two):
    async def scenario(w):
        w.service.limits = SessionLimits(400, 16, 0.3, 1.0)
        session, w.stubs[0].hangs = w.service.open("k", rank=0), True
        await w.clients[0].pause("in_place")
        with pytest.raises(EnvironmentFault, match="took longer than"):
            await session.chat([user("hello")])
        assert w.engines.living(0) is session.place.engine and w.hung == []

    two(scenario)


def test_an_engine_that_is_paused_for_a_version_and_whose_server_does_not_answer_either_hangs(two, monkeypatch):
    monkeypatch.setattr(affinity, "HEALTH_S", 0.2)

    async def scenario(w):
        w.service.limits = SessionLimits(400, 16, 0.3, 1.0)
        session = w.service.open("k", rank=0)
        await w.clients[0].pause("in_place")
        monkeypatch.setattr(w.clients[0], "info", asyncio.Event().wait)
        with pytest.raises(EnvironmentFault, match="took longer than"):
            await session.chat([user("hello")])
        assert [e.rank for e in w.hung] == [0] and w.engines.living(0) is None

    two(scenario)


def test_an_engine_that_generates_nothing_after_a_turn_passed_its_deadline_hangs_and_is_told_once(two, monkeypatch):
    monkeypatch.setattr(affinity, "HEALTH_S", 0.2)

    async def scenario(w):
        w.service.limits = SessionLimits(400, 16, 0.3, 1.0)
        sessions, w.stubs[0].delay, w.stubs[0].hangs = [w.service.open("k", rank=0) for _ in range(3)], 30.0, True
        ends = await asyncio.gather(*(s.chat([user("hello")]) for s in sessions), return_exceptions=True)
        assert all(isinstance(e, EnvironmentFault) for e in ends)
        assert [e.rank for e in w.hung] == [0] and w.engines.living(0) is None
        w.service.limits = SessionLimits(400, 16, 5.0, 1.0)
        await sessions[0].chat([user("hello")])
        assert sessions[0].place.engine.rank == 1 and sessions[0].moves == 1

    two(scenario)
