"""Tables and slicing between Hugging Face tensors and megatron-core shards. Pure; moving them between ranks is tested in tests/trainer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.core import ConfigError, StructureError
from miles.weights.mapping.architecture import Adapters, LatentAttention, SparseIndex, Yarn, architecture_of, read_architecture
from miles.weights.mapping.tables import EMBEDDING, find_rule, hf_names, join, padded_vocab, parameters, rules_for, shard_slices, split

QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
        "intermediate_size": 8, "vocab_size": 10, "rms_norm_eps": 1e-6, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
        "norm_topk_prob": True, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
LLAMA = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
         "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True}

# Kimi-K2's config.json as published, of which the trainer reads these
KIMI = {"model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432,
        "vocab_size": 163840, "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0}}

GLM = json.loads(Path("configs/models/glm-5.2/config.json").read_text())  # GLM-5.2's, as published


def rule(arch, megatron):
    return next(r for r in rules_for(arch) if r.megatron.endswith(megatron))


def test_sizes_are_read_in_old_and_new_config_spelling():
    qwen, llama = architecture_of(QWEN), architecture_of(LLAMA)
    assert (qwen.experts, qwen.top_k, qwen.rope_theta, qwen.qk_norm, qwen.moe_layers) == (4, 2, 5e5, True, (0, 1))
    assert (llama.head_dim, llama.rope_theta, llama.tied, llama.qk_norm, llama.moe_layers) == (64, 1e5, True, False, ())


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "gpt2"}, "model_type 'gpt2' has no weight table"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
    ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported"),
    ({"attention_bias": True}, "attention_bias = True is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
])
def test_what_megatron_would_ignore_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        architecture_of({**QWEN, **change})


def test_latent_attention_and_its_stretched_rotary_are_read_in_the_published_spelling():
    kimi = architecture_of(KIMI)
    assert kimi.latent == LatentAttention(1536, 512, 128, 64, 128) and (kimi.head_dim, kimi.groups, kimi.shared_ffn) == (192, 64, 2048)
    assert kimi.yarn == Yarn(32.0, 4096, 1.0, 1.0, 1.0, 1.0) and kimi.rope_theta == 5e4 and kimi.moe_layers == tuple(range(1, 61))
    names = {n for r, layer, expert in parameters(kimi) if layer == 1 and not expert for n in hf_names(r, layer, expert)}
    assert {f"model.layers.1.self_attn.{n}.weight" for n in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
                                                             "o_proj")} <= names
    # 7 of attention, 2 norms, gate and its bias, 3 of the shared expert, 3 of expert 0
    assert len(names) == 17


def test_a_sparse_index_is_read_in_the_published_spelling():
    glm = architecture_of(GLM)
    assert glm.latent == LatentAttention(2048, 512, 192, 64, 256) and (glm.rope_theta, glm.norm_eps, glm.moe_layers) == (8e6, 1e-5, tuple(range(3, 78)))
    assert glm.sparse == SparseIndex(heads=32, head_dim=128, top_k=2048, frequency=4, offset=3)
    assert [i + 1 for i in glm.index_layers] == [1, 2, 3, *range(7, 76, 4)]
    indexers = [(n, layer) for r, layer, _ in parameters(glm) for n in hf_names(r, layer, None) if ".indexer." in n]
    assert sorted({layer for _, layer in indexers}) == list(glm.index_layers)
    assert [n for n, layer in indexers if layer == 6] == [f"model.layers.6.self_attn.indexer.{n}" for n in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias",
                                                                                                           "weights_proj.weight")]


def test_the_draft_layer_is_the_trainers_only_where_it_trains_it():
    assert GLM["num_nextn_predict_layers"] == 1
    names = [n for r, layer, expert in parameters(architecture_of(GLM)) if not expert for n in hf_names(r, layer, expert)]
    assert not [n for n in names if n.startswith("model.layers.78.") or "eh_proj" in n]
    drafting = [n for r, layer, expert in parameters(architecture_of(GLM, draft=True)) if not expert for n in hf_names(r, layer, expert)]
    own = [n for n in drafting if n not in names]
    assert [n for n in drafting if n in names] == names and {n.removeprefix("model.layers.78.").removesuffix(".weight") for n in own} == {
        "enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.gate.e_score_correction_bias",
        *(f"self_attn.{n}" for n in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "indexer.wq_b", "indexer.wk",
                                     "indexer.k_norm", "indexer.k_norm.bias", "indexer.weights_proj")),
        *(f"mlp.{e}.{n}_proj" for e in ("experts.0", "shared_experts") for n in ("gate", "up", "down"))}
    assert drafting.index("model.layers.77.mlp.experts.0.down_proj.weight") < drafting.index(own[0]) and drafting[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_a_parameter_of_the_draft_layer_is_found_by_its_name_under_both_implementations():
    arch = architecture_of(GLM, draft=True)
    for name in ("mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.3.linear_fc2.weight", "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc2.weight3"):
        found, layer, expert = find_rule(arch, name)
        assert (hf_names(found, 78, expert), layer, found.axis) == (("model.layers.78.mlp.experts.3.down_proj.weight",), 0, 1)
    joined = find_rule(arch, "mtp.layers.0.eh_proj.weight")[0]
    assert (joined.hf, joined.axis) == (("model.layers.{layer}.eh_proj.weight",), 0)
    with pytest.raises(StructureError, match="has no Hugging Face counterpart"):
        find_rule(architecture_of(GLM), "mtp.layers.0.eh_proj.weight")


@pytest.mark.parametrize(("types", "schedule"), [("FFFF", (4, 4)), ("FSSS", (4, 1)), ("FSFS", (2, 1)), ("FFSFS", (2, 2)), ("FSSFSSF", (3, 1))])
def test_layers_that_compute_an_index_follow_from_frequency_and_offset(types, schedule):
    n = len(types)
    arch = architecture_of({**GLM, "num_hidden_layers": n, "first_k_dense_replace": 1, "mlp_layer_types": ["dense"] + ["sparse"] * (n - 1), "indexer_types": None,
                            "index_topk_pattern": types})
    assert (arch.sparse.frequency, arch.sparse.offset) == schedule
    assert arch.index_layers == tuple(i for i, c in enumerate(types) if c == "F")


@pytest.mark.parametrize(("change", "message"), [
    ({"indexer_types": ["full", "shared", "full", "full"] + ["shared"] * 74}, r"layers \[1, 3, 4\] \(counted from 1\) compute the sparse index"),
    ({"indexer_types": ["shared"] * 77 + ["full"]}, r"layers \[78\] \(counted from 1\) compute the sparse index"),
    ({"indexer_types": ["full"] * 77}, "says of 77 layers whether they compute a sparse index, and the model has 78"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave = False is not supported"),
    ({"mlp_layer_types": ["sparse"] * 78}, "mlp_layer_types = .* is not supported"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
])
def test_a_sparse_model_that_megatron_would_compute_otherwise_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        architecture_of({**GLM, **change})


@pytest.mark.parametrize(("change", "message"), [
    ({"q_lora_rank": None}, "q_lora_rank = None is not supported"),
    ({"rope_interleave": False}, "rope_interleave = False is not supported"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    ({"n_group": 8, "topk_group": 2}, "num_experts_per_tok = 8 with topk_group = 2"),
])
def test_latent_families_that_megatron_would_compute_otherwise_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        architecture_of({**KIMI, **change})


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no .*config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert read_architecture(tmp_path).family == "qwen3_moe"


def test_qkv_is_interleaved_by_query_group():
    # 4 heads in 2 groups of width 2: group 0 has query rows 0-3, key rows 0-1, value rows 0-1; then group 1
    arch = architecture_of(QWEN)
    q, k, v = (torch.arange(n).float()[:, None] + base for n, base in ((8, 0), (4, 100), (4, 200)))
    whole = join(rule(arch, "linear_qkv.weight"), [q, k, v], arch, 16)[:, 0].tolist()
    assert whole == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def test_each_tensor_parallel_shard_stacks_its_share_of_gate_and_up():
    arch = architecture_of(LLAMA)
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]
    fc1 = rule(arch, "mlp.linear_fc1.weight")
    shards = []
    for r in range(2):
        index = shard_slices(fc1, [(4, 1), (4, 1)], 2, r)
        shards.append(join(fc1, [gate[index[0]], up[index[1]]], arch, 4))
    assert [s[:, 0].tolist() for s in shards] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert all(torch.equal(a, b) for a, b in zip(split(fc1, shards, arch), (gate, up), strict=True))


def test_vocabulary_is_padded_with_zero_rows_and_cut_again():
    arch = architecture_of(QWEN)
    table = torch.arange(1.0, 11.0)[:, None]
    assert padded_vocab(10, 4) == 12
    shards = [join(EMBEDDING, [table[shard_slices(EMBEDDING, [(10, 1)], 4, r)[0]]], arch, 3) for r in range(4)]
    assert [s[:, 0].tolist() for s in shards] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 0, 0]]
    assert torch.equal(split(EMBEDDING, shards, arch)[0], table)


@given(st.sampled_from([1, 2]), st.integers(0, 2**31))
def test_every_parameter_survives_slicing_and_joining(tp, seed):
    arch = architecture_of({**QWEN, "vocab_size": 9})
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": (8, 4), "k_proj": (4, 4), "v_proj": (4, 4), "o_proj": (4, 8), "gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6),
             "gate": (4, 4), "embed_tokens": (9, 4), "lm_head": (9, 4)}
    for r, layer, expert in parameters(arch):
        names = hf_names(r, layer, expert)
        parts = [torch.randn(sizes.get(n.split(".")[-2], (4,)), generator=generator) for n in names]
        shards = []
        for rank in range(tp):
            index = shard_slices(r, [tuple(p.shape) for p in parts], tp, rank)
            shards.append(join(r, [p[i] for p, i in zip(parts, index, strict=True)], arch, padded_vocab(9, tp) // tp))
        assert all(torch.equal(a, b) for a, b in zip(split(r, shards, arch), parts, strict=True)), r.megatron


def test_transformer_engine_names_find_the_same_rules():
    arch = architecture_of(QWEN)
    for fused, plain in (("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.1.input_layernorm.weight"),
                         ("decoder.layers.1.mlp.experts.linear_fc1.weight3", "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight")):
        assert find_rule(arch, fused) == find_rule(arch, plain)


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(StructureError, match="decoder.layers.0.mlp.surprise.weight has no Hugging Face counterpart"):
        find_rule(architecture_of(QWEN), "decoder.layers.0.mlp.surprise.weight")


def test_an_axis_that_tensor_parallelism_does_not_divide_is_refused():
    arch = architecture_of(QWEN)
    with pytest.raises(StructureError, match="not divisible by 4"):
        shard_slices(rule(arch, "local_experts.{expert}.linear_fc2.weight"), [(4, 6)], 4, 0)


def test_parameters_cover_the_model_once_in_layer_order():
    arch = architecture_of(QWEN)
    names = [n for r, layer, expert in parameters(arch) for n in hf_names(r, layer, expert)]
    assert len(names) == len(set(names)) == 3 + 2 * (6 + 2 + 1 + 3 * 4)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"


ADAPTERS = Adapters(3, 6.0, ("attention", "mlp", "experts"))


def test_the_factors_of_an_adapted_weight_have_its_parts_and_are_cut_as_it_is():
    arch = replace(architecture_of(QWEN), adapters=ADAPTERS)
    found = {(r.megatron.removeprefix("decoder.layers.{layer}."), r.kind, r.axis): [n.removeprefix("model.layers.{layer}.") for n in r.hf] for r in rules_for(arch) if r.factor}
    expert = "mlp.experts.local_experts.{expert}."
    assert found == {
        ("self_attention.linear_qkv.lora_a", "plain", None): ["self_attn.q_proj.lora_A.weight"],
        ("self_attention.linear_qkv.lora_b", "qkv", 0): [f"self_attn.{x}_proj.lora_B.weight" for x in "qkv"],
        ("self_attention.linear_proj.lora_a", "plain", 1): ["self_attn.o_proj.lora_A.weight"],
        ("self_attention.linear_proj.lora_b", "plain", None): ["self_attn.o_proj.lora_B.weight"],
        (expert + "linear_fc1.lora_a", "plain", None): ["mlp.experts.{expert}.gate_proj.lora_A.weight"],
        (expert + "linear_fc1.lora_b", "stack", 0): [f"mlp.experts.{{expert}}.{x}_proj.lora_B.weight" for x in ("gate", "up")],
        (expert + "linear_fc2.lora_a", "plain", 1): ["mlp.experts.{expert}.down_proj.lora_A.weight"],
        (expert + "linear_fc2.lora_b", "plain", None): ["mlp.experts.{expert}.down_proj.lora_B.weight"],
    }


@pytest.mark.parametrize(("config", "targets", "adapted"), [
    (QWEN, ("attention",), {"qkv", "proj"}), (QWEN, ("mlp",), set()), (LLAMA, ("mlp",), {"fc1", "fc2"}), (KIMI, ("experts",), {"fc1", "fc2"}),
    (GLM, ("attention",), {"q_down_proj", "kv_down_proj", "q_up_proj", "kv_up_proj", "proj"}),
])
def test_kinds_of_weights_have_adapters_and_the_sparse_index_has_none(config, targets, adapted):
    arch = replace(architecture_of(config), adapters=replace(ADAPTERS, targets=targets))
    factors = [r.megatron for r in rules_for(arch) if r.factor]
    assert {m.split("linear_")[1].split(".")[0] for m in factors} == adapted and not any("indexer" in m or "layernorm" in m for m in factors)
    assert len([m for m in factors if "shared_experts" in m]) == 0


def test_a_factor_is_found_by_its_name_under_both_implementations():
    arch = replace(architecture_of(QWEN), adapters=ADAPTERS)
    for name in ("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.lora_b", "decoder.layers.1.mlp.experts.linear_fc2.lora_b3"):
        found, layer, expert = find_rule(arch, name)
        assert hf_names(found, layer, expert) == ("model.layers.1.mlp.experts.3.down_proj.lora_B.weight",)


def test_each_part_of_a_weight_has_its_rows_of_b():
    arch = replace(architecture_of(QWEN), adapters=ADAPTERS)
    b = rule(arch, "linear_qkv.lora_b")
    rows = torch.arange(48.0).view(16, 3)
    parts = split(b, list(rows.chunk(2)), arch)
    assert [len(part) for part in parts] == [8, 4, 4] and torch.equal(join(b, parts, arch, 16), rows)
