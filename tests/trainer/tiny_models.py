"""Tiny random Hugging Face folders of each family, with weights wide enough that errors show."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

COMMON = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 131,
          "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_dropout": 0.0, "use_cache": False}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4, "q_lora_rank": 24}


def make(family: str, folder: Path, *, layers: int = 2, vocab: int = 131) -> Path:
    """Save a random fp32 model of `family` into `folder`."""
    import transformers as t

    common = {**COMMON, "num_hidden_layers": layers, "vocab_size": vocab}
    if family == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**common, tie_word_embeddings=True))
    elif family == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**common, tie_word_embeddings=False))
    elif family == "qwen3_moe":
        model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**common, **MOE, num_experts=8, norm_topk_prob=True, tie_word_embeddings=False))
    elif family == "glm_moe_dsa":
        # of four layers the first, second and fourth compute an index; 20 keys of sequences up to 60 tokens
        index = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 20, "index_topk_freq": 2, "index_skip_topk_offset": 2}
        sizes = {k: v for k, v in common.items() if k not in ("head_dim", "rope_theta", "num_key_value_heads", "num_hidden_layers")}
        model = t.GlmMoeDsaForCausalLM(t.GlmMoeDsaConfig(
            **sizes, **MOE, **LATENT, **index, num_hidden_layers=4, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False))
    elif family.startswith("deepseek_v3"):
        sizes = {k: v for k, v in common.items() if k not in ("head_dim", "rope_theta", "num_key_value_heads")}
        rope = {"rope_type": "default", "rope_theta": 10000.0} if family == "deepseek_v3" else {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0}
        model = t.DeepseekV3ForCausalLM(t.DeepseekV3Config(
            **sizes, **MOE, **LATENT, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5, n_group=2, topk_group=1,
            rope_parameters=rope, tie_word_embeddings=False))
    else:
        model = t.Glm4MoeForCausalLM(t.Glm4MoeConfig(**common, **MOE, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True,
                                                     attention_bias=True, partial_rotary_factor=0.5, routed_scaling_factor=1.5, n_group=2, topk_group=1,
                                                     tie_word_embeddings=False))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.12, generator=generator)
            else:
                p.uniform_(0.8, 1.2, generator=generator)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.uniform_(-0.1, 0.1, generator=generator)
    model.float().save_pretrained(folder)
    return folder


SHARED_HEAD = ("embed_tokens.weight", "shared_head.head.weight")
"""What published folders have in the draft layer once more, of the model's own."""


def with_draft(folder: Path, target: Path) -> Path:
    """A copy of a model folder with a random draft layer as published ones have it: a layer like the first one that has experts and, where there is one, an index."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (target / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors = load_file(target / "model.safetensors")
    names = [n for n in tensors if f"layers.{config['first_k_dense_replace']}." in n]
    prefix, hidden = f"model.layers.{layers}.", config["hidden_size"]
    shapes = {re.sub(r"^model\.layers\.\d+\.", prefix, n): tensors[n].shape for n in names}
    shapes |= {f"{prefix}{n}.weight": (hidden,) for n in ("enorm", "hnorm", "shared_head.norm")} | {f"{prefix}eh_proj.weight": (hidden, 2 * hidden)}
    generator = torch.Generator().manual_seed(11)
    for name, shape in shapes.items():
        value = torch.empty(shape)
        if name.endswith("e_score_correction_bias"):
            value.uniform_(-0.1, 0.1, generator=generator)
        elif len(shape) == 1:
            value.uniform_(0.8, 1.2, generator=generator)
        else:
            value.normal_(0, 0.12, generator=generator)
        tensors[name] = value
    tensors |= {prefix + SHARED_HEAD[0]: tensors["model.embed_tokens.weight"].clone(), prefix + SHARED_HEAD[1]: tensors["lm_head.weight"].clone()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
