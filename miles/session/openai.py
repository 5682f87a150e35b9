"""OpenAI's chat completions on the wire, as pure functions: what a request may say, and how a reply is written."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from miles.core import MilesError

MAX_STOPS = 4  # OpenAI's limit
SEEDS = 1 << 63  # SGLang puts them into an int64 tensor


class BadRequest(MilesError):
    """A request that says something it may not. `param`: the field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class ChatRequest(msgspec.Struct, frozen=True):
    """What a request asks for. Fields that would change the distribution are checked against the run's and not kept."""

    messages: Any  # checked by the session
    model: str = "miles"
    tools: Any = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False


READ = frozenset({"messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "tools", "stop", "seed", "logprobs"})
FIXED = {"n": 1, "top_p": 1.0, "tool_choice": "auto", "presence_penalty": 0, "frequency_penalty": 0, "top_logprobs": 0, "logit_bias": {},
         "response_format": {"type": "text"}}
"""Fields that may have only this value: the trainer could not follow another distribution. `temperature` is the run's."""
IGNORED = frozenset({"user", "metadata", "store", "parallel_tool_calls", "service_tier", "prompt_cache_key", "safety_identifier", "verbosity"})
"""Fields that ask for nothing that changes what is sampled."""


def read_request(body: dict[str, Any], temperature: float) -> ChatRequest:
    """Raises BadRequest for a field that is not listed above, or whose value cannot be had here. A field that is null counts as left out."""
    body = {name: value for name, value in body.items() if value is not None}
    known = READ | FIXED.keys() | IGNORED | {"temperature"}
    if unknown := sorted(body.keys() - known):
        raise BadRequest(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}", unknown[0])
    for name, value in {**FIXED, "temperature": temperature}.items():
        if name in body and body[name] != value:
            raise BadRequest(f"{name} = {body[name]!r}: this run samples with {value}; send that or leave it out", name)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise BadRequest(f"max_tokens = {limit!r} is not a positive integer", "max_tokens")
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or len(stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise BadRequest(f"stop = {stop!r:.80} is not a text or a list of at most {MAX_STOPS} texts", "stop")
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not -SEEDS <= seed < SEEDS):
        raise BadRequest(f"seed = {seed!r} is not an integer of 64 bits with sign", "seed")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not isinstance(body.get("model") or "", str):
        raise BadRequest("stream_options is an object and model a text", "stream_options")
    return ChatRequest(body.get("messages"), body.get("model") or "miles", body.get("tools"), limit, tuple(stop), seed, bool(body.get("stream")),
                       bool(options.get("include_usage")), bool(body.get("logprobs")))


def completion(request: ChatRequest, reply: Any, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {**_envelope(request, "chat.completion"), "usage": usage(reply),
            "choices": [{"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": logprobs}]}


class Chunks:
    """The events of one streamed reply: `delta`, ..., `end`."""

    def __init__(self, request: ChatRequest):
        self._request, self._base = request, _envelope(request, "chat.completion.chunk")

    def delta(self, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
        return self._event({**self._base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]})

    def end(self, reply: Any, logprobs: dict[str, Any] | None) -> bytes:
        """What comes when the reply is whole: its calls, the reason why it ended, what it used."""
        calls = [{"index": i, **call} for i, call in enumerate(reply.tool_calls)]
        said = self.delta({"tool_calls": calls}) if calls else b""
        said += self.delta({}, reply.finish_reason, logprobs)
        if self._request.include_usage:
            said += self._event({**self._base, "choices": [], "usage": usage(reply)})
        return said + b"data: [DONE]\n\n"

    @staticmethod
    def error(body: dict[str, Any]) -> bytes:
        """An error after the reply had begun: its status can no longer say so."""
        return Chunks._event(body) + b"data: [DONE]\n\n"

    @staticmethod
    def _event(data: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(data) + b"\n\n"


def usage(reply: Any) -> dict[str, Any]:
    prompt, sampled, cached = (len(reply.turn.input_ids), len(reply.turn.output_ids), reply.turn.cached_tokens) if reply.turn else (0, 0, 0)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled, "prompt_tokens_details": {"cached_tokens": cached}}


def token_logprobs(texts: list[str], logprobs: list[float]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a choice: every sampled token, the stop token too."""
    return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in zip(texts, logprobs, strict=True)]}


def _envelope(request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": request.model}
