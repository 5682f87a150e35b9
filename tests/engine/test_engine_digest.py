"""Checksums of the engine's fused parameters from Hugging Face tensors."""

import hashlib

import pytest
import torch

from miles.core import StructureError
from miles.engine.digest import (
    combined_checksum,
    expected_checksums,
    fusion_plan,
    require_equal,
)


def test_plan_joins_attention_mlp_and_experts_in_order():
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in ("v", "q", "o", "k")]
    names += [f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in (1, 0, 10) for p in ("up", "down", "gate")]
    names += ["model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"]
    a, m = "model.layers.0.self_attn.", "model.layers.0.mlp.experts."
    assert fusion_plan(names) == {
        a + "qkv_proj.weight": [a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight"], a + "o_proj.weight": [a + "o_proj.weight"],
        m + "w13_weight": [m + f"{e}.{p}_proj.weight" for e in (0, 1, 10) for p in ("gate", "up")],
        m + "w2_weight": [m + f"{e}.down_proj.weight" for e in (0, 1, 10)],
        "model.layers.1.mlp.gate_up_proj.weight": ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"],
        "model.layers.0.mlp.gate.weight": ["model.layers.0.mlp.gate.weight"], "lm_head.weight": ["lm_head.weight"],
    }
    assert "lm_head.weight" not in fusion_plan(names, tied=True)


def test_checksum_is_over_the_joined_bytes_and_the_vocabulary_is_padded():
    q, k, v = torch.ones(2, 3), torch.zeros(1, 3), torch.full((1, 3), 2.0)
    state = {"l.q_proj.weight": q, "l.k_proj.weight": k, "l.v_proj.weight": v, "model.embed_tokens.weight": torch.ones(3, 2)}
    got = expected_checksums(state)
    assert got["l.qkv_proj.weight"] == hashlib.sha256(torch.cat([q, k, v]).numpy().tobytes()).hexdigest()[:16]
    padded = torch.cat([torch.ones(3, 2), torch.zeros(61, 2)])
    assert got["model.embed_tokens.weight"] == hashlib.sha256(padded.numpy().tobytes()).hexdigest()[:16]


def test_floats_are_hashed_in_the_engines_dtype():
    state = {"norm.weight": torch.tensor([1.0, 2.0])}
    assert expected_checksums(state, dtype="bfloat16")["norm.weight"] == hashlib.sha256(bytes.fromhex("803f0040")).hexdigest()[:16]


def test_one_changed_bit_is_found_and_named():
    state = {"a.weight": torch.ones(4), "b.weight": torch.ones(4)}
    good = expected_checksums(state)
    state["b.weight"][2] += 1e-7
    bad = expected_checksums(state)
    require_equal(good, good, 3)
    assert combined_checksum(good) != combined_checksum(bad)
    with pytest.raises(StructureError, match=r"version 3 .* 1 of 2 parameters: b\.weight") as e:
        require_equal(good, bad, 3)
    assert e.value.cause == "weights:checksum"


def test_draft_layers_are_not_in_an_engine_that_does_not_speculate():
    state = {f"model.layers.{i}.mlp.down_proj.weight": torch.ones(2, 2) * i for i in (0, 9, 10)} | {"model.norm.weight": torch.ones(2)}
    assert set(expected_checksums(state, layers=10)) == {"model.layers.0.mlp.down_proj.weight", "model.layers.9.mlp.down_proj.weight", "model.norm.weight"}
    assert len(expected_checksums(state)) == 4
