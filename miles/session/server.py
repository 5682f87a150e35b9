"""HTTP for harnesses: OpenAI-shaped chat completions over a `SessionService`. A thin shell without logic of its own.

    POST   /sessions                              {"routing_key"?, "id"?}      -> {"id", "routing_key", "url"}
    GET    /sessions                              open sessions, and the load of each engine
    POST   /sessions/{id}/v1/chat/completions     OpenAI chat completion, also streamed (miles.session.openai lists the fields)
    GET    /sessions/{id}/v1/models               the one model
    GET    /sessions/{id}                         turns and token counts
    POST   /sessions/{id}/finish                  closes it -> the same, with leaves and exact | refused cause; {"arrays": true}: and the tokens of each leaf
    DELETE /sessions/{id}

Every request needs `Authorization: Bearer <the run's token>`. A session opened here is durable: each turn is on disk before it is answered, and a server
that was killed and started again continues it. `serve_only` offers one session on a Unix socket, to whoever can open that socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import logging
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from miles.core import EnvironmentFault, MilesError, StructureError
from miles.engine import KeyRequired
from miles.session.assemble import assemble_leaves, is_exact
from miles.session.openai import (
    BadRequest,
    ChatRequest,
    Chunks,
    completion,
    read_request,
    token_logprobs,
)
from miles.session.service import (
    ChatReply,
    Session,
    SessionBusy,
    SessionService,
    TooManySessions,
)

log = logging.getLogger(__name__)

MAX_BODY = 64 << 20  # bytes
BYTES_A_TOKEN = 64  # of a request, at most: what is longer does not fit a session of so many tokens
MAX_CONNECTIONS = 32  # at once to one session on its own socket
RETRY_AFTER_S = 5


def settle_collector() -> None:
    """Let Python's garbage collector pass over what was imported, and come more rarely. With hundreds of open sessions each of its full passes stops
    the loop, and takes about a fifth of the core. Call it once, when a process is set up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


class SessionServer:
    """Serves one `SessionService`. `await start(port)`, then `url`; `await stop()`."""

    def __init__(self, service: SessionService, token: str):
        self.service, self.url = service, ""
        self._token = token.encode()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int, host: str = "127.0.0.1") -> str:
        """Listen; returns the URL. Raises EnvironmentFault when the port is taken."""
        app = web.Application(middlewares=[self._authorized, _errors], client_max_size=MAX_BODY)
        app.add_routes([
            web.post("/sessions", self._open), web.get("/sessions", self._list), web.post("/sessions/{id}/v1/chat/completions", self._chat),
            web.get("/sessions/{id}/v1/models", _models), web.get("/sessions/{id}", self._show), web.post("/sessions/{id}/finish", self._finish),
            web.delete("/sessions/{id}", self._delete),
        ])
        self._runner = await _run(app)
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024).start()
        except OSError as e:
            await self.stop()
            raise EnvironmentFault(f"the session server cannot listen on {host}:{port}: {e}", "a free port", "set engine.port_base to a free range") from e
        self.url = f"http://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextlib.asynccontextmanager
    async def serve_only(self, session: Session, socket: Path) -> AsyncIterator[None]:
        """Offer this session alone, at http://(any host)/v1, on a Unix socket and without a token: who can open the socket may use the session."""
        async def chat(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, session)

        # Who is inside may be hostile: connections and bodies without end would use up the file descriptors and the memory of this whole process.
        app = web.Application(middlewares=[_errors], client_max_size=max(1 << 20, BYTES_A_TOKEN * self.service.limits.max_session_tokens))
        app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", _models)])
        runner = await _run(app)
        listening = await asyncio.get_running_loop().create_unix_server(
            lambda: runner.server() if len(runner.server.connections) < MAX_CONNECTIONS else _Refused(), socket,
            backlog=8)  # also how many are accepted before they are counted
        try:
            yield
        finally:
            listening.close()
            await runner.cleanup()

    # -- handlers ------------------------------------------------------------------------------------------------------------
    async def _open(self, request: web.Request) -> web.Response:
        body = await _json(request)
        _refuse_unknown(body, {"routing_key", "id"})
        key = body.get("routing_key", uuid.uuid4().hex)
        if not isinstance(key, str) or not isinstance(body.get("id", ""), str):
            raise BadRequest("routing_key and id are texts", "routing_key")
        session = await self.service.open_durable(key, body.get("id"))
        return _reply({"id": session.id, "routing_key": session.routing_key, "url": f"{self.url}/sessions/{session.id}/v1"}, 201)

    async def _list(self, request: web.Request) -> web.Response:
        return _reply({"sessions": sorted(self.service.sessions), "engines": {str(r): n for r, n in self.service.engines.loads().items()}})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._session(request))

    async def _answer(self, request: web.Request, session: Session) -> web.StreamResponse:
        asked = read_request(await _json(request), self.service.limits.temperature)
        if asked.stream:
            return await self._stream(request, session, asked)
        reply = await session.chat(asked.messages, asked.max_tokens, asked.tools, stop=asked.stop, seed=asked.seed)
        return _reply(completion(asked, reply, self._logprobs(asked, reply)))

    async def _stream(self, request: web.Request, session: Session, asked: ChatRequest) -> web.StreamResponse:
        """Deltas as they are sampled. The reason why the reply ended, which makes it whole, comes when the turn is on disk."""
        response, chunks = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}), Chunks(asked)
        deltas: asyncio.Queue[dict[str, str] | None] = asyncio.Queue()
        answer = asyncio.ensure_future(session.chat(asked.messages, asked.max_tokens, asked.tools, stop=asked.stop, seed=asked.seed,
                                                    on_delta=deltas.put_nowait))
        answer.add_done_callback(lambda _: deltas.put_nowait(None))
        try:
            first = await deltas.get()
            if first is None:
                answer.result()  # an error before anything was said has its own status
            await response.prepare(request)
            await response.write(chunks.delta({"role": "assistant", "content": ""}))
            while first is not None:
                await response.write(chunks.delta(first))
                first = await deltas.get()
            try:
                reply = answer.result()
                last = chunks.end(reply, self._logprobs(asked, reply))
            except Exception as e:  # noqa: BLE001  logged, and told to the client
                last = chunks.error(describe_error(e)[1])
            await response.write(last)
            await response.write_eof()
            return response
        finally:
            answer.cancel()  # the client hung up: the engine need not go on

    def _logprobs(self, asked: ChatRequest, reply: ChatReply) -> dict[str, Any] | None:
        if not asked.logprobs or reply.turn is None:
            return None
        return token_logprobs([self.service.chat_tokenizer.text_of(i) for i in reply.turn.output_ids.tolist()], reply.turn.logprobs.tolist())

    async def _show(self, request: web.Request) -> web.Response:
        return _reply(_describe(self._session(request)))

    async def _finish(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await _json(request)
        _refuse_unknown(body, {"arrays"})
        answer = _describe(session)
        try:
            leaves = assemble_leaves(session.history)
            answer |= {"leaves": len(leaves), "exact": all(is_exact((c.turn for c in leaf.turns), session.opened_at) for leaf in leaves)}
            if body.get("arrays"):
                answer["arrays"] = [{name: getattr(leaf.arrays, name).tolist() for name in ("tokens", "loss_mask", "logprobs", "versions")} for leaf in leaves]
        except StructureError as e:
            answer["refused"] = e.cause
        # The answer goes out before the session is closed: a client that did not get it, because its connection broke or the server was killed, asks again.
        response = _reply(answer)
        await response.prepare(request)
        await response.write_eof()
        await self.service.forget(session)
        return response

    async def _delete(self, request: web.Request) -> web.Response:
        await self.service.forget(self._session(request))
        return web.Response(status=204)

    def _session(self, request: web.Request) -> Session:
        session = self.service.sessions.get(request.match_info["id"])
        if session is None:
            raise _NotFound(f"no open session {request.match_info['id']!r}")
        return session

    @web.middleware
    async def _authorized(self, request: web.Request, handler) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), b"Bearer " + self._token):
            return _reply(_error("authentication_error", "invalid_api_key", "missing or wrong bearer token; it is in RUN/token"), 401)
        return await handler(request)


class _NotFound(MilesError):
    pass


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.abort()


async def _run(app: web.Application) -> web.AppRunner:
    # A client that hangs up cancels its handler, which aborts the request in the engine.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, read_bufsize=1 << 20)
    await runner.setup()
    return runner


@web.middleware
async def _errors(request: web.Request, handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as e:
        return _reply(_error("invalid_request_error", e.reason.lower().replace(" ", "_"), e.reason), e.status)
    except ConnectionError:  # the client is gone
        raise
    except Exception as e:  # noqa: BLE001  likewise
        status, body = describe_error(e)
        return _reply(body, status, {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {})


def describe_error(e: Exception) -> tuple[int, dict[str, Any]]:
    """(status, body) in OpenAI's shape. What nobody raised on purpose is logged with its traceback."""
    match e:
        case BadRequest():
            return 400, _error("invalid_request_error", "invalid_value", str(e), e.param)
        case _NotFound():
            return 404, _error("invalid_request_error", "session_not_found", str(e))
        case KeyRequired():
            return 400, _error("invalid_request_error", "routing_key_required", str(e), "routing_key")
        case SessionBusy():
            return 409, _error("conflict_error", "session_busy", str(e))
        case TooManySessions():
            return 429, _error("rate_limit_error", "too_many_sessions", str(e))
        case StructureError() if e.cause == "history:message" or e.cause.startswith("request:"):
            return 400, _error("invalid_request_error", e.cause, str(e), "messages")
        case StructureError():  # 422, because OpenAI's clients send what was answered with 409 again, and this can never be right
            return 422, _error("invalid_request_error", e.cause, str(e), "messages")
        case EnvironmentFault():
            log.warning("session request failed: %s", e)
            return 503, _error("server_error", "engine_unavailable", str(e))
        case _:
            log.error("session request failed", exc_info=e)
            return 500, _error("server_error", type(e).__name__, str(e))


def _error(kind: str, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


def _reply(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read() or b"{}")
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the body is not JSON, or nested too deeply: {e}") from e
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _refuse_unknown(body: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(body.keys() - known):
        raise BadRequest(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}", unknown[0])


async def _models(request: web.Request) -> web.Response:
    return _reply({"object": "list", "data": [{"id": "miles", "object": "model", "created": 0, "owned_by": "miles"}]})


def _describe(session: Session) -> dict[str, Any]:
    return {
        "id": session.id, "routing_key": session.routing_key, "weight_version": session.opened_at, "tokens": session.tokens, "retries": session.retries,
        "aborted": session.aborted,
        "moves": session.moves, "refused": dict(session.refused), "branched": dict(session.branched),
        "turns": [{"prompt_tokens": len(t.input_ids), "completion_tokens": len(t.output_ids), "cached_tokens": t.cached_tokens,
                   "finish_reason": t.finish_reason} for t in session.turns],
    }
