"""HTTP for harnesses outside: OpenAI-shaped chat completions over a `SessionService`. A thin shell without logic of its own.

    POST   /sessions                              {"routing_key"?, "id"?}      -> {"id", "routing_key", "url"}
    POST   /sessions/{id}/v1/chat/completions     OpenAI chat completion, also streamed
    GET    /sessions/{id}                         turns and token counts
    POST   /sessions/{id}/finish                  closes it -> the same, with leaves and exact | refused cause
    DELETE /sessions/{id}

Every request needs `Authorization: Bearer <the run's token>`. Fields of a completion request that are not listed below are refused, and so
are sampling settings other than the run's: the trainer could not follow them.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from typing import Any

from aiohttp import web

from miles.core import EnvironmentFault, MilesError, StructureError
from miles.engine import KeyRequired
from miles.session.assemble import assemble_leaves, is_exact
from miles.session.service import ChatReply, Session, SessionBusy, SessionService

log = logging.getLogger(__name__)

FIELDS = frozenset({"messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "user",
                    "tools", "tool_choice"})
MAX_BODY = 64 << 20  # bytes


class SessionServer:
    """Serves one `SessionService`. `await start(port)`, then `url`; `await stop()`."""

    def __init__(self, service: SessionService, token: str):
        self.service, self.url = service, ""
        self._token = token.encode()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int, host: str = "127.0.0.1") -> str:
        """Listen; returns the URL. Raises EnvironmentFault when the port is taken."""
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY)
        app.add_routes([
            web.post("/sessions", self._open), web.post("/sessions/{id}/v1/chat/completions", self._chat), web.get("/sessions/{id}", self._show),
            web.post("/sessions/{id}/finish", self._finish), web.delete("/sessions/{id}", self._delete),
        ])
        # A client that hangs up cancels its handler, which aborts the request in the engine.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as e:
            await self.stop()
            raise EnvironmentFault(f"the session server cannot listen on {host}:{port}: {e}", "a free port", "set engine.port_base to a free range") from e
        self.url = f"http://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- handlers ------------------------------------------------------------------------------------------------------------
    async def _open(self, request: web.Request) -> web.Response:
        body = await _json(request)
        _refuse_unknown(body, {"routing_key", "id"})
        key = body.get("routing_key", uuid.uuid4().hex)
        if not isinstance(key, str) or not isinstance(body.get("id", ""), str):
            raise _BadRequest("routing_key and id are strings", "routing_key")
        session = self.service.open(key, body.get("id"))
        return web.json_response({"id": session.id, "routing_key": session.routing_key, "url": f"{self.url}/sessions/{session.id}/v1"}, status=201)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _json(request)
        _refuse_unknown(body, FIELDS)
        self._check_sampling(body)
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise _BadRequest(f"max_tokens = {limit!r} is not a positive integer", "max_tokens")
        reply = await session.chat(body.get("messages"), limit, body.get("tools"))
        if body.get("stream"):
            return await _stream(request, body, reply)
        return web.json_response(_completion(body, reply))

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(_describe(self._session(request)))

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._session(request)
        answer = _describe(session)
        try:
            leaves = assemble_leaves(session.history)
            answer |= {"leaves": len(leaves), "exact": all(is_exact((c.turn for c in leaf.turns), session.opened_at) for leaf in leaves)}
        except StructureError as e:
            answer["refused"] = e.cause
        self.service.close(session)
        return web.json_response(answer)

    async def _delete(self, request: web.Request) -> web.Response:
        self.service.close(self._session(request))
        return web.Response(status=204)

    # -- checks --------------------------------------------------------------------------------------------------------------
    def _session(self, request: web.Request) -> Session:
        session = self.service.sessions.get(request.match_info["id"])
        if session is None:
            raise _NotFound(f"no open session {request.match_info['id']!r}")
        return session

    def _check_sampling(self, body: dict[str, Any]) -> None:
        wanted = {"n": 1, "temperature": self.service.limits.temperature, "top_p": 1.0, "tool_choice": "auto"}
        for name, value in wanted.items():
            if body.get(name) is not None and body[name] != value:
                raise _BadRequest(f"{name} = {body[name]!r}: this run samples with {value}; send that or leave it out", name)

    @web.middleware
    async def _errors(self, request: web.Request, handler) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), b"Bearer " + self._token):
            return _error(401, "authentication_error", "invalid_api_key", "missing or wrong bearer token; it is in RUN/token")
        try:
            return await handler(request)
        except _BadRequest as e:
            return _error(400, "invalid_request_error", "invalid_value", str(e), e.param)
        except _NotFound as e:
            return _error(404, "invalid_request_error", "session_not_found", str(e))
        except KeyRequired as e:
            return _error(400, "invalid_request_error", "routing_key_required", str(e), "routing_key")
        except SessionBusy as e:
            return _error(409, "conflict_error", "session_busy", str(e))
        except StructureError as e:
            invalid = e.cause == "history:message" or e.cause.startswith("request:")
            return _error(400 if invalid else 409, "invalid_request_error" if invalid else "conflict_error", e.cause, str(e), "messages")
        except EnvironmentFault as e:
            log.warning("session request failed: %s", e)
            return _error(503, "server_error", "engine_unavailable", str(e))
        except MilesError as e:
            return _error(500, "server_error", type(e).__name__, str(e))
        except web.HTTPException as e:
            return _error(e.status, "invalid_request_error", e.reason.lower().replace(" ", "_"), e.reason)


class _BadRequest(Exception):
    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class _NotFound(Exception):
    pass


def _error(status: int, kind: str, code: str, message: str, param: str | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": code, "param": param}}, status=status)


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.text() or "{}")
    except ValueError as e:
        raise _BadRequest(f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise _BadRequest("the body is not a JSON object")
    return body


def _refuse_unknown(body: dict[str, Any], known: set[str] | frozenset[str]) -> None:
    if unknown := sorted(body.keys() - known):
        raise _BadRequest(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}", unknown[0])


def _describe(session: Session) -> dict[str, Any]:
    return {
        "id": session.id, "routing_key": session.routing_key, "weight_version": session.opened_at, "tokens": session.tokens, "retries": session.retries,
        "refused": dict(session.refused), "branched": dict(session.branched),
        "turns": [{"prompt_tokens": len(t.input_ids), "completion_tokens": len(t.output_ids), "cached_tokens": t.cached_tokens,
                   "finish_reason": t.finish_reason} for t in session.turns],
    }


def _completion(body: dict[str, Any], reply: ChatReply) -> dict[str, Any]:
    answer = _envelope(body, "chat.completion")
    answer["choices"] = [{"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": None}]
    answer["usage"] = _usage(reply)
    return answer


def _envelope(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": body.get("model", "miles")}


def _usage(reply: ChatReply) -> dict[str, Any]:
    prompt, sampled, cached = (len(reply.turn.input_ids), len(reply.turn.output_ids), reply.turn.cached_tokens) if reply.turn else (0, 0, 0)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled, "prompt_tokens_details": {"cached_tokens": cached}}


async def _stream(request: web.Request, body: dict[str, Any], reply: ChatReply) -> web.StreamResponse:
    """The finished reply as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    base = _envelope(body, "chat.completion.chunk")
    said = {k: v for k, v in reply.message.items() if k not in ("role", "tool_calls") and v is not None}
    if reply.tool_calls:
        said["tool_calls"] = [{"index": i, **call} for i, call in enumerate(reply.tool_calls)]
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None), (said, None), ({}, reply.finish_reason)]
    for delta, finish in deltas:
        await _event(response, {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        await _event(response, {**base, "choices": [], "usage": _usage(reply)})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _event(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(data)}\n\n".encode())
