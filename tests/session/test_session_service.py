"""Sessions over an engine that speaks SGLang's API: exact accounting, retries, budgets, failures that change nothing."""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core import Drafts, EnvironmentFault, StructureError
from miles.engine import KeyRequired
from miles.session import Engine, SessionBusy, SessionStore
from tests.session.conftest import make_world, user
from tests.session.fake import finish


async def converse(session, n, start=()):
    messages = list(start) or [user("hello")]
    for i in range(n):
        reply = await session.chat(messages)
        messages += [reply.message, user(f"output {i}")]
    return messages


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_jumps_closes_no_session(world, tmp_path, monkeypatch, jump):
    async def scenario(w):
        w.service.store = SessionStore(tmp_path / "s", 0, 1)
        first = await w.service.open_durable("a", "first")
        monkeypatch.setattr(time, "time", lambda real=time.time: real() + jump)
        await w.service.open_durable("b", "second")
        assert set(w.service.sessions) == {"first", "second"} and 0 <= first.age < 60
        await converse(first, 1)
        assert 0 <= finish(first).seconds < 60
        w.service.store.close()

    world(scenario)


def test_a_session_older_than_its_deadline_is_closed_when_another_is_opened(world, tmp_path, monkeypatch):
    async def scenario(w):
        w.service.store = SessionStore(tmp_path / "s", 0, 1)
        await w.service.open_durable("a", "first")
        monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + w.service.limits.deadline_s)
        await w.service.open_durable("b", "second")
        assert set(w.service.sessions) == {"second"}
        w.service.store.close()

    world(scenario)


def test_every_token_of_three_turns_is_accounted_for(world):
    async def scenario(w):
        session = w.service.open("key")
        await converse(session, 3)
        t = finish(session)
        sent = w.stub.requests
        assert [r["routing_key"] for r in sent] == ["key"] * 3 and {r["extra_key"] for r in sent} == {"v0"}
        assert t.tokens.tolist() == [*sent[-1]["input_ids"], *session.turns[-1].output_ids]
        assert t.loss_mask.sum() == 18 and t.turns == 3 and t.exact and len(t.routes) == len(t.tokens) - 1
        # the stub's experts depend on the token, so a shifted row would show
        assert t.routes[:, 0, 0].tolist() == [x % 8 for x in t.tokens[:-1]]
        # each input starts with everything before it, byte for byte
        assert sent[1]["input_ids"][: len(sent[0]["input_ids"]) + 6] == t.tokens[: len(sent[0]["input_ids"]) + 6].tolist()

    world(scenario)


def test_what_speculative_decoding_did_is_summed_over_turns_and_counted_by_the_client(world):
    async def scenario(w):
        session = w.service.open("a")
        await converse(session, 1)
        assert "drafts" not in finish(session).meta
        w.stub.speculates = True
        session = w.service.open("b")
        await converse(session, 2)
        # six tokens a turn: one from the prompt, and three passes of which two accept their draft
        assert [t.drafts for t in session.turns] == [Drafts(3, 3, 2)] * 2
        assert finish(session).meta["drafts"] == [6, 6, 4] and w.client.drafts == Drafts(6, 6, 4)

    world(scenario)


def test_prefix_cache_figures_count_only_what_this_session_had_computed(world):
    async def scenario(w):
        first, second = w.service.open("a"), w.service.open("b")
        await converse(first, 2)
        await second.chat([user("hello")])
        t = finish(second)
        assert (t.cached_tokens, t.cacheable_tokens, t.meta["reused_tokens"]) == (len(second.turns[0].input_ids) - 1, 0, 0)
        one, t = len(first.turns[0].input_ids), finish(first)
        assert t.cacheable_tokens == t.meta["reused_tokens"] == one + 5  # the prompt and all sampled tokens but the last

    world(scenario)


def test_a_session_opened_before_an_update_is_not_exact(world):
    async def scenario(w):
        early = w.service.open("a")
        await early.chat([user("hello")])
        w.stub.version = 1
        await w.client.refresh_version()
        late = w.service.open("b")
        await converse(late, 2)
        await early.chat([user("hello"), early.history.messages[-1], user("more")])
        assert finish(late).exact and not finish(early).exact
        assert w.stub.requests[-1]["extra_key"] == "v0" and w.stub.requests[1]["extra_key"] == "v1"

    world(scenario)


def test_a_retry_replaces_the_last_turn_also_the_first(world):
    async def scenario(w):
        session = w.service.open("k")
        messages = await converse(session, 2)
        await session.chat(messages[:2] + [user("other words")])
        assert len(session.turns) == 2 and session.retries == 1
        assert finish(session).tokens.tolist() == session.history.checkpoints[-1].tokens.tolist()
        again = w.service.open("k2")
        await again.chat([user("hello")])
        await again.chat([user("hello")])
        assert len(again.turns) == 1 and again.retries == 1

    world(scenario)


def test_an_invalid_request_after_a_valid_turn_loses_nothing(world):
    async def scenario(w):
        session = w.service.open("k")
        messages = await converse(session, 2)
        before = session.history
        for bad in ([], [user("x")], messages[:1] + [{"role": "assistant", "content": "forged"}, user("y")], [{"role": "user"}]):
            with pytest.raises(StructureError):
                await session.chat(bad)
        for fault in ("fail_next", "abort_next"):
            setattr(w.stub, fault, True)
            with pytest.raises(EnvironmentFault):
                await session.chat(messages)
        assert session.history is before and len(w.stub.requests) == 4
        await session.chat(messages)
        assert len(finish(session).tokens) == len(session.turns[-1].input_ids) + 6

    world(scenario)


def test_a_turn_past_its_deadline_is_aborted_and_the_session_goes_on(world):
    async def scenario(w):
        session = w.service.open("k")
        w.stub.delay = 5.0
        with pytest.raises(EnvironmentFault, match=r"longer than 0.2 s"):
            await session.chat([user("hello")])
        assert len(w.stub.aborted) == 1 and w.stub.aborted[0] == w.stub.requests[0]["rid"]
        w.stub.delay = 0.0
        await session.chat([user("hello")])
        assert len(session.turns) == 1

    world(scenario, turn_deadline_s=0.2)


def test_a_cancelled_turn_is_aborted_in_the_engine(world):
    async def scenario(w):
        session = w.service.open("k")
        w.stub.delay = 5.0
        task = asyncio.create_task(session.chat([user("hello")]))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(w.stub.aborted) == 1 and w.client.active == 0

    world(scenario)


def test_a_turn_cut_by_length_cannot_be_continued(world):
    async def scenario(w):
        session = w.service.open("k")
        reply = await session.chat([user("hello")], max_tokens=3)
        assert reply.finish_reason == "length" and len(reply.turn.output_ids) == 3
        with pytest.raises(StructureError) as e:
            await session.chat([user("hello"), reply.message, user("go on")])
        assert e.value.cause == "history:truncated"

    world(scenario)


def test_a_turn_that_ends_exactly_at_the_limit_ended_by_its_stop_token(world):
    async def scenario(w):
        session = w.service.open("k")
        reply = await session.chat([user("hello")], max_tokens=6)
        assert reply.finish_reason == "stop" and len(reply.turn.output_ids) == 6

    world(scenario)


def test_the_session_budget_shortens_the_last_turn_and_then_says_length(world):
    async def scenario(w):
        session = w.service.open("k")
        room = len(w.chat.first([user("hello")]))
        w.service.limits = type(w.service.limits)(room + 4, 16, 5.0, 1.0)
        reply = await session.chat([user("hello")])
        assert (reply.finish_reason, len(reply.turn.output_ids), session.tokens) == ("length", 4, room + 4)
        full = w.service.open("k2")
        reply = await full.chat([user("hello " * 30)])
        assert (reply.content, reply.finish_reason, reply.turn) == ("", "length", None) and not full.turns

    world(scenario)


def test_a_second_request_at_the_same_time_is_refused(world):
    async def scenario(w):
        session = w.service.open("k")
        w.stub.delay = 0.2
        first = asyncio.create_task(session.chat([user("hello")]))
        await asyncio.sleep(0.05)
        with pytest.raises(SessionBusy):
            await session.chat([user("hello")])
        await first

    world(scenario)


def test_no_session_without_a_key_and_none_before_the_weights_are_known(world):
    async def scenario(w):
        with pytest.raises(KeyRequired):
            w.service.open("")
        w.client.version = -1
        with pytest.raises(EnvironmentFault, match="no engine serves a known weight version"):
            w.service.open("k")

    world(scenario)


def test_a_restarted_engine_has_nothing_cached_for_the_session(world):
    async def scenario(w):
        session = w.service.open("k")
        messages = await converse(session, 1)
        w.service.engines.up(Engine(0, w.client))  # another incarnation
        await session.chat(messages)
        assert [c.cacheable_tokens for c in session.history.checkpoints] == [0, 0] and session.moves == 1

    world(scenario)


def test_dp_ranks_fill_evenly(world):
    async def scenario(w):
        w.service.engines.up(Engine(0, w.client, dp_ranks=3))
        sessions = [w.service.open("k") for _ in range(4)]
        assert [s.place.dp_rank for s in sessions] == [0, 1, 2, 0]
        w.service.close(sessions[1])
        assert w.service.open("k").place.dp_rank == 1
        await sessions[2].chat([user("hello")])
        assert w.stub.requests[-1]["routed_dp_rank"] == 2

    world(scenario)


@pytest.fixture(scope="module")
def world_factory(chat, stub_folder):
    """`world` for hypothesis, which wants no function-scoped fixture."""
    return make_world(chat, stub_folder)


actions = st.lists(st.one_of(st.just("continue"), st.just("retry"), st.just("fail"), st.just("abort"), st.just("invalid"), st.integers(2, 9)), max_size=10)


@settings(deadline=None, max_examples=25)
@given(actions=actions)
def test_whatever_happens_the_trajectory_is_what_the_engine_answered(world_factory, actions):
    async def scenario(w):
        session, messages, recorded = w.service.open("k"), [user("hello")], []
        for action in ("continue", *actions):
            if isinstance(action, int):
                w.stub.length = action
                continue
            if action == "retry" and recorded:
                messages, recorded = messages[:-2], recorded[:-1]
            w.stub.fail_next, w.stub.abort_next = action == "fail", action == "abort"
            try:
                reply = await session.chat([{"role": "user", "content": 5}] if action == "invalid" else messages)
            except (EnvironmentFault, StructureError):
                w.stub.fail_next = w.stub.abort_next = False
                assert action in ("fail", "abort", "invalid")
                continue
            recorded.append(reply.turn)
            messages = [*messages, reply.message, user(f"say {len(messages)}")]
        t = finish(session)
        assert t.tokens[t.loss_mask == 1].tolist() == [int(x) for turn in recorded for x in turn.output_ids]
        assert t.turns == len(recorded)

    world_factory(scenario)
