"""What a session refused before it came into its history can be refused again from the file that is kept of it."""

import json

import pytest

from miles.core import StructureError
from miles.engine.wire import token_versions
from miles.session import read_history, reproducer
from miles.session.history import check_messages
from miles.session.replay import strict
from miles.session.stream import ReplyStream
from tests.session.conftest import user


def refused(world, tmp_path, ask):
    """(the error, the file that is kept of the session) of `await ask(w, session)` on a session with one turn."""
    async def scenario(w):
        session = w.service.open("k")
        first = await session.chat([user("hello")])
        with pytest.raises(StructureError) as e:
            await ask(w, session, first.message)
        path = tmp_path / "k.json"
        path.write_bytes(reproducer(session.history, e.value, task="t"))
        return e.value, path

    return world(scenario)


def test_a_request_that_does_not_continue_the_history(world, tmp_path):
    async def ask(w, session, first):
        await session.chat([user("hello"), {**first, "content": "never said"}, user("go on")], max_tokens=3, stop=("x",), seed=4)

    error, path = refused(world, tmp_path, ask)
    request = json.loads(path.read_bytes())["evidence"]["request"]
    assert (request["max_tokens"], request["stop"], request["seed"], request["tools"]) == (3, ["x"], 4, None)
    history = read_history(path)
    with pytest.raises(StructureError) as again:
        history.match(check_messages(request["messages"]), strict)
    assert (error.cause, str(again.value)) == ("history:content", str(error))


def test_a_reply_of_the_engine_that_contradicts_itself(world, tmp_path):
    async def ask(w, session, first):
        w.stub.version = "newest"
        await session.chat([user("hello"), first, user("go on")])

    error, path = refused(world, tmp_path, ask)
    evidence = json.loads(path.read_bytes())["evidence"]
    meta = evidence["reply"]["meta_info"]
    with pytest.raises(StructureError) as again:
        token_versions(meta, len(evidence["reply"]["output_ids"]), meta["id"])
    assert (error.cause, str(again.value)) == ("reply:versions", str(error))
    assert meta["routed_experts"].endswith(" characters of base64") and evidence["request"]["messages"][-1] == user("go on")


def test_a_streamed_reply_that_is_not_what_was_streamed(world, tmp_path):
    async def ask(w, session, first):
        w.stub.replies = [[*w.chat.encode("ls"), w.chat.stop_ids[0]]]
        with pytest.MonkeyPatch.context() as m:
            m.setattr(ReplyStream, "feed", lambda self, ids: self._send({"content": "other", "reasoning_content": ""}))
            await session.chat([user("hello"), first, user("go on")], on_delta=lambda delta: None)

    error, path = refused(world, tmp_path, ask)
    assert error.cause == "stream:differs" and len(json.loads(path.read_bytes())["evidence"]["output_ids"]) >= 2


def test_a_request_that_json_does_not_hold_leaves_the_rest_of_the_file(world, tmp_path):
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}

    async def ask(w, session, first):
        await session.chat([user("hello"), {**first, "content": "never said"}, {**user("go on"), "x": deep}])

    error, path = refused(world, tmp_path, ask)
    assert error.cause == "history:content" and "RecursionError" in json.loads(path.read_bytes())["evidence"]["not written"]
    assert len(read_history(path).nodes) == 1
