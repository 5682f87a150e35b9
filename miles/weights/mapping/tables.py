"""Which Hugging Face tensors make up which megatron-core parameter, per family, as data; and the slicing that follows from it.

A rule joins its Hugging Face parts in one of four ways (`kind`):

- `plain`: the one part as it is.
- `vocab`: the one part, rows padded with zeros so that tensor parallelism divides them.
- `stack`: parts on top of each other along axis 0 (gate over up). Each tensor-parallel shard stacks *its share of every part*.
- `qkv`: query, key, value rows interleaved by query group: for each group its queries, then its key, then its value.

`axis` is the tensor-parallel axis of the megatron parameter: 0 = column parallel, 1 = row parallel, None = on every rank.
Expert rules are sharded over expert tensor parallel ranks, all others over tensor parallel ranks.

Adapters (`Architecture.adapters`) have rules of their own, which follow from that of the weight: of its factors, B has the weight's rows and A its columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from miles.core import StructureError
from miles.weights.mapping.architecture import Adapters, Architecture

HF_LAYER, MEGATRON_LAYER = "model.layers.{layer}.", "decoder.layers.{layer}."
MEGATRON_DRAFT = "mtp.layers.{layer}."  # Hugging Face folders number draft layers on behind the others


@dataclass(frozen=True)
class Rule:
    """One megatron-core parameter and its Hugging Face parts; names hold {layer} and {expert} where they repeat."""

    megatron: str
    hf: tuple[str, ...]
    kind: str = "plain"
    axis: int | None = None
    where: str = "all"  # layers it is for: all | dense | moe | index (those that compute a sparse index) | draft, which has all rules to itself
    factor: str = ""  # of an adapter: a | b

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron


def _layer(megatron: str, *hf: str, kind: str = "plain", axis: int | None = None, where: str = "all") -> Rule:
    return Rule(MEGATRON_LAYER + megatron, tuple(HF_LAYER + name for name in hf), kind, axis, where)


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", 0)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "vocab", 0)
VALUE_HEAD = Rule("output_layer.weight", ("value_head.weight",))  # a critic's, which no folder has
ATTENTION = (
    _layer("input_layernorm.weight", "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", kind="qkv", axis=0),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", axis=1),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
LATENT_ATTENTION = (
    _layer("input_layernorm.weight", "input_layernorm.weight"),
    _layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    _layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    _layer("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    _layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", axis=0),
    _layer("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    _layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", axis=0),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", axis=1),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
INDEXER = (
    _layer("self_attention.core_attention.indexer.linear_wq_b.weight", "self_attn.indexer.wq_b.weight", where="index"),
    _layer("self_attention.core_attention.indexer.linear_wk.weight", "self_attn.indexer.wk.weight", where="index"),
    _layer("self_attention.core_attention.indexer.k_norm.weight", "self_attn.indexer.k_norm.weight", where="index"),
    _layer("self_attention.core_attention.indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", where="index"),
    _layer("self_attention.core_attention.indexer.linear_weights_proj.weight", "self_attn.indexer.weights_proj.weight", where="index"),
)
QKV_BIAS = (_layer("self_attention.linear_qkv.bias", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", kind="qkv", axis=0),)
QK_NORM = (
    _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
DENSE_MLP = (
    _layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", kind="stack", axis=0, where="dense"),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", axis=1, where="dense"),
)
ROUTER = (_layer("mlp.router.weight", "mlp.gate.weight", where="moe"),)
ROUTER_BIAS = (_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", where="moe"),)
SHARED_EXPERT = (
    _layer("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
           kind="stack", axis=0, where="moe"),
    _layer("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", axis=1, where="moe"),
)
EXPERTS = (
    _layer("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight",
           kind="stack", axis=0, where="moe"),
    _layer("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.{expert}.down_proj.weight", axis=1, where="moe"),
)
# Some folders have the embedding and the output layer once more as embed_tokens and shared_head.head of the draft layer. The model's own are used in their place on
# both sides (SGLang 0.5.23 skips them), so nothing is loaded from them and nothing exported to them.
DRAFT = (
    Rule(MEGATRON_DRAFT + "enorm.weight", (HF_LAYER + "enorm.weight",), where="draft"),
    Rule(MEGATRON_DRAFT + "hnorm.weight", (HF_LAYER + "hnorm.weight",), where="draft"),
    Rule(MEGATRON_DRAFT + "eh_proj.weight", (HF_LAYER + "eh_proj.weight",), axis=0, where="draft"),
    Rule(MEGATRON_DRAFT + "final_layernorm.weight", (HF_LAYER + "shared_head.norm.weight",), where="draft"),
)
FAMILY_LAYERS: dict[str, tuple[Rule, ...]] = {
    "llama": ATTENTION + DENSE_MLP,
    "qwen3": ATTENTION + QK_NORM + DENSE_MLP,
    "qwen3_moe": ATTENTION + QK_NORM + ROUTER + EXPERTS,
    "glm4_moe": ATTENTION + DENSE_MLP + ROUTER + ROUTER_BIAS + EXPERTS,
    "deepseek_v3": LATENT_ATTENTION + DENSE_MLP + ROUTER + ROUTER_BIAS + EXPERTS,
    "kimi_k2": LATENT_ATTENTION + DENSE_MLP + ROUTER + ROUTER_BIAS + EXPERTS,
    "glm_moe_dsa": LATENT_ATTENTION + INDEXER + DENSE_MLP + ROUTER + ROUTER_BIAS + EXPERTS,
}

ADAPTED = {"attention": (".self_attention.linear_",), "mlp": (".mlp.linear_fc", ".mlp.shared_experts.linear_fc"), "experts": (".mlp.experts.",)}
"""What a kind of adapted weights has in its megatron-core names."""
FACTORS = re.compile(r"\.lora_[ab]\d*$")
"""Ends the megatron-core names of adapters."""

# Transformer Engine fuses the norm into the linear layer behind it and keeps all experts in one module: same tensors, other names.
TRANSFORMER_ENGINE_NAMES = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_weight$"), ".input_layernorm.weight"),
    (re.compile(r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$"), r".self_attention.\1_layernorm.weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),
    (re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|lora_a|lora_b)(\d+)$"), r".mlp.experts.local_experts.\3.\1.\2"),
)


def rules_for(arch: Architecture) -> tuple[Rule, ...]:
    """All rules of a model, in the order in which its parameters are exported."""
    layer = FAMILY_LAYERS[arch.family]
    if arch.family == "glm4_moe":
        layer += (QKV_BIAS if arch.qkv_bias else ()) + (QK_NORM if arch.qk_norm else ())
    layer += SHARED_EXPERT if arch.shared_ffn else ()
    draft = (*DRAFT, *(_of_draft(r) for r in layer if r.where in ("all", "moe", "index"))) if arch.draft_layers else ()
    factors = (factor for rule in layer if arch.adapters and is_adapted(rule, arch.adapters) for factor in factors_of(rule))
    return (EMBEDDING, *layer, *factors, *draft, FINAL_NORM, *(() if arch.tied else (OUTPUT,)))


def is_adapted(rule: Rule, adapters: Adapters) -> bool:
    return rule.megatron.endswith(".weight") and any(mark in rule.megatron for target in adapters.targets for mark in ADAPTED[target])


def factors_of(rule: Rule) -> tuple[Rule, Rule]:
    """A and B of an adapted weight, under the names that PEFT gives them (without its prefix). Parts of one weight share an A, which has the name of the first."""
    stem = rule.megatron.removesuffix("weight")
    a, b = (tuple(name.removesuffix("weight") + f"lora_{factor}.weight" for name in rule.hf) for factor in "AB")
    return (replace(rule, megatron=stem + "lora_a", factor="a", hf=a[:1], kind="plain", axis=1 if rule.axis == 1 else None),
            replace(rule, megatron=stem + "lora_b", factor="b", hf=b, axis=0 if rule.axis == 0 else None))


def _of_draft(rule: Rule) -> Rule:
    """The same for the transformer layer inside a draft layer, which has experts and computes an index."""
    return replace(rule, megatron=rule.megatron.replace(MEGATRON_LAYER, MEGATRON_DRAFT + "mtp_model_layer."), where="draft")


def parameters(arch: Architecture) -> Iterator[tuple[Rule, int | None, int | None]]:
    """Every parameter of the whole model as (rule, layer, expert), layer by layer: the order all ranks agree on."""
    rules = rules_for(arch)
    yield from ((r, None, None) for r in rules if not r.per_layer and r is not FINAL_NORM and r is not OUTPUT)
    for layer in range(arch.layers + arch.draft_layers):
        kinds = ("all", "moe" if layer in arch.moe_layers else "dense", *(("index",) if layer in arch.index_layers else ()))
        if layer >= arch.layers:
            kinds = ("draft",)
        for rule in rules:
            if rule.per_layer and rule.where in kinds:
                for expert in range(arch.experts) if rule.per_expert else (None,):
                    yield rule, layer, expert
    yield from ((r, None, None) for r in rules if r in (FINAL_NORM, OUTPUT))


def hf_names(rule: Rule, layer: int | None, expert: int | None) -> tuple[str, ...]:
    """Hugging Face names of a parameter's parts."""
    return tuple(name.format(layer=layer, expert=expert) for name in rule.hf)


def find_rule(arch: Architecture, name: str) -> tuple[Rule, int | None, int | None]:
    """The rule of a megatron parameter name, with its layer and expert index as they stand in the name (draft layers are counted from 0 there).

    Raises StructureError: a parameter that no rule covers.
    """
    for pattern, local in TRANSFORMER_ENGINE_NAMES:
        name = pattern.sub(local, name)
    numbers = re.match(r"(?:decoder|mtp)\.layers\.(\d+)\.(?:.*\.local_experts\.(\d+)\.)?", name)
    layer = int(numbers[1]) if numbers else None
    expert = int(numbers[2]) if numbers and numbers[2] else None
    for rule in rules_for(arch):
        if rule.megatron.format(layer=layer, expert=expert) == name:
            return rule, layer, expert
    if arch.tied and name == OUTPUT.megatron:  # the last pipeline stage keeps a copy of the embedding
        return Rule(OUTPUT.megatron, EMBEDDING.hf, "vocab", 0), None, None
    raise StructureError(f"megatron-core parameter {name} has no Hugging Face counterpart", f"a rule in the {arch.family} table",
                         "extend miles/weights/mapping/tables.py")


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of the embedding in megatron-core: the vocabulary, rounded up so that tensor parallelism divides it."""
    return -(-vocab // tp) * tp


def shard_slices(rule: Rule, shapes: list[tuple[int, ...]], size: int, rank: int) -> list[tuple[slice, ...]]:
    """For each Hugging Face part, what shard `rank` of `size` needs of it (`shapes`: shapes of the parts). Pure index arithmetic.

    Raises StructureError: `size` does not divide the axis.
    """
    out = []
    for shape in shapes:
        index = [slice(None)] * len(shape)
        if rule.axis is not None and size > 1:
            n = padded_vocab(shape[0], size) if rule.kind == "vocab" else shape[rule.axis]
            if n % size:
                raise StructureError(f"{rule.megatron}: axis {rule.axis} of {shape} is not divisible by {size} tensor parallel ranks",
                                     f"a multiple of {size}", "lower trainer.layout.tp (or etp)")
            share = n // size
            index[rule.axis] = slice(rank * share, min((rank + 1) * share, shape[rule.axis]))
        out.append(tuple(index))
    return out


def join(rule: Rule, parts: list[torch.Tensor], arch: Architecture, rows: int) -> torch.Tensor:
    """One shard of the megatron parameter from the matching slices of its Hugging Face parts. `rows`: its first dimension (vocab padding)."""
    if rule.kind == "plain":
        return parts[0]
    if rule.kind == "vocab":
        missing = rows - parts[0].shape[0]
        return torch.cat([parts[0], parts[0].new_zeros((missing, *parts[0].shape[1:]))]) if missing else parts[0]
    if rule.kind == "stack":
        return torch.cat(parts)
    rest = parts[0].shape[1:]
    groups = parts[1].shape[0] // arch.head_dim
    return torch.cat([p.reshape(groups, -1, *rest) for p in parts], dim=1).reshape(-1, *rest)


def split(rule: Rule, shards: list[torch.Tensor], arch: Architecture) -> list[torch.Tensor]:
    """The Hugging Face parts from all tensor-parallel shards of a megatron parameter: the inverse of slicing and `join`."""
    if rule.axis is None:
        return [shards[0]]
    if rule.kind == "stack":
        halves = [s.chunk(len(rule.hf)) for s in shards]
        return [torch.cat(pieces) for pieces in zip(*halves, strict=True)]
    whole = torch.cat(shards, dim=rule.axis) if len(shards) > 1 else shards[0]
    if rule.kind == "vocab":
        return [whole[: arch.vocab]]
    if rule.kind == "qkv":
        rest = whole.shape[1:]
        queries = arch.heads // arch.groups * arch.head_dim
        by_group = whole.reshape(arch.groups, queries + 2 * arch.head_dim, *rest)
        return [p.reshape(-1, *rest) for p in by_group.split([queries, arch.head_dim, arch.head_dim], dim=1)]
    return [whole]
