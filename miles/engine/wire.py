"""SGLang's `/generate` on the wire, as pure functions: request body from token ids, `Turn` from a reply.

Facts of SGLang 0.5.23 that this file relies on (each is tested against the real server): `output_ids` includes the stop token and its
log-probability; log-probabilities are those of the distribution after temperature; `routed_experts` is base64 int32 of
[prompt + completion - 1 - start, all layers, top_k]; `weight_versions` are spans over the output tokens. Read from its source and not tested (a CPU engine does not
speculate): `spec_verify_ct`, `spec_num_proposed_drafts` and `spec_num_correct_drafts` are there when drafts of the request were checked, and count that.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from miles.core import Drafts, StructureError, Turn
from miles.engine.command import ModelShape


@dataclass(frozen=True)
class Sampling:
    """How one turn is sampled. Nothing that cuts the distribution (top-k, top-p, penalties) exists here: the trainer could not follow."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # texts that end the turn; their tokens are sampled and stay in the record
    seed: int | None = None  # obeyed by an engine in deterministic mode alone
    ignore_eos: bool = False
    min_new_tokens: int = 0


def request_body(
    rid: str, input_ids: Sequence[int] | np.ndarray, sampling: Sampling, shape: ModelShape, *, max_context: int, routing_key: str,
    routes_from: int = 0, extra_key: str = "", dp_rank: int | None = None, input_json: msgspec.Raw | None = None,
) -> dict[str, Any]:
    """JSON body of `/generate`. `routes_from`: first position whose experts are wanted. `extra_key`: namespace of the prefix cache. `input_json`: the
    same ids as a JSON array, from who has it already.

    Raises StructureError for what the server would answer with an error or die of: an id outside the vocabulary, an empty or too long input.
    """
    ids = np.asarray(input_ids)
    if not len(ids):
        raise StructureError(f"request {rid}: no input token", "at least one", cause="request:empty")
    if ids.min() < 0 or ids.max() >= shape.vocab_size:
        bad = ids[(ids < 0) | (ids >= shape.vocab_size)][0]
        raise StructureError(f"request {rid}: token id {bad}", f"0 <= id < {shape.vocab_size}, the model's vocabulary",
                             "check that tokenizer and model belong together", cause="request:vocabulary")
    if sampling.max_new_tokens < 1 or len(ids) + sampling.max_new_tokens > max_context:
        raise StructureError(f"request {rid}: {len(ids)} input tokens and {sampling.max_new_tokens} to sample", f"at least 1 to sample, {max_context} together",
                             "lower rollout.max_session_tokens or raise model.max_context", cause="request:length")
    if not 0 <= routes_from < len(ids):
        raise StructureError(f"request {rid}: routes from position {routes_from}", f"0 .. {len(ids) - 1}", cause="request:routes")
    body: dict[str, Any] = {
        "rid": rid, "input_ids": ids.tolist() if input_json is None else input_json, "return_logprob": True, "logprob_start_len": -1, "routing_key": routing_key,
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens, "min_new_tokens": sampling.min_new_tokens, "temperature": sampling.temperature,
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": list(sampling.stop_token_ids), "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False, "no_stop_trim": True,
        },
    }
    if sampling.stop:
        body["sampling_params"]["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        body["sampling_params"]["sampling_seed"] = sampling.seed
    if extra_key:
        body["extra_key"] = extra_key
    if shape.moe_layers:
        body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
    if dp_rank is not None:
        body["routed_dp_rank"] = dp_rank
    return body


def parse_reply(body: dict[str, Any], input_ids: np.ndarray, reply: dict[str, Any], shape: ModelShape, seconds: float) -> Turn:
    """The `Turn` in a reply to `request_body`'s body for `input_ids` (int32 [P], kept as it is), exactly as the engine recorded it.

    Raises StructureError (with its cause) when ids, log-probabilities, versions and routes do not fit together.
    """
    meta, rid = reply["meta_info"], body["rid"]
    outputs = np.asarray(reply.get("output_ids") or [], dtype=np.int32)
    n = len(outputs)

    def refuse(cause: str, found: str, expected: str) -> StructureError:
        return StructureError(f"reply {rid}: {found}", expected, "keep the reply and compare with the pinned SGLang version", cause=f"reply:{cause}")

    if meta["completion_tokens"] != n:
        raise refuse("tokens", f"{n} output ids", f"{meta['completion_tokens']}, its completion_tokens")
    if meta["prompt_tokens"] != len(input_ids):
        raise refuse("prompt", f"{meta['prompt_tokens']} prompt tokens", f"{len(input_ids)}, what was sent")
    entries = meta.get("output_token_logprobs") or []
    if len(entries) != n or any(e[1] != t for e, t in zip(entries, outputs.tolist(), strict=True)):
        raise refuse("logprobs", f"{len(entries)} log-probabilities, or of other ids than the output's", f"one for each of the {n} output ids")
    logprobs = np.array([np.nan if e[0] is None else e[0] for e in entries], dtype=np.float32)
    if not np.isfinite(logprobs).all() or (logprobs > 1e-5).any():
        raise refuse("logprobs", "a log-probability that is not finite or above 0", "finite values <= 0")
    drafts = Drafts(*(int(meta.get(k, 0)) for k in ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")))
    if not 0 <= drafts.accepted <= drafts.proposed:
        raise refuse("drafts", f"{drafts.accepted} accepted draft tokens of {drafts.proposed}", "no more than were proposed")
    finish = meta["finish_reason"]
    if not isinstance(finish, dict) or finish.get("type") not in ("stop", "length", "abort"):
        raise refuse("finish", f"finish_reason {finish!r}", "type stop, length or abort")
    return Turn(
        input_ids=input_ids, output_ids=outputs, logprobs=logprobs, versions=token_versions(meta, n, rid), finish_reason=finish["type"],
        cached_tokens=int(meta["cached_tokens"]), routes=_routes(body, meta, n, shape), routes_start=body.get("routed_experts_start_len", 0),
        seconds=seconds, drafts=drafts, extra={"message": finish["message"]} if finish.get("message") else {},
    )


def without_routes(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply to be kept: of its routes, which are the larger part of it, only how long they were."""
    routes = reply["meta_info"].get("routed_experts")
    return {**reply, "meta_info": {**reply["meta_info"], "routed_experts": routes and f"{len(routes)} characters of base64"}}


def token_versions(meta: dict[str, Any], n: int, rid: str = "") -> np.ndarray:
    """int32 [n]: the weight version each output token was sampled with, from the spans, or the reply's one version when there are none."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": n}]
    versions, at = np.empty(n, dtype=np.int32), 0
    for span in spans:
        if span["start"] != at or span["end"] > n:
            raise StructureError(f"reply {rid}: weight version spans {spans}", f"contiguous spans over {n} tokens", cause="reply:versions")
        try:
            versions[span["start"]: span["end"]] = int(span["version"])
        except ValueError:
            raise StructureError(f"reply {rid}: weight version {span['version']!r}", "a number: engines are started and updated with one",
                                 cause="reply:versions") from None
        at = span["end"]
    if at != n:
        raise StructureError(f"reply {rid}: weight version spans {spans}", f"spans over all {n} tokens", cause="reply:versions")
    return versions


def _routes(body: dict[str, Any], meta: dict[str, Any], n: int, shape: ModelShape) -> np.ndarray | None:
    """uint8 (up to 256 experts) or uint16 [P+N-1-start, MoE layers, K]; None for a dense model or when nothing was sampled."""
    if not shape.moe_layers or n == 0:
        return None
    start = body["routed_experts_start_len"]
    rows = meta["prompt_tokens"] + n - 1 - start
    wanted = f"int32 [{rows}, {shape.layers}, {shape.top_k}] in base64"
    try:
        raw = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), dtype="<i4")
    except (KeyError, TypeError, binascii.Error) as e:
        raise StructureError(f"reply {body['rid']}: no readable routed_experts ({e!r})", wanted, "start the engine with --enable-return-routed-experts",
                             cause="reply:routes") from e
    if raw.size != rows * shape.layers * shape.top_k:
        raise StructureError(f"reply {body['rid']}: {raw.size} routed experts", f"{rows * shape.layers * shape.top_k}: {wanted}", cause="reply:routes")
    routes = raw.reshape(rows, shape.layers, shape.top_k)[:, shape.moe_layers, :]
    if routes.size and (routes.min() < 0 or routes.max() >= shape.experts):
        raise StructureError(f"reply {body['rid']}: expert {routes.min()} .. {routes.max()}", f"0 .. {shape.experts - 1}", cause="reply:routes")
    return routes.astype(np.uint8 if shape.experts <= 256 else np.uint16)
