"""Requests and replies as pure functions."""

import base64

import numpy as np
import pytest

from miles.core import Drafts, StructureError
from miles.engine import ModelShape, Sampling
from miles.engine.wire import parse_reply, request_body, token_versions

SHAPE = ModelShape("X", 100, 3, (1, 2), 8, 2)  # the first of three layers is dense
DENSE = ModelShape("X", 100, 3, (), 0, 0)
IDS = np.array([1, 2, 3, 4], np.int32)


def body(ids=(1, 2, 3, 4), shape=SHAPE, routes_from=1, **kw):
    return request_body("r", ids, Sampling(5, stop_token_ids=(9,)), shape, max_context=32, routing_key="k", routes_from=routes_from, **kw)


def reply(out=(5, 9), prompt=4, start=1, finish="stop", **meta):
    rows = prompt + len(out) - 1 - start
    experts = np.arange(rows * 3 * 2, dtype="<i4").reshape(rows, 3, 2) % 8
    return {"output_ids": list(out), "meta_info": {
        "prompt_tokens": prompt, "completion_tokens": len(out), "cached_tokens": 3, "finish_reason": {"type": finish}, "weight_version": "7",
        "output_token_logprobs": [[-0.5, t, None] for t in out], "routed_experts": base64.b64encode(experts.tobytes()).decode(), **meta}}


def test_a_reply_becomes_a_turn():
    turn = parse_reply(body(), IDS, reply(), SHAPE, 0.5)
    assert turn.input_ids.tolist() == [1, 2, 3, 4] and turn.output_ids.tolist() == [5, 9] and turn.output_ids.dtype == np.int32
    assert turn.logprobs.tolist() == [-0.5, -0.5] and turn.logprobs.dtype == np.float32
    assert turn.versions.tolist() == [7, 7] and turn.finish_reason == "stop" and turn.cached_tokens == 3 and turn.routes_start == 1
    # rows 1..4 of the positions 0..4; layer 0 is dense and left out
    assert turn.routes.dtype == np.uint8 and turn.routes.shape == (4, 2, 2) and turn.routes[0].tolist() == [[2, 3], [4, 5]]


def test_what_speculative_decoding_did_is_in_the_turn_where_the_engine_says_so():
    assert parse_reply(body(), IDS, reply(), SHAPE, 0.0).drafts == Drafts(0, 0, 0)
    counts = {"spec_verify_ct": 4, "spec_num_proposed_drafts": 12, "spec_num_correct_drafts": 5, "spec_accept_rate": 5 / 12, "spec_accept_length": 2.5}
    assert parse_reply(body(), IDS, reply(**counts), SHAPE, 0.0).drafts == Drafts(passes=4, proposed=12, accepted=5)
    assert Drafts(4, 12, 5) + Drafts(1, 3, 3) == Drafts(5, 15, 8)


def test_a_dense_model_has_no_routes():
    assert "return_routed_experts" not in body(shape=DENSE, routes_from=0)
    assert parse_reply(body(shape=DENSE, routes_from=0), IDS, reply(), DENSE, 0.0).routes is None


@pytest.mark.parametrize(("spans", "expected"), [
    ([(3, 0, 2), (4, 2, 5)], [3, 3, 4, 4, 4]),
    ([(3, 0, 5)], [3] * 5),
])
def test_version_spans(spans, expected):
    meta = {"weight_version": "9", "weight_versions": [{"version": str(v), "start": a, "end": b} for v, a, b in spans]}
    assert token_versions(meta, 5).tolist() == expected


@pytest.mark.parametrize("spans", [[(3, 0, 4)], [(3, 1, 5)], [(3, 0, 2), (4, 3, 5)], [(3, 0, 6)]])
def test_version_spans_with_a_gap_are_refused(spans):
    meta = {"weight_version": "9", "weight_versions": [{"version": str(v), "start": a, "end": b} for v, a, b in spans]}
    with pytest.raises(StructureError) as e:
        token_versions(meta, 5)
    assert e.value.cause == "reply:versions"


def test_without_spans_the_reply_has_one_version():
    assert token_versions({"weight_version": "9"}, 2).tolist() == [9, 9]
    with pytest.raises(StructureError, match="'default'"):
        token_versions({"weight_version": "default"}, 2)


@pytest.mark.parametrize(("change", "cause"), [
    ({"completion_tokens": 3}, "reply:tokens"),
    ({"prompt_tokens": 5}, "reply:prompt"),
    ({"spec_verify_ct": 2, "spec_num_proposed_drafts": 2, "spec_num_correct_drafts": 3}, "reply:drafts"),
    ({"output_token_logprobs": [[-0.5, 5, None]]}, "reply:logprobs"),
    ({"output_token_logprobs": [[-0.5, 5, None], [-0.5, 8, None]]}, "reply:logprobs"),
    ({"output_token_logprobs": [[-0.5, 5, None], [None, 9, None]]}, "reply:logprobs"),
    ({"output_token_logprobs": [[-0.5, 5, None], [float("-inf"), 9, None]]}, "reply:logprobs"),
    ({"output_token_logprobs": [[-0.5, 5, None], [0.5, 9, None]]}, "reply:logprobs"),
    ({"finish_reason": None}, "reply:finish"),
    ({"routed_experts": None}, "reply:routes"),
    ({"routed_experts": base64.b64encode(bytes(4 * 4 * 3 * 2 - 4)).decode()}, "reply:routes"),
    ({"routed_experts": base64.b64encode(np.full(24, 8, dtype="<i4").tobytes()).decode()}, "reply:routes"),
    ({"routed_experts": base64.b64encode(np.full(24, -1, dtype="<i4").tobytes()).decode()}, "reply:routes"),
])
def test_a_reply_that_contradicts_itself_is_refused(change, cause):
    with pytest.raises(StructureError) as e:
        parse_reply(body(), IDS, reply(**change), SHAPE, 0.0)
    assert e.value.cause == cause


@pytest.mark.parametrize(("ids", "cause"), [((), "request:empty"), ((1, 100), "request:vocabulary"), ((-1, 2), "request:vocabulary"),
                                            (tuple([1] * 28), "request:length")])
def test_a_request_the_engine_would_die_of_is_refused(ids, cause):
    with pytest.raises(StructureError) as e:
        body(ids, routes_from=0)
    assert e.value.cause == cause


def test_more_than_256_experts_need_uint16():
    wide = ModelShape("X", 100, 3, (1, 2), 300, 2)
    assert parse_reply(body(shape=wide), IDS, reply(), wide, 0.0).routes.dtype == np.uint16
