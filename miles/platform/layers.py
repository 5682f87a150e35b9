"""Which modules a transformer layer is built from: Transformer Engine's on GPU, megatron-core's own with SDPA attention on CPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial

import miles.platform
from miles.core import EnvironmentFault

PLATFORM = miles.platform.activate()

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (  # noqa: E402  (after activate)
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoESubmodules  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from miles.platform.rounding import ExpertLayer, Experts, Router, add_to_residual  # noqa: E402


def layer_spec(config) -> TransformerBlockSubmodules:
    """The specification of the layers of this pipeline stage for a megatron-core TransformerConfig (dense and MoE layers mixed as it says)."""
    on_gpu = PLATFORM.name == "cuda"
    sparse = config.experimental_attention_variant == "dsa"
    if sparse:
        if not on_gpu:
            import miles.platform.cpu_sparse  # noqa: F401  (late: CPU only)

        block = get_transformer_block_with_experimental_attention_variant_spec(config)
    else:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=on_gpu, normalization=config.normalization)
    for layer in block.layer_specs:
        if not on_gpu and not sparse:
            _use_cpu_attention(layer)
        round_as_engine(layer, on_gpu)
    return block


def draft_spec(config, layers: TransformerBlockSubmodules) -> MultiTokenPredictionBlockSubmodules | None:
    """The specification of the draft layers, which are like the last of `layers`, those of this pipeline stage. None: there are none on this stage."""
    return get_gpt_mtp_block_spec(config, layers, use_transformer_engine=PLATFORM.name == "cuda") if config.mtp_num_layers else None


def sparse_kernels() -> str:
    """megatron-core's `dsa_kernel_backend` on this machine.

    Raises EnvironmentFault: a GPU without the kernels. The plain code holds a score for each pair of tokens and each head: at 65,536 tokens more than a GPU has.
    """
    if PLATFORM.name != "cuda":
        return "none"
    if importlib.util.find_spec("tilelang") is None:
        raise EnvironmentFault("tilelang is not installed, and the model has sparse attention", "tilelang, with which megatron-core compiles its kernels for it",
                               "pip install tilelang on the trainer's nodes (docs/gpu.md)")
    return "tilelang"


def _use_cpu_attention(layer: ModuleSpec) -> None:
    from miles.platform.cpu_attention import CpuCoreAttention  # late: CPU only

    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CpuCoreAttention
    if hasattr(attention, "linear_kv_down_proj"):
        from miles.platform.cpu_latent import WholeLinear

        attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear


def round_as_engine(layer: ModuleSpec, on_gpu: bool) -> None:
    """Give a layer the parts of miles.platform.rounding."""
    parts = layer.submodules
    if not on_gpu:
        parts.self_attn_bda = parts.mlp_bda = add_to_residual
    if isinstance(parts.mlp, partial) and isinstance(routed := parts.mlp.keywords["submodules"], MoESubmodules):
        if on_gpu:
            parts.mlp = partial(parts.mlp.func, submodules=replace(routed, router=Router))
        else:
            parts.mlp = partial(ExpertLayer, submodules=replace(routed, router=Router, experts=partial(Experts, **routed.experts.keywords)))
