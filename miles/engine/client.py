"""One engine over HTTP: generation by token ids, pauses, weight updates, checksums."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec
import numpy as np

from miles.core import Drafts, EnvironmentFault, MilesError, StructureError, Turn
from miles.engine.command import ModelShape
from miles.engine.handover import PATCH_FORMAT, READY, REHEARSE, WORKING, handover_folder, no_room, told
from miles.engine.params import Parameter, read_parameters
from miles.engine.wire import Sampling, parse_reply, request_body, without_routes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PauseMode = Literal["in_place", "retract"]
CONTROL_TIMEOUT_S = 600.0
REHEARSAL_ASK_S, REHEARSAL_LOOK_S = 0.5, 0.002  # the engine; for what it says unasked
CONVERTED = ({"float64", "float32", "float16", "bfloat16"},
             {"int64", "int32"})  # a packed weight's shape, which folders have in either
KEEP_ALIVE_S = 2.0
"""An idle connection is used again for this long. The server closes it after 5 s (uvicorn's default); a request written in that moment fails, and a living
engine would be taken for a dead one in the middle of an update."""


STREAM_TOKENS = 8  # tokens between two events of a streamed reply: each event of SGLang repeats all before it


class EngineGone(EnvironmentFault):
    """The engine does not answer at all: nobody listens, or the connection broke. Another engine can take the request."""


class TurnOverdue(EnvironmentFault):
    """A reply did not come within its deadline: the engine is slow, or hangs."""


class KeyRequired(MilesError):
    """A generation request without a routing key: it would have to be sent somewhere at random, and its cached prefix would be lost."""


class _Event(msgspec.Struct):
    """What is read of a streamed event before the last: not its log-probabilities, which are many times its tokens."""

    output_ids: list[int] = []
    error: Any = None


class EngineClient:
    """Speaks to one SGLang server. All methods raise EnvironmentFault when it does not answer, or answers with an error.

    Use it in one event loop; `await close()` at the end. `version` is the weight version the engine serves, as far as this client knows:
    -1 until `refresh_version` has asked or an update has told.
    """

    def __init__(self, url: str, token: str, model_folder: str | Path, *, max_context: int):
        self.url, self.max_context = url.rstrip("/"), max_context
        self.shape, self._model_folder = ModelShape.from_folder(model_folder), model_folder
        self.version = -1
        self.paused = False  # by this client
        self.active = 0  # generation requests now in flight
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.drafts = Drafts()
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None
        self._nonce, self._counter = secrets.token_hex(4), itertools.count()
        self._wire_rids: dict[str, str] = {}  # caller's request id -> the one the server knows

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The model's tensors by Hugging Face name. Read when first asked for: a client that only generates needs none."""
        return read_parameters(self._model_folder)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- generation ----------------------------------------------------------------------------------------------------------
    async def generate(
        self, rid: str, input_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, routing_key: str, routes_from: int = 0,
        extra_key: str = "", dp_rank: int | None = None, deadline_s: float = 300.0, on_tokens: Callable[[list[int]], None] | None = None,
        input_json: msgspec.Raw | None = None,
    ) -> Turn:
        """Sample one continuation. `routes_from`: first position whose experts are recorded; `extra_key`: namespace of the prefix cache;
        `on_tokens`: called every few tokens with all that were sampled so far (what counts is the record that is returned); `input_json`: `input_ids`
        as a JSON array, from who has it already.

        A reply whose finish_reason is "abort" is returned as it is. Raises KeyRequired without a routing key, StructureError for a request
        the engine must not see or a reply that contradicts itself, TurnOverdue (after aborting the request) past `deadline_s`, and
        EngineGone when nobody answers.
        """
        if not routing_key:
            raise KeyRequired(f"generation request {rid} has no routing key", "a key, the same for all turns of a session",
                              "pass the session's key; Miles never spreads unkeyed requests over engines")
        # The server aborts by prefix of the id and dies of a duplicate one: neither may ever happen between two of ours.
        wire_rid = f"{self._nonce}.{next(self._counter)}.{rid}"
        body = request_body(wire_rid, input_ids, sampling, self.shape, max_context=self.max_context, routing_key=routing_key,
                            routes_from=routes_from, extra_key=extra_key, dp_rank=dp_rank, input_json=input_json)
        began = time.monotonic()
        self.active += 1
        self._wire_rids[rid] = wire_rid
        try:
            async with asyncio.timeout(deadline_s):
                reply = await (self._post("/generate", body, timeout_s=None) if on_tokens is None else self._streamed(body, on_tokens))
        except TimeoutError:
            await self._abort(wire_rid)
            raise TurnOverdue(f"request {rid} on {self.url} took longer than {deadline_s:.3g} s and was aborted", f"a reply within {deadline_s:.3g} s",
                                   "raise rollout.turn_deadline_s, or lower rollout.in_flight") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(wire_rid))
            raise
        finally:
            self.active -= 1
            self._wire_rids.pop(rid, None)
        try:
            turn = parse_reply(body, np.asarray(input_ids, dtype=np.int32), reply, self.shape, time.monotonic() - began)
        except StructureError as e:
            e.evidence["reply"] = without_routes(reply)
            raise
        self.generated_tokens += len(turn.output_ids)
        self.prompt_tokens += len(turn.input_ids)
        self.cached_tokens += turn.cached_tokens
        self.drafts += turn.drafts
        return turn

    async def abort(self, rid: str) -> None:
        """End a running request; its `generate` returns what was sampled so far with finish_reason "abort". Unknown ids are ignored."""
        if wire_rid := self._wire_rids.get(rid):
            await self._post("/abort_request", {"rid": wire_rid})

    async def _abort(self, wire_rid: str) -> None:
        try:
            await self._post("/abort_request", {"rid": wire_rid}, timeout_s=10.0)
        except EnvironmentFault as fault:
            log.warning("could not abort %s: %s", wire_rid, fault)

    # -- pauses and weights --------------------------------------------------------------------------------------------------
    async def pause(self, mode: PauseMode) -> None:
        """Hold all requests, also new ones. `in_place`: they keep their KV cache. `retract`: they are put back and prefilled again."""
        await self._post("/pause_generation", {"mode": mode})
        self.paused = True

    async def resume(self) -> None:
        """Let held requests go on."""
        await self._post("/continue_generation", {})
        self.paused = False

    async def release_memory(self, parts: Sequence[str]) -> None:
        """Give GPU memory back: of "kv_cache", "weights", "cuda_graph". What it held is lost, the prefix cache is emptied. Pause with "retract" before: the
        engine dies of a release while a request runs; those put back are prefilled after `resume`."""
        await self._post("/release_memory_occupation", {"tags": list(parts)})

    async def take_memory(self, parts: Sequence[str]) -> None:
        """Take the memory of `parts` again. Weights are undefined until all their tensors have been given again."""
        await self._post("/resume_memory_occupation", {"tags": list(parts)})

    async def update_tensors(self, tensors: Mapping[str, torch.Tensor], version: int, *, flush: bool = False) -> None:
        """Put Hugging Face tensors (any subset of the model's) into the engine and call the result `version`.

        They are handed over as a safetensors file in shared memory, read by the engine and removed. Pause first, or the update waits for running requests to
        end.
        Raises StructureError, before anything changed, for a name, shape or dtype the model does not have: the engine would report success
        for an unknown name and die of a wrong shape.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.check_tensors({name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()})
        folder = handover_folder()
        try:
            await asyncio.to_thread(save_file, {name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
            await self.update_from_folder(folder, version, flush=flush)
        except (OSError, SafetensorError) as e:
            raise no_room(sum(t.nbytes for t in tensors.values()), e) from e
        finally:
            shutil.rmtree(folder)

    async def update_from_folder(self, folder: str | Path, version: int, *, flush: bool = False) -> None:
        """Load the safetensors of a folder the engine can read and call the result `version`. The caller has checked names and shapes."""
        await self._post("/update_weights_from_disk", {
            "model_path": str(folder), "load_format": "safetensors", "weight_version": str(version), "flush_cache": flush, "abort_all_requests": False,
        })
        self.version = version

    async def rehearse_patch(self, path: str | Path) -> None:
        """Have the engine verify what a patch file would make of its memory while it generates, so that `apply_patch` only has to do it. Raises
        EnvironmentFault when that is not what the trainer has."""
        while (said := (await self._post("/weights_checker", {"action": f"{REHEARSE}{path}"}))["ranks"][0]["checksums"]["rehearsal"]) == WORKING:
            again = time.monotonic() + REHEARSAL_ASK_S
            while not told(path).exists() and time.monotonic() < again:
                await asyncio.sleep(REHEARSAL_LOOK_S)
        if said != READY:
            raise EnvironmentFault(f"{self.url} refused a patch: {said}", "a patch to what it holds", "the engine is restarted from a keyframe")

    async def apply_patch(self, path: str | Path, version: int, *, flush: bool = False) -> None:
        """Have the engine apply a patch file to its own memory (miles.engine.inplace) and call the result `version`. Pause first. After a refusal it holds
        what it held."""
        await self._post("/update_weights_from_disk", {
            "model_path": str(path), "load_format": PATCH_FORMAT, "weight_version": str(version), "flush_cache": flush, "abort_all_requests": False,
        })
        self.version = version

    async def init_broadcast(self, address: str, port: int, *, rank: int, world_size: int, group: str, backend: str) -> None:
        """Join a broadcast group whose rank 0 listens on `address:port`; this engine's processes take the ranks from `rank` on."""
        await self._post("/init_weights_update_group", {
            "master_address": address, "master_port": port, "rank_offset": rank, "world_size": world_size, "group_name": group, "backend": backend,
        })

    async def update_from_broadcast(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], version: int, *, group: str, flush: bool = False,
    ) -> None:
        """Receive these tensors, in this order, from rank 0 of the group, one broadcast each. `dtypes` like "float32". Raises like `update_tensors`."""
        self.check_tensors({n: (tuple(s), d) for n, d, s in zip(names, dtypes, shapes, strict=True)})
        await self._post("/begin_weight_update", {"selector": "all"})
        await self._post("/update_weights_from_distributed", {
            "names": list(names), "dtypes": list(dtypes), "shapes": [list(s) for s in shapes], "group_name": group, "flush_cache": flush,
            "abort_all_requests": False, "weight_version": str(version),
        })
        await self._post("/end_weight_update", {})
        self.version = version

    async def destroy_broadcast(self, group: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group})

    def check_tensors(self, described: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Raises StructureError unless every name -> (shape, dtype) is one of the model's parameters. Another one in the same
        line of `CONVERTED` is fine: the engine converts it to its own. What is not there holds codes or scales of a quantized weight, and must be what it is."""
        for name, (shape, dtype) in described.items():
            known = self.parameters.get(name)
            if known is None:
                raise StructureError(f"weights: no parameter {name!r} in the model", f"one of its {len(self.parameters)} Hugging Face names",
                                     "check the weight mapping of this family", cause="weights:name")
            if known.shape != shape:
                raise StructureError(f"weights: {name} has shape {shape}", f"{known.shape}", "check the weight mapping of this family", cause="weights:shape")
            if dtype != known.dtype and not any({dtype, known.dtype} <= alike for alike in CONVERTED):
                raise StructureError(f"weights: {name} is {dtype}", known.dtype, "check the weight mapping of this family", cause="weights:dtype")

    async def set_version(self, version: int) -> None:
        """Rename the weights in the engine (after a restart with newer ones) without touching requests."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self.version = version

    async def refresh_version(self) -> int:
        """Ask the engine which weight version it serves."""
        self.version = int((await self.info())["weight_version"])
        return self.version

    async def checksums(self) -> dict[str, str]:
        """Checksum of every parameter as it lies in the engine's memory (one process; see miles.engine.digest). Engine's own, fused names."""
        reply = await self._post("/weights_checker", {"action": "checksum"})
        if len(reply["ranks"]) != 1:
            raise EnvironmentFault(f"{self.url} has {len(reply['ranks'])} processes, each with a part of the weights", "one", "see miles.engine.digest")
        return reply["ranks"][0]["checksums"]

    # -- the rest ------------------------------------------------------------------------------------------------------------
    async def flush(self) -> None:
        """Empty the prefix cache. Refused by the engine while requests run."""
        await self._post("/flush_cache", {})

    async def info(self) -> dict[str, Any]:
        """SGLang's /model_info: model_path, weight_version, ..."""
        return await self._request("GET", "/model_info", None, CONTROL_TIMEOUT_S)

    async def health(self, timeout_s: float) -> None:
        """Have the engine generate a token. Raises EnvironmentFault when it does not, within this time or its own 20 seconds; a paused one does not either."""
        await self._request("GET", "/health", None, timeout_s)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = CONTROL_TIMEOUT_S) -> Any:
        return await self._request("POST", path, body, timeout_s)

    async def _streamed(self, body: dict[str, Any], on_tokens: Callable[[list[int]], None]) -> Any:
        """`/generate` as server-sent events. The last one is the whole reply, as it comes without streaming."""
        sampling = {**body["sampling_params"], "stream_interval": STREAM_TOKENS}
        last = b""
        async with self._send("POST", "/generate", {**body, "stream": True, "sampling_params": sampling}, None) as response:
            async for event in _events(response.content):
                if event == b"[DONE]":
                    continue
                said, last = msgspec.json.decode(event, type=_Event), event
                if said.error is not None:
                    raise EnvironmentFault(f"{self.url}/generate: {said.error}", "a reply", "read the engine's log")
                on_tokens(said.output_ids)
        reply = msgspec.json.decode(last) if last else None
        if reply is None or reply["meta_info"].get("finish_reason") is None:
            raise EngineGone(f"{self.url}/generate: the stream broke off", "an event with a finish reason", "the engine may have died: read its log")
        return reply

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> Any:
        async with self._send(method, path, body, timeout_s) as response:
            data = await response.read()
        answer = msgspec.json.decode(data) if data.startswith((b"{", b"[")) else data.decode()
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EnvironmentFault(f"{method} {self.url}{path} answered {str(answer)[:800]}", "success", "read the engine's log")
        return answer

    @contextlib.asynccontextmanager
    async def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))
        sent = {} if body is None else {"data": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}
        try:
            async with self._http.request(method, self.url + path, timeout=aiohttp.ClientTimeout(total=timeout_s), **sent) as response:
                if response.status >= 400:
                    raise EnvironmentFault(f"{method} {self.url}{path} answered {response.status}: {(await response.text())[:800]}", "success",
                                           "read the engine's log")
                yield response
        except (aiohttp.ClientError, ConnectionError) as e:
            raise EngineGone(f"{method} {self.url}{path} failed: {e!r}", "an engine that answers", "the engine may have died: read its log") from e
        except TimeoutError as e:
            if timeout_s is None:
                raise  # the caller's own deadline
            raise EnvironmentFault(f"{method} {self.url}{path} did not answer within {timeout_s:g} s", "an answer", "read the engine's log") from e


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events. By hand, because a line with the routes of a long prompt is longer than aiohttp reads as one."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        parts.append(chunk)
        if b"\n\n" in chunk or chunk.startswith(b"\n"):  # the two may come apart
            *whole, rest = b"".join(parts).split(b"\n\n")
            parts = [rest]
            for event in whole:
                yield event.removeprefix(b"data: ")
