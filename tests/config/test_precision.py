import itertools
import json
import re
from pathlib import Path

import pytest

from miles.config import load_config
from miles.config.precision import FORMATS, HIGH_PRECISION, LEGAL, TRAINED, folder_problems, high_precision, is_quantized, refusal, unmatched
from miles.config.shape import FAMILIES, KNOWN_MODELS
from miles.core import ConfigError

FP8 = ("model.trainer_precision=bf16", "model.rollout_precision=fp8", "model.rollout_path=/models/fp8")


def load(*overrides):
    return load_config("configs/tiny_async.toml", overrides)


def test_eight_pairs_are_legal_and_every_other_is_refused_with_a_reason():
    assert len(LEGAL) == 8 and len(FORMATS) == 6
    for pair in itertools.product(FORMATS, FORMATS):
        assert (refusal(*pair) is None) == (pair in LEGAL)
        assert pair in LEGAL or len(refusal(*pair)) > 40


def test_bytes_of_an_element_with_its_share_of_the_scale():
    assert {n: f.bytes_per_element for n, f in FORMATS.items()} == {
        "fp32": 4.0, "bf16": 2.0, "fp8": 1 + 4 / 16384, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "int4": 0.5 + 2 / 32}


def test_the_reason_stands_in_the_refusal_of_the_configuration():
    with pytest.raises(ConfigError, match="trainer fp8 with rollout mxfp8: .*rounded twice, on two grids"):
        load("model.trainer_precision=fp8", "model.rollout_precision=mxfp8", "model.rollout_path=/m")
    with pytest.raises(ConfigError, match="fp32 is the reference"):
        load("model.trainer_precision=fp32", "model.rollout_precision=bf16")


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_a_legal_pair_whose_trainer_computes_in_a_format_that_it_does_not_have_is_refused_before_a_node_is_allocated(precision):
    with pytest.raises(ConfigError, match=f"model.trainer_precision = '{precision}': the trainer has no forward and backward in {precision} yet; expected fp32 or bf16"):
        load(f"model.trainer_precision={precision}", f"model.rollout_precision={precision}", "model.rollout_path=/m")


def test_what_can_be_trained_is_what_the_trainer_builds():
    from miles.trainer.model import DTYPES

    assert list(TRAINED) == list(DTYPES)
    assert sorted(r for t, r in LEGAL if t in TRAINED) == ["bf16", "fp32", "fp8", "int4", "mxfp8"]


def test_a_quantized_rollout_has_a_folder_of_its_own_and_no_other_has():
    assert load(*FP8).model.rollout_path == "/models/fp8"
    with pytest.raises(ConfigError, match="'fp8' without model.rollout_path"):
        load(*FP8[:2])
    with pytest.raises(ConfigError, match="'fp32' with model.rollout_path"):
        load("model.rollout_path=/models/fp8")
    with pytest.raises(ConfigError, match="which quantizes nothing"):
        load("model.high_precision=['x']")


def test_every_family_that_the_memory_plan_knows_has_its_list():
    assert set(FAMILIES) == set(HIGH_PRECISION)


@pytest.mark.parametrize(("name", "shape", "quantized"), [
    ("model.layers.3.self_attn.q_proj.weight", (8, 8), True), ("model.layers.3.mlp.experts.7.down_proj.weight", (8, 8), True),
    ("model.layers.3.mlp.gate_proj.weight", (8, 8), True), ("model.layers.3.mlp.shared_experts.up_proj.weight", (8, 8), True),
    ("model.layers.3.mlp.gate.weight", (8, 8), False), ("model.layers.3.mlp.gate.e_score_correction_bias", (8,), False),
    ("model.embed_tokens.weight", (8, 8), False), ("lm_head.weight", (8, 8), False), ("model.norm.weight", (8,), False),
    ("model.layers.46.eh_proj.weight", (8, 16), False), ("model.layers.46.mlp.experts.7.down_proj.weight", (8, 8), True),
    ("model.layers.3.self_attn.q_norm.weight", (8,), False), ("model.layers.3.self_attn.q_proj.bias", (8,), False),
])
def test_embeddings_head_norms_router_and_biases_stay_in_high_precision(name, shape, quantized):
    assert is_quantized(name, shape, high_precision("glm4_moe")) == quantized


def test_a_further_pattern_counts_besides_the_familys_own_and_must_be_a_regular_expression():
    patterns = high_precision("llama", (r"\.o_proj\.",))
    assert not is_quantized("model.layers.0.self_attn.o_proj.weight", (8, 8), patterns) and not is_quantized("lm_head.weight", (8, 8), patterns)
    with pytest.raises(ConfigError, match="is no regular expression"):
        high_precision("llama", ("(",))
    with pytest.raises(ConfigError, match="'bert' has no list"):
        high_precision("bert")


def test_a_pattern_that_matches_nothing_is_found_but_for_parts_that_not_all_models_have():
    names = ["model.embed_tokens.weight", "model.norm.weight"]  # a tied head
    assert unmatched(high_precision("llama", (r"\.o_prj\.",)), names) == [r"\.o_prj\."]


def test_a_folder_of_engines_must_have_the_parts_of_what_is_quantized_and_no_scale_of_what_is_not():
    source = {"model.embed_tokens.weight": (8, 8), "model.norm.weight": (8,), "l.q_proj.weight": (8, 8), "l.o_proj.weight": (8, 8)}
    good = {*source, "l.q_proj.weight_scale_inv", "l.o_proj.weight_scale_inv", "draft.weight"}
    patterns = high_precision("llama")
    assert folder_problems(source, good, "fp8", patterns) == []
    assert folder_problems(source, good - {"l.o_proj.weight_scale_inv"}, "fp8", patterns) == [
        "l.o_proj.weight is sent as fp8; the engines' folder has no l.o_proj.weight_scale_inv"]
    assert folder_problems(source, good, "fp8", (*patterns, "q_proj", "slip")) == [
        "the high-precision pattern 'slip' matches no tensor of the model",
        "l.q_proj.weight is sent in high precision; the engines' folder has l.q_proj.weight_scale_inv"]


def test_glm52_is_one_of_the_families():
    assert json.loads((KNOWN_MODELS / "glm-5.2" / "config.json").read_text())["model_type"] in HIGH_PRECISION
    assert re.search(r"rollout_path = ", Path("configs/glm52_async.toml").read_text())
