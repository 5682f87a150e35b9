"""The parameter counts, against transformers' own modules (built without memory) and against the published total of GLM-5.2."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from miles.config.shape import index_layers, model_shape
from miles.core import ConfigError

GLM = json.loads(Path("configs/models/glm-5.2/config.json").read_text())
SMALL = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=128, vocab_size=100)
MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_group=1, topk_group=1)


def parameters_of_transformers(model_type, values):
    """Parameters, plus the router's score-correction bias, which transformers keeps as a buffer."""
    config = AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters()) + sum(b.numel() for name, b in model.named_buffers() if "e_score" in name)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("llama", {**SMALL, "head_dim": 16, "num_hidden_layers": 3, "tie_word_embeddings": True}),
        ("qwen3", {**SMALL, "num_hidden_layers": 2}),
        ("qwen3_moe", {**SMALL, **MOE, "num_hidden_layers": 2, "num_experts": 8}),
        (
            "glm4_moe",
            {
                **SMALL,
                **MOE,
                "num_hidden_layers": 3,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "use_qk_norm": True,
                "attention_bias": True,
            },
        ),
        (
            "glm4_moe",
            {
                **SMALL,
                **MOE,
                "num_hidden_layers": 3,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "use_qk_norm": False,
            },
        ),
        (
            "deepseek_v3",
            {
                **SMALL,
                **MOE,
                **LATENT,
                "num_key_value_heads": 4,
                "num_hidden_layers": 3,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
            },
        ),
        ("glm_moe_dsa", GLM),
    ],
)
def test_counts_equal_the_modules_of_transformers(model_type, values):
    values = {
        k: v for k, v in values.items() if k not in ("model_type", "architectures", "transformers_version", "num_nextn_predict_layers")
    }
    assert model_shape({**values, "model_type": model_type}).total == parameters_of_transformers(model_type, values)


def test_glm_has_744_billion_parameters_and_753_with_its_draft_layer():
    shape = model_shape(GLM)
    assert round(shape.total / 1e9, 1) == 743.4
    assert round((shape.total + sum(x.total for x in shape.draft)) / 1e9) == 753  # the total its model card gives


def test_every_fourth_layer_of_glm_computes_the_index():
    computing = [i + 1 for i, full in enumerate(index_layers(GLM)) if full]
    assert computing == [1, 2, 3, *range(7, 76, 4)]
    by_rule = {k: v for k, v in GLM.items() if k != "indexer_types"}
    assert index_layers(by_rule) == index_layers(GLM)


def test_an_unknown_family_and_a_missing_size_are_refused():
    with pytest.raises(ConfigError, match="model_type 'mamba' is not known"):
        model_shape({"model_type": "mamba"})
    with pytest.raises(ConfigError, match="lacks 'vocab_size'"):
        model_shape({"model_type": "llama", **{k: v for k, v in SMALL.items() if k != "vocab_size"}, "num_hidden_layers": 2})
