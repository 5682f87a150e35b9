"""The HTTP shell: OpenAI's shapes, status codes, streaming."""

import json

import aiohttp
import pytest
from aiohttp import web

from miles.core import EnvironmentFault, StructureError
from miles.engine import lease_port
from miles.session import SessionServer
from miles.session.replay import loose
from tests.session.conftest import user

TOKEN = "server-token"


@pytest.fixture
def served(world):
    """Runs `async def scenario(w, call)`; `call(method, path, body)` returns (status, decoded body)."""

    def run(scenario, **limits):
        async def main(w):
            server, lease = SessionServer(w.service, TOKEN), lease_port(36000)
            url = await server.start(lease.port)
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
                async def call(method, path, body=None, **kw):
                    async with http.request(method, url + path, json=body, **kw) as r:
                        text = await r.text()
                        return r.status, json.loads(text) if text.startswith(("{", "[")) else text

                w.http, w.url = http, url
                try:
                    await scenario(w, call)
                finally:
                    await server.stop()
                    lease.release()

        world(main, **limits)

    return run


def test_a_conversation_from_opening_to_the_end(served):
    async def scenario(w, call):
        status, opened = await call("POST", "/sessions", {"routing_key": "k1"})
        assert status == 201 and opened["routing_key"] == "k1" and opened["url"] == f"{w.url}/sessions/{opened['id']}/v1"
        base = f"/sessions/{opened['id']}"
        status, first = await call("POST", base + "/v1/chat/completions", {"model": "m", "messages": [user("hello")]})
        assert status == 200 and first["object"] == "chat.completion" and first["model"] == "m"
        choice = first["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["role"] == "assistant"
        session = w.service.sessions[opened["id"]]
        assert choice["message"]["content"] == w.chat.text(session.turns[0].output_ids)
        assert first["usage"]["completion_tokens"] == 6 and first["usage"]["prompt_tokens"] == len(session.turns[0].input_ids)
        status, _ = await call("POST", base + "/v1/chat/completions", {"messages": [user("hello"), choice["message"], user("more")], "temperature": 1.0, "n": 1})
        assert status == 200
        status, shown = await call("GET", base)
        assert status == 200 and [t["completion_tokens"] for t in shown["turns"]] == [6, 6] and shown["tokens"] == session.tokens
        status, done = await call("POST", base + "/finish")
        assert status == 200 and done["exact"] is True and done["leaves"] == 1 and len(done["turns"]) == 2
        assert (await call("GET", base))[0] == 404

    served(scenario)


def test_a_conversation_that_forks_ends_with_the_tokens_of_each_leaf(served):
    async def scenario(w, call):
        w.service.branching = True
        _, opened = await call("POST", "/sessions", {})
        base = f"/sessions/{opened['id']}"
        _, first = await call("POST", base + "/v1/chat/completions", {"messages": [user("hello")]})
        for words in ("left", "right"):
            request = [user("hello"), first["choices"][0]["message"], user(words)]
            assert (await call("POST", base + "/v1/chat/completions", {"messages": request}))[0] == 200
        nodes = w.service.sessions[opened["id"]].history.nodes
        status, done = await call("POST", base + "/finish", {"arrays": True})
        assert status == 200 and done["leaves"] == 2 and done["exact"] is True and done["branched"] == {"content": 1}
        assert [a["tokens"] for a in done["arrays"]] == [n.tokens.tolist() for n in nodes[1:]]
        assert [sum(a["loss_mask"]) for a in done["arrays"]] == [12, 6]  # the first turn is trained in the first leaf

    served(scenario)


def test_a_summary_that_was_not_delivered_can_be_asked_for_again(served, monkeypatch):
    async def scenario(w, call):
        _, opened = await call("POST", "/sessions", {})
        base = f"/sessions/{opened['id']}"
        await call("POST", base + "/v1/chat/completions", {"messages": [user("hello")]})
        real = web.Response.write_eof

        async def broken(self, data=b""):
            monkeypatch.setattr(web.Response, "write_eof", real)
            raise ConnectionResetError("the client is gone")

        monkeypatch.setattr(web.Response, "write_eof", broken)
        assert (await call("POST", base + "/finish"))[0] == 500
        status, summary = await call("POST", base + "/finish")
        assert status == 200 and len(summary["turns"]) == 1
        assert (await call("GET", base))[0] == 404

    served(scenario)


def test_streaming_sends_the_reply_as_events(served):
    async def scenario(w, call):
        _, opened = await call("POST", "/sessions", {})
        body = {"messages": [user("hello")], "stream": True, "stream_options": {"include_usage": True}}
        status, text = await call("POST", f"/sessions/{opened['id']}/v1/chat/completions", body)
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert status == 200 and events[-1] == "[DONE]"
        chunks = [json.loads(e) for e in events[:-1]]
        said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        assert said == w.chat.text(w.service.sessions[opened["id"]].turns[0].output_ids)
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6

    served(scenario)


TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}}]


def test_tools_reach_the_template_and_calls_come_back_in_openais_shape(served):
    async def scenario(w, call):
        _, opened = await call("POST", "/sessions", {})
        url = f"/sessions/{opened['id']}/v1/chat/completions"
        said = 'I look.\n<tool_call>\n{"name": "run", "arguments": {"cmd":"ls \\u00e9"}}\n</tool_call>'
        w.stub.replies = [[*w.chat.encode(said), w.chat.stop_ids[0]]] * 2
        body = {"messages": [user("hello")], "tools": TOOLS, "tool_choice": "auto", "max_tokens": 200}
        status, answer = await call("POST", url, body)
        choice = answer["choices"][0]
        assert status == 200 and choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
        (made,) = choice["message"]["tool_calls"]
        assert made["type"] == "function" and made["id"].startswith("call_") and made["function"]["name"] == "run"
        assert json.loads(made["function"]["arguments"]) == {"cmd": "ls é"}
        turn = w.service.sessions[opened["id"]].turns[0]
        assert turn.finish_reason == "stop" and turn.output_ids.tolist() == [*w.chat.encode(said), w.chat.stop_ids[0]], "tokens are as sampled"
        status, text = await call("POST", url, {**body, "stream": True})  # asked again, streamed
        chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line and not line.endswith("[DONE]")]
        (calls,) = [d["tool_calls"] for c in chunks if "tool_calls" in (d := c["choices"][0]["delta"])]
        assert calls == [{**made, "index": 0, "id": calls[0]["id"]}]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "I look."
        held = w.service.sessions[opened["id"]].history.last.reply
        status, _ = await call("POST", url, {**body, "messages": [user("hello"), held, {"role": "tool", "tool_call_id": held["tool_calls"][0]["id"], "content": "a.txt"}]})
        assert status == 200
        status, refused = await call("POST", url, {"messages": [user("hello")]})
        assert (status, refused["error"]["code"]) == (422, "history:rewind")
        for more, code in [({"tools": [{"type": "function"}]}, "request:tools"), ({"tool_choice": "required"}, "invalid_value")]:
            status, refused = await call("POST", url, {**body, **more})
            assert (status, refused["error"]["code"]) == (400, code)
        _, shown = await call("GET", f"/sessions/{opened['id']}")
        assert shown["refused"] == {"history:rewind": 1, "request:tools": 1} and shown["retries"] == 1

    served(scenario, max_session_tokens=1000, max_turn_tokens=200)


def test_errors_have_openais_shape_and_the_right_status(served):
    async def scenario(w, call):
        async with aiohttp.ClientSession() as stranger, stranger.post(w.url + "/sessions", json={}) as r:
            assert r.status == 401 and (await r.json())["error"]["code"] == "invalid_api_key"
        _, opened = await call("POST", "/sessions", {})
        chat = f"/sessions/{opened['id']}/v1/chat/completions"
        ok = {"messages": [user("hello")]}
        for body, status, code in [
            ({**ok, "top_k": 5}, 400, "invalid_value"), ({**ok, "temperature": 0.2}, 400, "invalid_value"), ({**ok, "n": 2}, 400, "invalid_value"),
            ({**ok, "max_tokens": 0}, 400, "invalid_value"), ({**ok, "max_completion_tokens": 0, "max_tokens": 5}, 400, "invalid_value"),
            ({**ok, "seed": 1 << 63}, 400, "invalid_value"), ({**ok, "seed": -(1 << 63) - 1}, 400, "invalid_value"), ({**ok, "seed": 1.5}, 400, "invalid_value"),
            ({**ok, "max_tokens": True}, 400, "invalid_value"), ({}, 400, "history:message"),
            ({"messages": [{"role": "assistant", "content": "x"}]}, 422, "history:foreign-reply"),
        ]:
            found, answer = await call("POST", chat, body)
            assert (found, answer["error"]["code"]) == (status, code), body
            assert set(answer["error"]) == {"message", "type", "code", "param"}
        assert (await call("POST", "/sessions", {"routing_key": ""}))[1]["error"]["code"] == "routing_key_required"
        assert (await call("POST", "/sessions/none/v1/chat/completions", ok))[0] == 404
        assert (await call("GET", "/nothing"))[1]["error"]["code"] == "not_found"
        assert (await call("POST", chat, None, data=b"{"))[1]["error"]["message"].startswith("the body is not JSON")
        found, answer = await call("POST", chat, None, data=b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}")
        assert (found, answer["error"]["code"]) == (400, "invalid_value") and "too deeply" in answer["error"]["message"]
        w.stub.fail_next = True
        assert (await call("POST", chat, ok))[0] == 503
        assert (await call("POST", chat, ok))[0] == 200
        assert (await call("DELETE", f"/sessions/{opened['id']}"))[0] == 204
        assert (await call("POST", chat, ok))[0] == 404

    served(scenario)


DEEP = '{"a": ' * 3000 + "1" + "}" * 3000


def test_arguments_nested_too_deeply_to_be_read_are_text(served):
    """The model of a run may write them, and whatever it writes has an answer."""
    async def scenario(w, call):
        w.service.replay = loose
        _, opened = await call("POST", "/sessions", {})
        url = f"/sessions/{opened['id']}/v1/chat/completions"
        calls = [{"id": "c", "type": "function", "function": {"name": "run", "arguments": DEEP}}]
        asked = [user("hello"), {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": "x"}]
        assert (await call("POST", url, {"messages": [user("hello")], "max_tokens": 4}))[0] == 200
        status, refused = await call("POST", url, {"messages": asked})
        assert (status, refused["error"]["code"]) == (422, "history:content")
        _, opened = await call("POST", "/sessions", {})
        assert (await call("POST", f"/sessions/{opened['id']}/v1/chat/completions", {"messages": asked}))[0] == 200  # as an example

    served(scenario, max_session_tokens=2000)


def test_messages_nested_too_deeply_to_be_compared_are_refused(served):
    def asked():
        deep = {}
        for _ in range(5000):
            deep = {"a": deep}
        return {**user("hello"), "x": deep}

    async def scenario(w, call):
        session = w.service.open("k")
        reply = await session.chat([asked()])
        with pytest.raises(StructureError) as e:
            await session.chat([asked(), reply.message, user("more")])
        assert (e.value.cause, session.refused) == ("request:nesting", {"request:nesting": 1})

    served(scenario)


def test_what_nobody_foresaw_is_an_error_in_openais_shape_and_in_the_log(served, monkeypatch, caplog):
    async def scenario(w, call):
        _, opened = await call("POST", "/sessions", {})
        chat, body = f"/sessions/{opened['id']}/v1/chat/completions", {"messages": [user("hello")]}
        monkeypatch.setattr(w.chat, "text", lambda ids: 1 / 0)
        status, answer = await call("POST", chat, body)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (500, "server_error", "ZeroDivisionError")
        assert "division by zero" in caplog.text and "Traceback" in caplog.text
        monkeypatch.undo()
        monkeypatch.setattr("miles.session.server.Chunks.end", lambda *_: 1 / 0)  # of a reply that has begun
        status, text = await call("POST", chat, {**body, "stream": True})
        assert status == 200 and text.endswith("data: [DONE]\n\n") and json.loads(text.split("\n\n")[-3].removeprefix("data: "))["error"]["code"] == "ZeroDivisionError"

    served(scenario)


def test_a_client_that_hangs_up_aborts_the_request(served):
    async def scenario(w, call):
        import asyncio

        _, opened = await call("POST", "/sessions", {})
        w.stub.delay = 5.0
        with pytest.raises(TimeoutError):
            await call("POST", f"/sessions/{opened['id']}/v1/chat/completions", {"messages": [user("hello")]}, timeout=aiohttp.ClientTimeout(total=0.3))
        for _ in range(100):
            if w.stub.aborted:
                break
            await asyncio.sleep(0.02)
        assert len(w.stub.aborted) == 1 and not w.service.sessions[opened["id"]].turns

    served(scenario)


def test_a_taken_port_is_an_environment_fault(served):
    async def scenario(w, call):
        with pytest.raises(EnvironmentFault, match="cannot listen"):
            await SessionServer(w.service, TOKEN).start(int(w.url.rsplit(":", 1)[1]))

    served(scenario)
