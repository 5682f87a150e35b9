"""What a model is, read from the `config.json` of an ordinary Hugging Face folder. Pure: no torch, no transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles.config.shape import index_layers
from miles.core import ConfigError

FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "glm_moe_dsa")


@dataclass(frozen=True)
class Yarn:
    """Rotary frequencies stretched to a longer context (YaRN, Peng et al. 2023, arXiv:2309.00071), as DeepSeek-V3 configures it."""

    factor: float
    original_context: int  # tokens
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values are projected up from one small vector a token."""

    query_rank: int  # width of the queries' latent vector
    kv_rank: int  # width of the latent vector of keys and values
    plain_dim: int  # of a head's query and key, without position
    rope_dim: int  # of a head's query, and of the one rotated key that all heads share
    value_dim: int  # of a head's value


@dataclass(frozen=True)
class SparseIndex:
    """What picks the keys that a token attends to (DeepSeek sparse attention; DeepSeek-V3.2, arXiv:2512.02556, section 2.1): a small attention beside the
    large one, whose scores rank the keys. Some layers compute such an index, each other one uses that of the last before it: counting layers from 1, the
    first `offset` compute one, and then every `frequency`-th.
    """

    heads: int
    head_dim: int  # of a head's query, and of the one key that all heads share
    top_k: int  # keys picked for a token
    frequency: int
    offset: int

    def computes(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, computes an index."""
        return max(layer + 1 - self.offset, 0) % self.frequency == 0


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): beside a frozen weight W [out, in], A [rank, in] and B [out, rank] are trained, and used is
    W + (alpha / rank) B A."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # kinds of weights that have them, of miles.weights.mapping.tables.ADAPTED

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder-only language model, in one vocabulary for all families."""

    family: str  # model_type of config.json, one of FAMILIES
    layers: int
    hidden: int
    heads: int
    groups: int  # key/value heads
    head_dim: int
    ffn: int  # width of a dense feed-forward layer
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_fraction: float  # share of head_dim that is rotated
    llama3_rope_factor: float | None  # Llama 3's frequency scaling; None = plain
    tied: bool  # output layer shares the embedding
    qk_norm: bool
    qkv_bias: bool
    # mixture of experts; experts = 0 for dense models
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0  # leading layers without experts
    renormalize: bool = True  # weights of the chosen experts sum to 1 (before scaling)
    scoring: str = "softmax"  # softmax | sigmoid (with a selection bias)
    route_scale: float = 1.0
    expert_groups: int = 1  # group-limited routing: experts are in so many groups,
    top_groups: int = 1  # of which so many are eligible
    shared_ffn: int = 0  # width of the always-on expert, 0 = none
    latent: LatentAttention | None = None  # head_dim is then that of queries and keys, and every head has its own
    yarn: Yarn | None = None
    sparse: SparseIndex | None = None
    draft_layers: int = 0  # multi-token prediction layers behind the others; 0 also where the model has some and the trainer does not hold them
    adapters: Adapters | None = None  # of the trainer: no config.json says it

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts, ascending: the layer axis of recorded routes."""
        return tuple(range(self.dense_layers, self.layers)) if self.experts else ()

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Indices of the layers that compute a sparse index, ascending."""
        return tuple(i for i in range(self.layers) if self.sparse.computes(i)) if self.sparse else ()


STRETCHED = ("deepseek_v3", "kimi_k2")
"""Families whose rotary frequencies may be stretched (YaRN). Kimi-K2 is DeepSeek-V3 with other sizes."""
LATENT = (*STRETCHED, "glm_moe_dsa")
"""Families with multi-head latent attention. GLM-5 is DeepSeek-V3 with a sparse index, which not every layer computes."""
DRAFTING = ("glm4_moe", *LATENT)
"""Families that may have a multi-token prediction layer (DeepSeek-V3, arXiv:2412.19437, section 2.2), with experts and, where there is one, an index of its own."""


def read_architecture(folder: str | Path, *, draft: bool = False) -> Architecture:
    """Architecture of the Hugging Face model in `folder`. `draft`: with its multi-token prediction layer, which the trainer holds only where it trains it.

    Raises ConfigError: no config.json, a family without a table, a switch that megatron-core would silently ignore, or no such layer.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"no {path}", "an ordinary Hugging Face model folder", "check model.path, or run `miles-submit prepare`")
    return architecture_of(json.loads(path.read_text()), str(path), draft=draft)


def architecture_of(c: dict[str, Any], where: str = "config.json", *, draft: bool = False) -> Architecture:
    """Architecture from the content of a config.json; `where` names it in messages."""
    arch = _architecture(c, where)
    return replace(arch, draft_layers=_draft_layers(c, arch, where)) if draft else arch


def _draft_layers(c: dict[str, Any], arch: Architecture, where: str) -> int:
    """One: engines read one and apply it again for each further token that they draft."""
    found = c.get("num_nextn_predict_layers") or 0
    if found != 1 or arch.family not in DRAFTING:
        raise ConfigError(f"{where}: model_type {arch.family!r} with num_nextn_predict_layers = {found} has no draft layer that the trainer knows",
                          f"one layer, in a model of type {', '.join(DRAFTING)}", "remove [trainer.mtp], or use another model")
    if arch.tied:
        raise ConfigError(f"{where}: a draft layer with tie_word_embeddings = true is not supported by the trainer", "an output layer of its own",
                          "remove [trainer.mtp], or use another model")
    return found


def _architecture(c: dict[str, Any], where: str) -> Architecture:

    def demand(key: str, value: Any, default: Any) -> None:
        if c.get(key, default) != value:
            raise ConfigError(f"{where}: {key} = {c[key]!r} is not supported by the trainer", f"{key} = {value!r}", "use another model")

    family = c.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where}: model_type {family!r} has no weight table", f"one of {', '.join(FAMILIES)}",
                          "add a table in miles/weights/mapping/tables.py")
    demand("hidden_act", "silu", "silu")
    demand("mlp_bias", False, False)
    rope = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    factor = None
    if kind == "llama3":
        given = {**scaling, **rope}
        expected = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if any(given.get(k) != v for k, v in expected.items()):
            raise ConfigError(f"{where}: llama3 rope scaling {given}", f"{expected}, the values megatron-core has built in", "use another model")
        factor = float(given["factor"])
    elif kind != "default" and not (kind == "yarn" and family in STRETCHED):
        raise ConfigError(f"{where}: rope type {kind!r} is not supported by the trainer", "default or llama3", "use another model")
    heads = c["num_attention_heads"]
    base = {
        "family": family, "layers": c["num_hidden_layers"], "hidden": c["hidden_size"], "heads": heads,
        "groups": c.get("num_key_value_heads") or heads, "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "ffn": c["intermediate_size"], "vocab": c["vocab_size"], "norm_eps": c["rms_norm_eps"],
        "rope_theta": float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
        "rope_fraction": float(rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0),
        "llama3_rope_factor": factor, "tied": bool(c.get("tie_word_embeddings", False)),
        "qk_norm": family in ("qwen3", "qwen3_moe"), "qkv_bias": bool(c.get("attention_bias", False)),
    }
    if family in ("llama", "qwen3", "qwen3_moe"):
        demand("attention_bias", False, False)  # their output projection would have a bias too
    if family in ("qwen3", "qwen3_moe"):
        demand("use_sliding_window", False, False)
    if family == "qwen3_moe":
        demand("decoder_sparse_step", 1, 1)
        demand("mlp_only_layers", [], [])
        return Architecture(**base, experts=c.get("num_experts") or c["num_local_experts"], top_k=c["num_experts_per_tok"],
                            expert_ffn=c["moe_intermediate_size"], renormalize=bool(c.get("norm_topk_prob", False)))
    if family not in ("glm4_moe", *LATENT):
        return Architecture(**base)
    demand("norm_topk_prob", True, True)
    routed = {
        "experts": c["n_routed_experts"], "top_k": c["num_experts_per_tok"], "expert_ffn": c["moe_intermediate_size"],
        "dense_layers": c["first_k_dense_replace"], "scoring": "sigmoid", "route_scale": float(c.get("routed_scaling_factor", 1.0)),
        "expert_groups": c.get("n_group") or 1, "top_groups": c.get("topk_group") or 1,
        "shared_ffn": c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0),
    }
    if routed["expert_groups"] > 1 and routed["top_k"] != 2 * routed["top_groups"]:
        raise ConfigError(f"{where}: num_experts_per_tok = {routed['top_k']} with topk_group = {routed['top_groups']}",
                          "num_experts_per_tok = 2 x topk_group: groups are ranked by their best two experts, in megatron-core by their best top_k / topk_group",
                          "use another model")
    if family == "glm4_moe":
        return Architecture(**{**base, "qk_norm": bool(c.get("use_qk_norm", False))}, **routed)
    for key, value in (("rope_interleave", True), ("attention_bias", False), ("moe_layer_freq", 1), ("scoring_func", "sigmoid")):
        demand(key, value, value)
    if not c.get("q_lora_rank"):
        raise ConfigError(f"{where}: q_lora_rank = {c.get('q_lora_rank')!r} is not supported by the trainer", "queries with a latent vector, as DeepSeek-V3 has",
                          "use another model")
    latent = LatentAttention(c["q_lora_rank"], c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"])
    yarn = None
    if kind == "yarn":
        given = {**scaling, **rope}
        yarn = Yarn(float(given["factor"]), given["original_max_position_embeddings"], float(given.get("beta_fast", 32)), float(given.get("beta_slow", 1)),
                    float(given.get("mscale", 1.0)), float(given.get("mscale_all_dim", 0.0)))
    # its rotary width is its own: what config.json calls head_dim is not the width of a head
    base |= {"groups": heads, "head_dim": latent.plain_dim + latent.rope_dim, "rope_fraction": 1.0}
    if family != "glm_moe_dsa":
        return Architecture(**base, **routed, latent=latent, yarn=yarn)
    for key, value in (("indexer_rope_interleave", True), ("index_k_norm_type", "layer"),
                       ("mlp_layer_types", ["dense"] * routed["dense_layers"] + ["sparse"] * (base["layers"] - routed["dense_layers"]))):
        demand(key, value, value)
    sparse = SparseIndex(c["index_n_heads"], c["index_head_dim"], c["index_topk"], *_index_schedule(index_layers(c), base["layers"], where))
    return Architecture(**base, **routed, latent=latent, sparse=sparse)


def _index_schedule(computes: tuple[bool, ...], layers: int, where: str) -> tuple[int, int]:
    """(frequency, offset) of a SparseIndex whose layers compute an index where `computes` says so. Raises ConfigError: no such pair gives these layers."""
    if len(computes) != layers:
        raise ConfigError(f"{where}: says of {len(computes)} layers whether they compute a sparse index, and the model has {layers}", "one entry a layer",
                          "restore the file")
    full = [i for i in range(1, layers + 1) if computes[i - 1]]
    offset = next((i for i in range(layers) if not computes[i]), layers)
    frequency = next((i - offset for i in full if i > offset), layers)
    if not offset or full != [i for i in range(1, layers + 1) if max(i - offset, 0) % frequency == 0]:
        raise ConfigError(f"{where}: layers {full} (counted from 1) compute the sparse index", "the first ones and then every n-th, as megatron-core has them",
                          "use another model")
    return frequency, offset
