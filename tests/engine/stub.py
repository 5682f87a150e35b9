"""A fast, deterministic stand-in for SGLang's HTTP API, for tests of what sits above the engine. `test_engine_real.py` holds it to the real one.

`StubEngine` runs in the process of a test. `python -m tests.engine.stub` is a process of its own, started by `EngineProcess` in SGLang's place with the
same arguments; it starts in a second, holds the weights that it is given, and plays tasks by `Commands`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from aiohttp import web

from miles.core import StructureError
from miles.engine import ModelShape
from miles.engine.digest import VOCABULARY_ROWS, combined_checksum, fusion_plan
from miles.engine.handover import PATCH_FORMAT, READY, REHEARSE

TOKEN = "stub-token"


class StubEngine:
    """Answers `/generate` with a reply that depends only on the input ids, a prefix cache per `extra_key`, and the current weight version.

    Tests steer it: the next `replies`, or `length` of the next replies (the stop token comes last unless it is cut), `delay` in seconds, `abort_next`, `fail_next`,
    `break_stream` (the connection breaks after the first event), `hangs` (it is not well).
    """

    def __init__(self, shape: ModelShape, stop_id: int, token: str = TOKEN):
        self.shape, self.stop_id, self.token = shape, stop_id, token
        self.length, self.delay, self.version = 6, 0.0, 0
        self.pace = self.token_s = 0.0
        self.answer: Callable[[dict], list[int]] = lambda body: self.reply_ids(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        self.say: Callable[..., None] = lambda event, **what: None
        self.weights: dict[str, np.ndarray] = {}  # by Hugging Face name
        self.tied = False
        self.abort_next = self.fail_next = self.break_stream = False
        self.hangs = False
        self.speculates = False  # one draft token a pass of the model, accepted as often as the reply has room
        self.decode: Callable[[list[int]], str] = lambda ids: ""  # for stop texts
        self.replies: list[list[int]] = []  # the next replies, in place of random ones
        self.requests: list[dict] = []
        self.aborted: list[str] = []
        self.url = ""
        self._cache: dict[str, list[list[int]]] = {}
        self._running: dict[str, dict] = {}  # rid -> body
        self._go_on = asyncio.Event()  # not while paused
        self._go_on.set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        app = web.Application(middlewares=[self._authorized], client_max_size=1 << 30)
        app.add_routes([
            web.post("/generate", self._generate), web.post("/abort_request", self._abort), web.get("/model_info", self._info),
            web.post("/pause_generation", self._pause), web.post("/continue_generation", self._continue), web.get("/health", self._health),
            web.post("/update_weight_version", self._set_version), web.post("/update_weights_from_disk", self._update_from_disk),
            web.post("/weights_checker", self._checksums), web.post("/flush_cache", self._flush),
        ])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)  # it dies, it does not end
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
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

    @web.middleware
    async def _authorized(self, request: web.Request, handler) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._running[body["rid"]] = body
        try:
            return await self._answer(request, body)
        finally:
            del self._running[body["rid"]]

    async def _sample(self, body: dict, out: list[int]) -> tuple[list[int], list[dict]]:
        """The tokens of `out`, `token_s` seconds apart, up to an abort; and the weights that each was sampled with, as spans."""
        versions = []
        for _ in out:
            await self._go_on.wait()
            if body.get("aborted"):
                break
            versions.append(self.version)
            if self.token_s:
                await asyncio.sleep(self.token_s)
        bounds = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
        spans = [{"version": str(versions[a]), "start": a, "end": b} for a, b in zip(bounds[:-1], bounds[1:], strict=True) if b > a]
        return out[: len(versions)], spans

    async def _answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        self.requests.append(body)
        if self.fail_next:
            self.fail_next = False
            return web.json_response({"error": {"message": "boom"}}, status=500)
        await asyncio.sleep(self.delay)
        ids, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        whole = self.answer(body)[:limit]
        self.say("generate", version=self.version)
        out, spans = await self._sample(body, whole)
        finish: dict = {"type": "stop", "matched": self.stop_id} if out and out[-1] == self.stop_id else {"type": "length", "length": limit}
        if self.abort_next or len(out) < len(whole):
            self.abort_next, out, finish = False, out[:2] if self.abort_next else out, {"type": "abort", "message": "Aborted"}
            spans = [{**s, "end": min(s["end"], len(out))} for s in spans if s["start"] < len(out)]
        cache = self._cache.setdefault(body.get("extra_key", ""), [])
        cached = max((_common(c, ids[:-1]) for c in cache), default=0)
        cache.append([*ids, *out[:-1]])
        meta = {
            "id": body["rid"], "finish_reason": finish, "prompt_tokens": len(ids), "completion_tokens": len(out), "cached_tokens": cached,
            "weight_version": str(self.version), "weight_versions": spans,
            "output_token_logprobs": [[-0.25 - t / 1000, t, None] for t in out],
        }
        text = self.decode(out)
        if ends := [at for s in body["sampling_params"].get("stop", ()) if (at := text.find(s)) >= 0]:  # ends with the token that completes it
            n = next(n for n in range(1, len(out) + 1) if any(s in self.decode(out[:n]) for s in body["sampling_params"]["stop"]))
            out, finish = out[:n], {"type": "stop", "matched": text[min(ends):]}
            meta |= {"completion_tokens": n, "finish_reason": finish, "output_token_logprobs": meta["output_token_logprobs"][:n]}
            meta["weight_versions"] = [{**s, "end": min(s["end"], n)} for s in spans if s["start"] < n]
        if self.speculates and len(out) > 1:  # the first token comes from the prompt's pass
            passes = len(out) // 2
            meta |= {"spec_verify_ct": passes, "spec_num_proposed_drafts": passes, "spec_num_correct_drafts": len(out) - 1 - passes}
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
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        for running, body in self._running.items():
            body["aborted"] = body.get("aborted") or running.startswith(rid)
        return web.json_response({})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version), "model_path": "stub"})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = int((await request.json())["new_version"])
        return web.json_response({"success": True, "message": ""})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.hangs else 200)

    async def _pause(self, request: web.Request) -> web.Response:
        self._go_on.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self._go_on.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_from_disk(self, request: web.Request) -> web.Response:
        from safetensors.numpy import load_file

        body = await request.json()
        if body["load_format"] == PATCH_FORMAT:
            if why := self._apply_patch(Path(body["model_path"])):
                return web.json_response({"success": False, "message": why, "num_paused_requests": 0})
        else:
            for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                self.weights |= load_file(file)
        self.version = int(body["weight_version"])
        self.say("weights", version=self.version)
        return web.json_response({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    def _apply_patch(self, path: Path, rehearsal: bool = False) -> str:
        """Why it was refused."""
        import torch

        from miles.weights.patch import Patch

        try:
            state, _ = Patch(path).apply({n: torch.from_numpy(w.copy()) for n, w in self.weights.items()})
        except StructureError as e:
            return str(e)
        if not rehearsal:
            self.weights = {n: t.numpy() for n, t in state.items()}
        return ""

    async def _checksums(self, request: web.Request) -> web.Response:
        if (action := (await request.json())["action"]).startswith(REHEARSE):
            said = self._apply_patch(Path(action.removeprefix(REHEARSE)), rehearsal=True) or READY
            return web.json_response({"success": True, "message": "", "ranks": [{"checksums": {"rehearsal": said}, "per_gpu_checksum": said}]})
        found = checksums(self.weights, self.tied)
        ranks = [{"checksums": found, "per_gpu_checksum": combined_checksum(found)}]
        return web.json_response({"success": True, "message": "", "ranks": ranks})

    async def _flush(self, request: web.Request) -> web.Response:
        if self._running:
            return web.Response(text="Flush cache failed.", status=400)
        self._cache.clear()
        return web.Response(text="Cache flushed.")


def _common(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def checksums(weights: Mapping[str, np.ndarray], tied: bool) -> dict[str, str]:
    """What SGLang on a CPU says of these float32 weights."""
    out = {}
    for target, names in fusion_plan(weights, tied=tied).items():
        sha = hashlib.sha256()
        for name in names:
            sha.update(np.ascontiguousarray(weights[name]))
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                sha.update(bytes(-len(weights[name]) % VOCABULARY_ROWS * weights[name][0].nbytes))
        out[target] = sha.digest()[:8].hex()
    return out


class Commands:
    """Plays a task with two kinds of replies, `echo DIGIT >> out` and `DONE`. Which one is a function of the number of the sample in its group and of
    the input ids: equal on whichever engine, at whatever time and under whatever weights it is asked for, and different between the samples of a group."""

    def __init__(self, tokenizer, stop_id: int):
        self._tokenizer, self._stop_id = tokenizer, stop_id

    def __call__(self, body: dict) -> list[int]:
        sample = body["routing_key"].rpartition("s")[2]
        seed = int.from_bytes(hashlib.sha256(sample.encode() + np.asarray(body["input_ids"], "<i4").tobytes()).digest()[:8], "little")
        text = "DONE" if seed % 3 == 0 else f"echo {seed // 3 % 10} >> out"
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._stop_id]


async def serve(args: argparse.Namespace, token: str) -> None:
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = Path(args.model_path)
    config = json.loads((folder / "config.json").read_text())
    stub = StubEngine(ModelShape.from_folder(folder), config["eos_token_id"], token)
    stub.answer = Commands(Tokenizer.from_file(str(folder / "tokenizer.json")), stub.stop_id)
    stub.tied, stub.version = config["tie_word_embeddings"], int(args.weight_version)
    stub.token_s = float(os.environ.get("MILES_STUB_TOKEN_S", "0.002"))
    stub.say = lambda event, **what: print(json.dumps({"event": event, "time": time.time(), **what}), flush=True)
    for file in sorted(folder.glob("*.safetensors")):
        stub.weights |= load_file(file)
    stub.say("start", version=stub.version)
    await stub.start(args.host, int(args.port))
    await asyncio.Event().wait()


def main() -> None:
    from miles.engine.launch import PARENT_ENV, TOKEN_ENV, die_with_parent

    die_with_parent(int(os.environ.pop(PARENT_ENV)))
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "port", "weight-version"):
        parser.add_argument(f"--{name}", required=True)
    asyncio.run(serve(parser.parse_known_args()[0], Path(os.environ[TOKEN_ENV]).read_text().strip()))


if __name__ == "__main__":
    main()
