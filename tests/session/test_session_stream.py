"""Streamed replies: deltas come while the engine samples, and together they are the message."""

import asyncio
import json
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from miles.core import StructureError
from miles.session.service import before_stop
from miles.session.stream import ReplyStream
from miles.session.tools import parse_calls
from tests.session.conftest import user
from tests.session.families import FAMILIES, make_chat
from tests.session.test_session_server import TOOLS, served  # noqa: F401  (fixture)

PIECES = ["a", "b c", " ", "\n", "é", "日本", "🙂", "<", "</", "<think>", "</think>", "STOP", "ST", "{", '"', "x" * 9, "<tool_call>", "</tool_call>",
          '\n{"name": "run", "arguments": {"cmd": "ls"}}\n']


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return make_chat(request.param, tmp_path_factory.mktemp("family"))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), step=st.integers(1, 4), tools=st.booleans(), stop=st.sampled_from([(), ("STOP",)]))
@example(pieces=["a", " ", "</think>", "b"], step=1, tools=False, stop=())
@example(pieces=["é", "STOP", "a"], step=1, tools=True, stop=("STOP",))
@example(pieces=["a\n", "<tool_call>", '\n{"name": "run", "arguments": {"cmd": "ls"}}\n', "</tool_call>"], step=1, tools=True, stop=())
def test_the_sum_of_the_deltas_is_the_message_whatever_is_sampled(family, pieces, step, tools, stop):
    chat = family
    ids = chat.encode("".join(pieces))
    got = {"reasoning_content": "", "content": ""}
    stream = ReplyStream(chat, stop, tools, lambda delta: [got.__setitem__(k, got[k] + v) for k, v in delta.items()])
    for n in range(step, len(ids) + 1, step):
        stream.feed(ids[:n])
    reasoning, content = chat.split_reasoning(before_stop(chat.text(ids), stop))
    if tools:
        content, _ = parse_calls(content, TOOLS, chat.boundary)
    stream.finish({"reasoning_content": reasoning, "content": content})
    assert got == {"reasoning_content": reasoning or "", "content": content or ""}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), step=st.integers(1, 5))
def test_any_tokens_whole_characters_or_not_are_the_same_text_in_parts(family, data, step):
    """Ids of single bytes too: what of a character is there changes when the rest comes, or never does."""
    pieces = family.encode("é日🙂 a<|\n") + family.encode("x y")
    ids = data.draw(st.lists(st.one_of(st.sampled_from(pieces), st.integers(0, 300).filter(lambda i: i not in family.stop_ids)), max_size=30))
    got = {"reasoning_content": "", "content": ""}
    stream = ReplyStream(family, (), False, lambda delta: [got.__setitem__(k, got[k] + v) for k, v in delta.items()])
    for n in range(step, len(ids) + 1, step):
        stream.feed(ids[:n])
    reasoning, content = family.split_reasoning(family.text(ids))
    stream.finish({"reasoning_content": reasoning, "content": content})
    assert got == {"reasoning_content": reasoning or "", "content": content}


def test_what_a_stream_costs_grows_with_its_tokens_and_not_with_their_square(chat, monkeypatch):
    ids, decoded, real = (chat.encode("list the files, é 日本\n") * 200)[:2000], [], chat.text
    monkeypatch.setattr(chat, "text", lambda ids: decoded.append(len(ids)) or real(ids))
    stream, got = ReplyStream(chat, (), False, lambda delta: got.append(delta["content"])), []
    for n in range(8, len(ids) + 1, 8):
        stream.feed(ids[:n])
    assert "".join(got) == real(ids).rstrip() and sum(decoded) <= 5 * len(ids)


def test_a_reply_that_is_sampled_anew_before_anything_of_it_was_sent_is_streamed_from_its_beginning(chat):
    stream, got = ReplyStream(chat, (), False, lambda delta: got.append(delta["content"])), []
    stream.feed(chat.encode("   \n"))
    assert not stream.started
    stream.restart()
    stream.feed(chat.encode("hello"))
    stream.finish({"content": "hello there"})
    assert "".join(got) == "hello there"


def test_a_stream_that_would_have_to_take_something_back_is_an_error(chat):
    stream = ReplyStream(chat, (), False, lambda delta: None)
    stream.feed(chat.encode("hello"))
    with pytest.raises(StructureError) as e:
        stream.finish({"content": "other"})
    assert e.value.cause == "stream:differs"


async def events(w, url, body):
    """[(seconds since the request, event)] of a streamed completion."""
    found, start = [], time.monotonic()
    async with w.http.post(w.url + url, json={**body, "stream": True}) as r:
        assert r.status == 200
        async for line in r.content:
            if line.startswith(b"data: {"):
                found.append((time.monotonic() - start, json.loads(line[6:])))
    return found


def test_deltas_come_while_the_engine_samples(served):  # noqa: F811
    async def scenario(w, call):
        _, opened = await call("POST", "/sessions", {})
        text = "list the files in the folder, then print file.txt and count its lines"
        w.stub.pace, w.stub.replies = 0.15, [[*w.chat.encode(text), w.chat.stop_ids[0]]]
        got = await events(w, f"/sessions/{opened['id']}/v1/chat/completions", {"messages": [user("hello")]})
        said = [(at, e["choices"][0]["delta"]["content"]) for at, e in got if e["choices"][0]["delta"].get("content")]
        assert len(said) >= 2 and "".join(s for _, s in said) == text
        assert said[-1][0] - said[0][0] >= 0.15, "not all at the end"

    served(scenario, max_turn_tokens=100)


def test_what_was_not_finished_is_not_a_turn(served):  # noqa: F811
    async def scenario(w, call):
        _, opened = await call("POST", "/sessions", {})
        session = w.service.sessions[opened["id"]]
        ids = [*w.chat.encode("list the files in the folder, then print file.txt"), w.chat.stop_ids[0]]
        # the engine's connection breaks after some of the reply was sent: the client is told, the session is as before
        w.stub.replies, w.stub.break_stream = [ids], True
        got = await events(w, f"/sessions/{opened['id']}/v1/chat/completions", {"messages": [user("hello")]})
        assert got[-1][1]["error"]["code"] == "engine_unavailable" and not session.turns
        assert not any("error" not in e and e["choices"][0]["finish_reason"] for _, e in got)
        # the client hangs up: the engine is told
        w.stub.replies, w.stub.pace = [ids] * 2, 0.3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await events(w, f"/sessions/{opened['id']}/v1/chat/completions", {"messages": [user("hello")]})
        await _until(lambda: w.stub.aborted and not session._busy)
        assert not session.turns
        w.stub.pace, w.stub.replies = 0.0, [ids]
        await session.chat([user("hello")])
        assert session.turns[0].output_ids.tolist() == ids

    served(scenario, max_turn_tokens=100)


async def _until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.01)
