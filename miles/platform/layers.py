"""Which modules a transformer layer is built from: Transformer Engine's on GPU, megatron-core's own with SDPA attention on CPU."""

from __future__ import annotations

import miles.platform

PLATFORM = miles.platform.activate()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402  (after activate)
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402


def layer_spec(config) -> TransformerBlockSubmodules:
    """The specification of the layers of this pipeline stage for a megatron-core TransformerConfig (dense and MoE layers mixed as it says)."""
    on_gpu = PLATFORM.name == "cuda"
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=on_gpu, normalization=config.normalization)
    if not on_gpu:
        for layer in block.layer_specs:
            _use_cpu_attention(layer)
    return block


def _use_cpu_attention(layer: ModuleSpec) -> None:
    from miles.platform.cpu_attention import CpuCoreAttention  # late: CPU only

    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CpuCoreAttention
    if hasattr(attention, "linear_kv_down_proj"):
        from miles.platform.cpu_latent import WholeLinear

        attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear
