"""Checks before submission that need no cluster."""

import json

import pytest
import torch
from safetensors.torch import save_file

from miles.cluster.preflight import Unknown, functions, model, precision, preflight, state_folder
from miles.config import SiteConfig, load_config
from miles.core import ConfigError, EnvironmentFault
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


STREAM = "trainer.optimizer.state=stream"
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 100, "max_position_embeddings": 4096, "tie_word_embeddings": False}


@pytest.fixture
def streaming(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    return lambda *more: load_config("configs/tiny_async.toml", (f"model.path={tmp_path / 'llama'}", "trainer.layout.ep=1", STREAM, f"trainer.optimizer.state_dir={tmp_path}", *more))


def test_check_asks_of_the_state_folder_what_all_trainer_ranks_of_the_machine_need(streaming, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("miles.optim.check_folder", lambda folder, need, network: asked.append((folder, need, network)) or "fit")
    one = state_folder(streaming(), SiteConfig())
    state_folder(streaming("trainer.optimizer.state_on_network=true"), SiteConfig(), nodes=2)
    assert one.startswith("fit, ") and one.endswith(" GB needed")
    assert asked[0][::2] == (tmp_path, False) and asked[1] == (tmp_path, 2 * asked[0][1], True)
    left = tmp_path / "miles-optimizer-mine" / "e000001"
    left.mkdir(parents=True)
    (left / "state.0").write_bytes(bytes(4096))
    state_folder(streaming(), SiteConfig(), run="mine")
    assert asked[2][1] == asked[0][1] - 4096


def test_a_state_folder_in_memory_fails_a_start_here_and_warns_where_nodes_are_elsewhere(streaming):
    found = {}
    for launcher in ("local", "slurm", None):
        findings = preflight(streaming("trainer.optimizer.state_dir=/dev/shm"), SiteConfig(), launcher)
        found[launcher] = next(f for f in findings if f.name == "state folder")
    assert [found[x].status for x in ("local", "slurm", None)] == ["fail", "warn", "warn"]
    assert "/dev/shm, is on tmpfs: in memory" in found["local"].text and found["local"].exit_code == 3
    assert "state folder" not in {f.name for f in preflight(load_config("configs/tiny_async.toml"), SiteConfig())}


def test_a_state_folder_is_judged_also_before_the_model_is_made(tmp_path):
    config = load_config("configs/tiny_async.toml", (STREAM, f"model.path={tmp_path / 'later'}", f"trainer.optimizer.state_dir={tmp_path}"))
    with pytest.raises(Unknown, match="there is no memory plan"):
        state_folder(config, SiteConfig())
    with pytest.raises(EnvironmentFault, match="is on tmpfs"):
        state_folder(config.model_copy(update={"trainer": config.trainer.model_copy(update={"optimizer": config.trainer.optimizer.model_copy(
            update={"state_dir": "/dev/shm"})})}), SiteConfig())


def test_a_reward_of_the_users_is_loaded_before_a_node_is_allocated():
    def config(name):
        return load_config("configs/tiny_async.toml", (f"tasks.reward={name}",))

    assert functions(config("math.fsum"), SiteConfig()) == "tasks.reward = math.fsum"
    with pytest.raises(ConfigError, match="tasks.reward = 'math.absent'"):
        functions(config("math.absent"), SiteConfig())
