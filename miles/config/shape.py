"""Parameter counts of a model from its Hugging Face `config.json`, split the way parallel layouts split them. Pure arithmetic.

Counts follow the modules of transformers' `llama`, `qwen3`, `qwen3_moe`, `glm4_moe`, `deepseek_v3` and `glm_moe_dsa`. What tensor
parallelism splits and what it repeats follows megatron-core: norms, routers, the down projections of multi-head latent attention (MLA) and
the sparse-attention indexer are held whole by every tensor-parallel rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.schema import LoraConfig, MilesConfig
from miles.core import ConfigError

FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "glm_moe_dsa")
KNOWN_MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"


@dataclass(frozen=True)
class LayerShape:
    """Parameters of one transformer layer."""

    attention: int  # split by tensor parallelism
    mlp: int  # dense MLP or shared experts; split by tensor parallelism
    replicated: int  # norms, router, latent down projections, indexer: whole on every rank
    experts: int  # routed experts, 0 in a dense layer
    expert: int  # parameters of one routed expert
    indexes: bool  # computes a sparse-attention index (True in every layer of a model without shared indexes)
    frozen: int  # of `replicated`, what is held and not trained: the indexer
    sides: dict[str, tuple[int, int]]  # of the matrices of each kind of trainer.lora.targets (`experts`: of one expert), the sides that are split, and that are not: an adapter of rank r has r parameters for each

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.replicated + self.experts * self.expert


@dataclass(frozen=True)
class ModelShape:
    """A whole model. `embedding` and `head` are split by tensor parallelism; a tied head counts 0 parameters."""

    family: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    ffn: int  # dense MLP
    expert_ffn: int
    experts: int
    top_k: int
    max_context: int
    layers: tuple[LayerShape, ...]
    draft: tuple[LayerShape, ...]  # multi-token-prediction layers: in the engine where it speculates, in the trainer with [trainer.mtp]
    embedding: int
    head: int
    sparse: bool  # DeepSeek sparse attention (an indexer picks the keys)
    attention_width: int  # elements of query, key, value and output of one token and layer, all heads
    kv_latent: int  # MLA: elements cached per token and layer that are quantized; 0 without MLA
    kv_rope: int  # MLA: rotary elements cached per token and layer
    head_dim: int
    index_dim: int  # elements of the indexer's key, 0 without sparse attention
    index_width: int  # of its queries, all heads
    index_topk: int  # keys that it picks for a token
    score_width: int  # elements of query and value of one token and layer, all heads: multiplications of attention for each key that it sees
    lora: LoraConfig | None = None  # adapters, which are then all that is trained

    @property
    def total(self) -> int:
        """Parameters of the model without its draft layers."""
        return sum(layer.total for layer in self.layers) + self.embedding + self.head + self.hidden


def find_hf_config(config: MilesConfig) -> dict[str, Any]:
    """`config.json` of the run's model: from `model.path`, else the stored one of that name. Raises ConfigError when there is neither."""
    folder = Path(config.model.path)
    for path in (folder / "config.json", KNOWN_MODELS / folder.name.lower() / "config.json"):
        if path.is_file():
            return json.loads(path.read_text())
    known = ", ".join(sorted(p.parent.name for p in KNOWN_MODELS.glob("*/config.json")))
    raise ConfigError(
        f"model.path = {config.model.path} has no config.json and no stored model has that name",
        f"a Hugging Face folder, or one of: {known}",
        "correct model.path" + (f", or run `miles-submit prepare` (recipe {config.model.recipe})" if config.model.recipe != "none" else ""),
    )


def index_layers(hf: dict[str, Any]) -> tuple[bool, ...]:
    """Which layers compute the sparse index; the others reuse the last one (GLM-5.2). All of them when the file names no schedule."""
    n = hf["num_hidden_layers"]
    if hf.get("indexer_types"):
        return tuple(t == "full" for t in hf["indexer_types"])
    if hf.get("index_topk_pattern"):
        return tuple(c == "F" for c in hf["index_topk_pattern"])
    freq, offset = hf.get("index_topk_freq") or 1, hf.get("index_skip_topk_offset") or 2
    return tuple(max(i - offset + 1, 0) % freq == 0 for i in range(n))


def model_shape(hf: dict[str, Any]) -> ModelShape:
    """Count a model. Raises ConfigError for a family that is not in `FAMILIES` or a file that lacks a size."""
    family = hf.get("model_type", "")
    if family not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {family!r} is not known to the memory plan",
            f"one of {', '.join(FAMILIES)}",
            "use a model of these families, or add its count to miles/config/shape.py",
        )
    try:
        return _count(family, hf)
    except KeyError as e:
        raise ConfigError(
            f"config.json of a {family} model lacks {e.args[0]!r}", "the file as published with the weights", "restore the file"
        ) from e


def _count(family: str, hf: dict[str, Any]) -> ModelShape:
    h, n, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    latent = bool(hf.get("kv_lora_rank"))
    kv_heads = heads if latent else hf.get("num_key_value_heads") or heads
    head_dim = hf["v_head_dim"] if latent else hf.get("head_dim") or h // heads
    experts = hf.get("n_routed_experts") or hf.get("num_experts") or hf.get("num_local_experts") or 0
    expert_ffn = hf["moe_intermediate_size"] if experts else 0
    ffn = hf["intermediate_size"]
    expert = 3 * h * expert_ffn

    if latent:
        split, repeated, width, sides = _latent_attention(hf, h, heads)
    else:
        q, kv = heads * head_dim, kv_heads * head_dim
        bias = q + 2 * kv if hf.get("attention_bias") else 0
        split, width = 2 * h * q + 2 * h * kv + bias, 2 * q + 2 * kv
        has_qk_norm = family.startswith("qwen3") or hf.get("use_qk_norm")
        repeated = 2 * head_dim if has_qk_norm else 0
        sides = q + 2 * kv + q, 2 * h  # of the matrix of queries, keys and values, and of the output projection

    sparse = bool(hf.get("index_topk"))
    indexes = index_layers(hf) if sparse else (True,) * n
    indexer = 0
    if sparse:  # queries from the query latent, one key head with its LayerNorm, one weight per head
        ih, idim = hf["index_n_heads"], hf["index_head_dim"]
        indexer = hf["q_lora_rank"] * ih * idim + h * idim + 2 * idim + h * ih

    def layer(is_moe: bool, has_index: bool, extra: int = 0) -> LayerShape:
        router = experts * h + (experts if family not in ("qwen3_moe",) else 0) if is_moe else 0  # weight, and the score-correction bias
        frozen = indexer if has_index else 0
        mlp_ffn = expert_ffn * (hf.get("n_shared_experts") or 0) if is_moe else ffn
        mlp = 3 * h * mlp_ffn
        return LayerShape(
            split,
            mlp,
            repeated + 2 * h + router + frozen + extra,
            experts if is_moe else 0,
            expert if is_moe else 0,
            has_index,
            frozen,
            {"attention": sides, "mlp": (3 * mlp_ffn, 2 * h if mlp_ffn else 0), "experts": (3 * expert_ffn, 2 * h) if is_moe else (0, 0)},  # gate and up are one matrix
        )

    moe = _moe_layers(hf, experts, n)
    draft_layer = layer(bool(experts), sparse, 2 * h * h + 3 * h)  # plus the projection that joins embedding and hidden state
    return ModelShape(
        family=family,
        hidden=h,
        vocab=hf["vocab_size"],
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        expert_ffn=expert_ffn,
        experts=experts,
        top_k=hf.get("num_experts_per_tok", 0),
        max_context=hf.get("max_position_embeddings", 0),
        layers=tuple(layer(m, i) for m, i in zip(moe, indexes, strict=True)),
        draft=(draft_layer,) * (hf.get("num_nextn_predict_layers") or 0),
        embedding=hf["vocab_size"] * h,
        head=0 if hf.get("tie_word_embeddings") else hf["vocab_size"] * h,
        sparse=sparse,
        attention_width=width,
        kv_latent=hf["kv_lora_rank"] if latent else 0,
        kv_rope=hf["qk_rope_head_dim"] if latent else 0,
        head_dim=head_dim,
        index_dim=hf["index_head_dim"] if sparse else 0,
        index_width=hf["index_n_heads"] * hf["index_head_dim"] if sparse else 0,
        index_topk=hf["index_topk"] if sparse else 0,
        score_width=width // 2 if latent else 2 * heads * head_dim,
    )


def _latent_attention(hf: dict[str, Any], h: int, heads: int) -> tuple[int, int, int, tuple[int, int]]:
    """MLA: (split, repeated, width, sides). The up and output projections are split by heads, the down projections and their norms repeated."""
    nope, rope, v, kv_rank, q_rank = (hf[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"))
    up = q_rank * heads * (nope + rope) + kv_rank * heads * (nope + v) + heads * v * h
    down = h * q_rank + q_rank + h * (kv_rank + rope) + kv_rank
    sides = heads * (nope + rope) + heads * (nope + v) + heads * v, q_rank + kv_rank + h + h + q_rank + h + kv_rank + rope
    return up, down, heads * (2 * (nope + rope) + 2 * v), sides


def _moe_layers(hf: dict[str, Any], experts: int, n: int) -> tuple[bool, ...]:
    if not experts:
        return (False,) * n
    if hf.get("mlp_layer_types"):
        return tuple(t == "sparse" for t in hf["mlp_layer_types"])
    dense = set(hf.get("mlp_only_layers") or ())
    return tuple(i >= hf.get("first_k_dense_replace", 0) and i not in dense for i in range(n))
