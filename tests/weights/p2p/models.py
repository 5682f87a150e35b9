"""Random models and trainers for the tests of point-to-point transfer: every Hugging Face tensor, and the shard of it that each rank has. No processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.weights.mapping.architecture import Architecture, architecture_of
from miles.weights.mapping.placement import Place
from miles.weights.mapping.tables import hf_names, join, padded_vocab, parameters, shard_slices
from miles.weights.p2p.plan import Tensor

COMMON = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2, "intermediate_size": 8,
          "vocab_size": 11, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {**MOE, **GROUPED, "scoring_func": "sigmoid", "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
          "v_head_dim": 3, "num_key_value_heads": 8}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": {**MOE, "num_local_experts": 4},
    "glm4_moe": {**MOE, **GROUPED, "attention_bias": True, "use_qk_norm": True},
    "deepseek_v3": LATENT,
    "glm_moe_dsa": {**LATENT, "index_n_heads": 2, "index_head_dim": 4, "index_topk": 2, "indexer_types": ["full", "full", "shared", "full"]},
}


DRAFTING = ("glm4_moe", "deepseek_v3", "glm_moe_dsa")


def architecture(family: str, *, draft: bool = False, **changes) -> Architecture:
    return architecture_of({"model_type": family, **COMMON, **FAMILIES[family], "num_nextn_predict_layers": 1, **changes}, draft=draft)


def shape_of(name: str, a: Architecture) -> tuple[int, ...]:
    part = name.removesuffix(".weight").split(".")
    kind, ffn = part[-1], a.expert_ffn if "experts" in part else a.shared_ffn if "shared_experts" in part else a.ffn
    if name.endswith("e_score_correction_bias"):
        return (a.experts,)
    if name.endswith(".bias") and "indexer" not in part:
        return ({"q_proj": a.heads}.get(part[-2], a.groups) * a.head_dim,)
    latent = a.latent and {
        "q_a_proj": (a.latent.query_rank, a.hidden), "q_a_layernorm": (a.latent.query_rank,), "q_b_proj": (a.heads * a.head_dim, a.latent.query_rank),
        "kv_a_proj_with_mqa": (a.latent.kv_rank + a.latent.rope_dim, a.hidden), "kv_a_layernorm": (a.latent.kv_rank,),
        "kv_b_proj": (a.heads * (a.latent.plain_dim + a.latent.value_dim), a.latent.kv_rank), "o_proj": (a.hidden, a.heads * a.latent.value_dim)}
    if latent and kind in latent:
        return latent[kind]
    if a.sparse and "indexer" in part:
        return {"wq_b": (a.sparse.heads * a.sparse.head_dim, a.latent.query_rank), "wk": (a.sparse.head_dim, a.hidden),
                "weights_proj": (a.sparse.heads, a.hidden)}.get(kind, (a.sparse.head_dim,))
    return {
        "embed_tokens": (a.vocab, a.hidden), "lm_head": (a.vocab, a.hidden), "q_proj": (a.heads * a.head_dim, a.hidden),
        "k_proj": (a.groups * a.head_dim, a.hidden), "v_proj": (a.groups * a.head_dim, a.hidden), "o_proj": (a.hidden, a.heads * a.head_dim),
        "gate_proj": (ffn, a.hidden), "up_proj": (ffn, a.hidden), "down_proj": (a.hidden, ffn), "gate": (a.experts, a.hidden),
        "q_norm": (a.head_dim,), "k_norm": (a.head_dim,), "eh_proj": (a.hidden, 2 * a.hidden),
    }.get(kind, (a.hidden,))


def tensors_of(a: Architecture, dtype: str = "float32") -> dict[str, Tensor]:
    return {name: Tensor(shape_of(name, a), "float32" if name.endswith("correction_bias") else dtype)
            for rule, layer, expert in parameters(a) for name in hf_names(rule, layer, expert)}


@dataclass(frozen=True)
class Trainer:
    """Places in megatron-core's default order of ranks: tensor, context, (expert,) data, pipeline."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    etp: int = 1
    ep: int = 1

    def places(self, layers: int, drafts: int = 0) -> list[Place]:
        """`drafts`: layers more on the last stage."""
        stage_ranks = self.tp * self.dp
        last = [(s + 1) * (layers // self.pp) - 1 + drafts * (s == self.pp - 1) for s in range(self.pp)]
        return [Place(r // stage_ranks, r // stage_ranks * (layers // self.pp), last[r // stage_ranks],
                      r % self.tp, r // self.tp % self.dp, r % self.etp, r // self.etp % self.ep, r % stage_ranks // (self.etp * self.ep))
                for r in range(stage_ranks * self.pp)]


def shards_of(a: Architecture, place: Place, trainer: Trainer, whole: dict[str, torch.Tensor]) -> dict[tuple, torch.Tensor]:
    """Every parameter that a rank has, tied copies left out, made as `load_hf` does."""
    out = {}
    for rule, layer, expert in parameters(a):
        on_stage = place.first_layer <= layer <= place.last_layer if layer is not None else place.stage == (
            0 if rule.megatron.startswith("embedding") else trainer.pp - 1)
        if not on_stage or (expert is not None and expert // (a.experts // trainer.ep) != place.ep):
            continue
        size, rank = (trainer.etp, place.etp) if rule.per_expert else (trainer.tp, place.tp)
        names = hf_names(rule, layer, expert)
        index = shard_slices(rule, [tuple(whole[n].shape) for n in names], size, rank)
        out[rule.megatron, layer, expert] = join(rule, [whole[n][i] for n, i in zip(names, index, strict=True)], a, padded_vocab(a.vocab, size) // size)
    return out
