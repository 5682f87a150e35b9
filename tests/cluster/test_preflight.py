"""Checks before submission that need no cluster."""

import json

import pytest
import torch
from safetensors.torch import save_file

from miles.cluster.preflight import model, precision
from miles.config import load_config
from miles.core import ConfigError
from miles.weights.precision.folder import quantize_folder


@pytest.fixture
def config(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"model.embed_tokens.weight": torch.ones(4, 8), "model.norm.weight": torch.ones(8), "model.layers.0.self_attn.o_proj.weight": torch.ones(8, 8)},
              source / "model.safetensors")
    quantize_folder(source, tmp_path / "fp8", "fp8")
    return lambda *more: load_config("configs/tiny_async.toml", (
        f"model.path={source}", "model.trainer_precision=bf16", "model.rollout_precision=fp8", f"model.rollout_path={tmp_path / 'fp8'}", *more))


def test_check_compares_the_engines_folder_with_what_the_trainer_sends(config):
    assert precision(config(), None) == "trainer bf16, rollout fp8: 1 tensors quantized, 2 in high precision"


def test_check_refuses_a_pattern_that_one_side_does_not_follow_or_that_matches_nothing(config):
    with pytest.raises(ConfigError, match="o_proj.weight is sent in high precision; the engines' folder has .*o_proj.weight_scale_inv"):
        precision(config("model.high_precision=['o_proj']"), None)
    with pytest.raises(ConfigError, match="'o_prj' matches no tensor"):
        precision(config("model.high_precision=['o_prj']"), None)


@pytest.mark.parametrize(("changes", "option"), [
    (("algorithm.kl_coefficient=0.1", "algorithm.reference=nowhere"), "algorithm.reference"),
    (("algorithm.advantage=gae", "algorithm.critic.lr=1e-5", "algorithm.critic.path=nowhere"), "algorithm.critic.path"),
])
def test_check_refuses_a_reference_or_critic_that_is_not_there(config, changes, option):
    assert model(config(), None).endswith("is there")
    with pytest.raises(ConfigError, match=f"{option}: no model at nowhere"):
        model(config(*changes), None)


def test_check_says_the_formats_of_a_run_that_quantizes_nothing():
    assert precision(load_config("configs/tiny_async.toml"), None) == "trainer fp32, rollout fp32"
