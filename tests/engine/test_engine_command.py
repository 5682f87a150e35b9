"""What SGLang is told, for a CPU machine and for the GLM-5.2 job."""

import pytest

from miles.config import load_config
from miles.core import ConfigError
from miles.engine import ModelShape, server_argv, server_env

DENSE = ModelShape("LlamaForCausalLM", 32000, 4, (), 0, 0)
MOE = ModelShape("Glm4MoeForCausalLM", 151552, 92, tuple(range(3, 92)), 160, 8)


def config(**overrides):
    return load_config("configs/tiny_async.toml", tuple(f"{k}={v}" for k, v in overrides.items()))


def argv(c, platform, shape, **kw):
    return server_argv(c, platform=platform, shape=shape, host="127.0.0.1", port=31000, rank=1, weight_version=3, **kw)


def test_cpu_command_line():
    assert argv(config(), "cpu", DENSE) == [
        "--model-path", "models/tiny-moe", "--host", "127.0.0.1", "--port", "31000", "--context-length", "2048", "--weight-version", "3",
        "--random-seed", "1001", "--max-total-tokens", "24000", "--max-running-requests", "16",
        "--disable-overlap-schedule", "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sleep-on-idle",
    ]


def test_glm52_command_line():
    c = config(**{
        "model.trainer_precision": "'bf16'", "model.rollout_precision": "'fp8'", "engine.tp": 4, "engine.dp_attention": 4, "engine.ep": 4,
        "engine.kv_cache": "'fp8_e4m3'", "engine.memory_fraction": 0.85, "cluster.rollout.gpus_per_node": 4, "engine.max_running": 64,
        "engine.speculative": "{algorithm = 'EAGLE', num_steps = 1, topk = 1, num_draft_tokens = 2}", "weights.pause": "'retract'",
        "model.path": "/models/GLM-5.2", "model.rollout_path": "/models/GLM-5.2-fp8",
    })
    assert argv(c, "cuda", MOE) == [
        "--model-path", "/models/GLM-5.2-fp8", "--host", "127.0.0.1", "--port", "31000", "--context-length", "2048", "--weight-version", "3",
        "--random-seed", "1001", "--enable-return-routed-experts", "--max-total-tokens", "24000", "--max-running-requests", "64",
        "--tp-size", "4", "--ep-size", "4", "--mem-fraction-static", "0.85", "--enable-dp-attention", "--dp-size", "4",
        "--kv-cache-dtype", "fp8_e4m3", "--dtype", "bfloat16",
        "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2",
    ]


def test_an_in_place_pause_turns_overlapped_scheduling_off_so_that_version_spans_are_exact():
    assert "--disable-overlap-schedule" in argv(config(**{"weights.pause": "'in_place'"}), "cuda", DENSE)
    assert "--disable-overlap-schedule" not in argv(config(**{"weights.pause": "'retract'"}), "cuda", DENSE)


def test_an_engine_on_shared_gpus_can_release_its_memory():
    c = load_config("configs/tiny_colocated.toml")
    assert all("--enable-memory-saver" in argv(c, platform, DENSE) for platform in ("cpu", "cuda"))
    assert "--enable-memory-saver" not in argv(config(), "cuda", DENSE)


def test_engines_draw_different_random_numbers():
    c = config()
    seeds = [server_argv(c, platform="cpu", shape=DENSE, host="h", port=1, rank=r, weight_version=0)[11] for r in range(3)]
    assert seeds == ["1000", "1001", "1002"]


def test_a_cpu_engine_needs_the_size_of_its_cache(tmp_path):
    toml = tmp_path / "c.toml"
    with open("configs/tiny_async.toml") as f:
        toml.write_text(f.read().replace("max_total_tokens = 24000\n", ""))
    with pytest.raises(ConfigError, match="max_total_tokens is not set"):
        argv(load_config(toml), "cpu", DENSE)


def test_a_cpu_engine_refuses_fp8():
    c = config(**{"model.trainer_precision": "'bf16'", "model.rollout_precision": "'fp8'", "model.rollout_path": "'/fp8'"})
    with pytest.raises(ConfigError, match="rollout_precision = fp8 on a CPU"):
        argv(c, "cpu", DENSE)


def test_extra_args_come_last_and_another_folder_replaces_the_model():
    args = argv(config(**{"engine.extra_args": "['--page-size', '1']"}), "cpu", DENSE, model_path="/w/v000012")
    assert args[:2] == ["--model-path", "/w/v000012"] and args[-2:] == ["--page-size", "1"]


def test_cpu_environment_leaves_out_other_models(tmp_path):
    (tmp_path / "llama.py").write_text("class LlamaForCausalLM(nn.Module):\n    pass\nEntryClass = [LlamaForCausalLM]\n")
    (tmp_path / "qwen.py").write_text("class QwenForCausalLM:\n    pass\n")
    (tmp_path / "__init__.py").write_text("")
    assert server_env("cpu", DENSE, tmp_path)["SGLANG_DISABLED_MODEL_ARCHS"] == "qwen"
    assert "SGLANG_DISABLED_MODEL_ARCHS" not in server_env("cpu", MOE, tmp_path), "an unknown architecture leaves the search to SGLang"
    assert server_env("cuda", DENSE, tmp_path) == {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@pytest.mark.parametrize(("config_json", "moe_layers"), [
    ('{"architectures":["Qwen3MoeForCausalLM"],"vocab_size":9,"num_hidden_layers":4,"num_experts":8,"num_experts_per_tok":2,"mlp_only_layers":[1]}', (0, 2, 3)),
    ('{"architectures":["Glm4MoeForCausalLM"],"vocab_size":9,"num_hidden_layers":4,"n_routed_experts":8,"num_experts_per_tok":2,"first_k_dense_replace":1}', (1, 2, 3)),
    ('{"architectures":["LlamaForCausalLM"],"vocab_size":9,"num_hidden_layers":4}', ()),
])
def test_moe_layers_of_a_config(tmp_path, config_json, moe_layers):
    (tmp_path / "config.json").write_text(config_json)
    assert ModelShape.from_folder(tmp_path).moe_layers == moe_layers
