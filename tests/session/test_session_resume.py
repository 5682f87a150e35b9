"""A trajectory whose process was killed is played again: the same requests get the same turns from disk, and from where one differs, the engine is asked."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.session import Engines, SessionLimits, SessionService, SessionStore, stored_sessions
from tests.session.conftest import user
from tests.session.fake import FakeEngine, finish, leaves

NAME = "g00000007s001"


@pytest.fixture
def life(chat, tmp_path):
    """`life(rank, *outputs)`: a process of that rank with an engine that has these replies to give. What it opens is killed with it."""
    epochs = iter(range(1, 1000))

    def begin(*outputs, rank=0, branching=False):
        engine = FakeEngine(chat.stop_ids)
        engine.outputs = [[*o, chat.stop_ids[0]] for o in outputs]
        store = SessionStore(tmp_path / "sessions", rank, next(epochs))
        service = SessionService(Engines.of(engine), chat, SessionLimits(100_000, 1000, 5.0, 1.0, max_sessions=1), branching=branching, store=store)
        return SimpleNamespace(engine=engine, service=service, store=store, folder=tmp_path / "sessions")

    return begin


def begin(service):
    """The trajectory's session, which goes on from what this process holds of it."""
    return service.open_trajectory(NAME, held=service.held.get(NAME))


async def converse(session, *texts):
    """One turn for each text, each going on from the reply before; the messages."""
    messages = list(session.history.messages)
    for text in texts:
        messages = [*messages, user(text)]
        messages.append((await session.chat(messages)).message)
    return messages


def test_the_same_requests_get_the_turns_on_disk_and_the_next_one_the_engine(life):
    async def first(p):
        await converse(await begin(p.service), "a", "b")

    async def second(p):
        session = await begin(p.service)
        messages = await converse(session, "a", "b")
        assert p.engine.answered == []
        await converse(session, "c")
        return session, messages

    async def undisturbed(p):
        session = p.service.open(NAME)
        await converse(session, "a", "b", "c")
        return session

    asyncio.run(first(life([50, 51], [52])))
    later = life([53])
    assert list(later.service.held) == [NAME]
    session, _ = asyncio.run(second(later))
    whole = asyncio.run(undisturbed(life([50, 51], [52], [53], rank=9)))
    ours, theirs = finish(session), finish(whole)
    for name in ("tokens", "loss_mask", "logprobs", "versions", "routes"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert (ours.meta["resumed_turns"], ours.meta["abandoned_turns"], len(later.engine.answered)) == (2, 0, 1)


def test_where_the_environment_says_something_else_the_engine_is_asked_and_the_rest_is_left(life, chat):
    async def first(p):
        await converse(await begin(p.service), "a", "it is 12:00", "c")

    async def second(p):
        session = await begin(p.service)
        await converse(session, "a", "it is 12:01")
        return session

    asyncio.run(first(life([50], [51], [52])))
    later = life([60])
    session = asyncio.run(second(later))
    t = finish(session)
    assert t.tokens[t.loss_mask == 1].tolist() == [50, chat.stop_ids[0], 60, chat.stop_ids[0]]
    assert later.engine.answered[0].input_ids.tolist() == session.turns[1].input_ids.tolist()
    assert (t.meta["resumed_turns"], t.meta["abandoned_turns"]) == (1, 2)
    (_, turns), = stored_sessions(later.folder, 0).values()
    assert len(turns) == 2 and np.frombuffer(turns[1].output_ids, np.int32).tolist() == [60, chat.stop_ids[0]]  # a third life goes on from here


def test_another_rank_goes_on_from_the_file_and_has_it_all_in_its_own(life):
    async def first(p):
        await converse(await begin(p.service), "a", "b")

    async def second(p):
        session = await p.service.open_trajectory(NAME, held=stored_sessions(p.folder, 0)[NAME])
        await converse(session, "a", "b")
        return session

    asyncio.run(first(life([50], [51])))
    other = life(rank=3)
    assert other.service.held == {}
    assert asyncio.run(second(other)).resumed_turns == 2
    assert stored_sessions(other.folder, 3)[NAME][1] == stored_sessions(other.folder, 0)[NAME][1]


def test_turns_that_it_was_not_told_to_go_on_from_are_not_given_again_and_are_gone_from_its_file(life):
    """Another rank has played the sample since, and its failure is tried again here."""
    async def play(p, **kw):
        session = await p.service.open_trajectory(NAME, **kw)
        await converse(session, "a")
        return session.resumed_turns

    asyncio.run(play(life([50])))
    other = life([60], rank=3)
    asyncio.run(play(other))
    later = life([70])
    assert list(later.service.held) == [NAME] and asyncio.run(play(later)) == 0
    (_, (turn,)), = stored_sessions(later.folder, 0).values()
    assert np.frombuffer(turn.output_ids, np.int32).tolist()[0] == 70 and later.service.held == {}
    again = life()  # its own are older than those that it is given
    assert asyncio.run(play(again, held=stored_sessions(again.folder, 3)[NAME])) == 1
    (_, (turn,)), = stored_sessions(again.folder, 0).values()
    assert np.frombuffer(turn.output_ids, np.int32).tolist()[0] == 60


def test_the_version_at_its_opening_is_the_first_one(life):
    async def first(p):
        p.engine.version = 4
        await converse(await begin(p.service), "a")

    async def second(p):
        p.engine.version = 6
        session = await begin(p.service)
        await converse(session, "a")
        return session.opened_at

    asyncio.run(first(life([50])))
    assert asyncio.run(second(life())) == 4


def test_a_branching_conversation_is_resumed_with_its_branches(life):
    async def play(p):
        session = await begin(p.service)
        first = (await session.chat([user("q")])).message
        for text in ("left", "right"):
            await session.chat([user("q"), first, user(text)])
        return session

    session = asyncio.run(play(life([50], [51], [52], branching=True)))
    again = life(branching=True)
    resumed = asyncio.run(play(again))
    assert [t.tokens.tolist() for t in leaves(resumed)] == [t.tokens.tolist() for t in leaves(session)] and len(leaves(resumed)) == 2
    assert resumed.branched == session.branched and again.engine.answered == []


def test_a_streaming_client_gets_a_resumed_reply_whole(life, chat):
    said = []

    async def ask(p, **kw):
        return await (await begin(p.service)).chat([user("a")], **kw)

    reply = asyncio.run(ask(life([50, 51, 52])))
    asyncio.run(ask(life(), on_delta=said.append))
    assert "".join(d.get("content", "") for d in said) == reply.content == chat.text([50, 51, 52])


def test_a_finished_or_released_trajectory_is_not_held_by_the_next_process(life):
    async def first(p):
        await p.service.forget(await p.service.open_trajectory("g00000001s000"))
        await converse(await begin(p.service), "a")

    async def second(p):
        await p.service.release([NAME, "g00000009s000"])

    asyncio.run(first(life([50])))
    later = life()
    assert list(later.service.held) == [NAME]
    asyncio.run(second(later))
    assert life().service.held == {}


def test_trajectories_do_not_take_the_places_of_sessions_over_http(life):
    async def both(p):
        await begin(p.service)
        await p.service.open_durable("somebody's")  # max_sessions is 1

    asyncio.run(both(life()))


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_killed_when_every_trained_token_is_what_the_engine_answered_to_exactly_the_tokens_before_it(data, chat, tmp_path_factory):
    """Lives of random length; the environment repeats itself, or says something new from a random turn on. Replies are new in each life."""
    folder, answered, text = tmp_path_factory.mktemp("lives"), [], ["q0"]
    for epoch in range(1, data.draw(st.integers(2, 5)) + 1):
        engine = FakeEngine(chat.stop_ids)
        engine.outputs = [[40 + epoch, 50 + i, chat.stop_ids[0]] for i in range(10)]
        service = SessionService(Engines.of(engine), chat, SessionLimits(100_000, 1000, 5.0, 1.0), store=SessionStore(folder, 0, epoch))
        turns = data.draw(st.integers(1, 6))
        changed = data.draw(st.integers(0, 12))
        text = [t if i < changed else f"{t} in life {epoch}" for i, t in enumerate(text)] + [f"q{i}" for i in range(len(text), turns)]

        async def live(service=service, turns=turns):
            session = await begin(service)
            await converse(session, *text[:turns])
            return session

        session = asyncio.run(live())
        answered += engine.answered
        known = {(a.input_ids.tobytes(), a.output_ids.tobytes(), a.logprobs.tobytes()) for a in answered}
        assert len(session.turns) == turns and all((t.input_ids.tobytes(), t.output_ids.tobytes(), t.logprobs.tobytes()) for t in session.turns)
        assert {(t.input_ids.tobytes(), t.output_ids.tobytes(), t.logprobs.tobytes()) for t in session.turns} <= known
        assert session.resumed_turns + len(engine.answered) == turns
        finish(session)  # every token accounted for
