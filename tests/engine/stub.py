"""A fast, deterministic stand-in for SGLang's HTTP API, for tests of what sits above the engine. `test_server.py` holds it to the real one."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable

import numpy as np
from aiohttp import web

from miles.engine import ModelShape

TOKEN = "stub-token"


class StubEngine:
    """Answers `/generate` with a reply that depends only on the input ids, a prefix cache per `extra_key`, and the current weight version.

    Tests steer it: the next `replies`, or `length` of the next replies (the stop token comes last unless it is cut), `delay` in seconds, `abort_next`, `fail_next`,
    `break_stream` (the connection breaks after the first event).
    """

    def __init__(self, shape: ModelShape, stop_id: int):
        self.shape, self.stop_id = shape, stop_id
        self.length, self.delay, self.version = 6, 0.0, 0
        self.pace = 0.0
        self.abort_next = self.fail_next = self.break_stream = False
        self.decode: Callable[[list[int]], str] = lambda ids: ""  # for stop texts
        self.replies: list[list[int]] = []  # the next replies, in place of random ones
        self.requests: list[dict] = []
        self.aborted: list[str] = []
        self.url = ""
        self._cache: dict[str, list[list[int]]] = {}

    async def start(self) -> str:
        app = web.Application()
        app.add_routes([
            web.post("/generate", self._generate), web.post("/abort_request", self._abort), web.get("/model_info", self._info),
            web.post("/pause_generation", self._ok), web.post("/continue_generation", self._ok), web.get("/health", self._ok),
            web.post("/update_weight_version", self._set_version),
        ])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)  # it dies, it does not end
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        await self._runner.cleanup()

    def reply_ids(self, input_ids: list[int], limit: int) -> list[int]:
        """`length` - 1 ordinary ids, then the stop token; cut to `limit`."""
        if self.replies:
            return self.replies.pop(0)[:limit]
        seed = int.from_bytes(hashlib.sha256(np.asarray(input_ids, dtype="<i4").tobytes()).digest()[:8], "little")
        ordinary = np.random.default_rng(seed).integers(10, 250, self.length - 1).tolist()
        return [*ordinary, self.stop_id][:limit]

    async def _generate(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        self.requests.append(body)
        if self.fail_next:
            self.fail_next = False
            return web.json_response({"error": {"message": "boom"}}, status=500)
        await asyncio.sleep(self.delay)
        ids, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        out = self.reply_ids(ids, limit)
        finish: dict = {"type": "stop", "matched": self.stop_id} if out[-1] == self.stop_id else {"type": "length", "length": limit}
        if self.abort_next:
            self.abort_next, out, finish = False, out[:2], {"type": "abort", "message": "Aborted"}
        cache = self._cache.setdefault(body.get("extra_key", ""), [])
        cached = max((_common(c, ids[:-1]) for c in cache), default=0)
        cache.append([*ids, *out[:-1]])
        meta = {
            "id": body["rid"], "finish_reason": finish, "prompt_tokens": len(ids), "completion_tokens": len(out), "cached_tokens": cached,
            "weight_version": str(self.version), "weight_versions": [{"version": str(self.version), "start": 0, "end": len(out)}],
            "output_token_logprobs": [[-0.25 - t / 1000, t, None] for t in out],
        }
        text = self.decode(out)
        if ends := [at for s in body["sampling_params"].get("stop", ()) if (at := text.find(s)) >= 0]:  # ends with the token that completes it
            n = next(n for n in range(1, len(out) + 1) if any(s in self.decode(out[:n]) for s in body["sampling_params"]["stop"]))
            out, finish = out[:n], {"type": "stop", "matched": text[min(ends):]}
            meta |= {"completion_tokens": n, "finish_reason": finish, "output_token_logprobs": meta["output_token_logprobs"][:n]}
            meta["weight_versions"][0]["end"] = n
        if body.get("return_routed_experts"):
            everything = np.array([*ids, *out], dtype=np.int32)[:-1]
            per_position = (everything[:, None, None] + np.arange(self.shape.layers)[:, None] + np.arange(self.shape.top_k)) % self.shape.experts
            meta["routed_experts"] = base64.b64encode(per_position[body["routed_experts_start_len"]:].astype("<i4").tobytes()).decode()
        reply = {"text": "", "output_ids": out, "meta_info": meta}
        return await self._stream(request, body, reply) if body.get("stream") else web.json_response(reply)

    async def _stream(self, request: web.Request, body: dict, reply: dict) -> web.StreamResponse:
        """Events that each repeat all tokens so far; the last is the whole reply. `pace` seconds apart."""
        response, every = web.StreamResponse(), body["sampling_params"].get("stream_interval", 1)
        await response.prepare(request)
        for n in range(every, len(reply["output_ids"]), every):
            part = {"text": "", "output_ids": reply["output_ids"][:n], "meta_info": {"id": body["rid"], "finish_reason": None, "completion_tokens": n}}
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            await asyncio.sleep(self.pace)
            if self.break_stream:
                self.break_stream = False
                request.transport.abort()
                return response
        await response.write(b"data: " + json.dumps(reply).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.json_response({})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version), "model_path": "stub"})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = int((await request.json())["new_version"])
        return web.json_response({"success": True, "message": ""})

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})


def _common(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
