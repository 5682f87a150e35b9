"""A Hugging Face model as a megatron-core GPTModel under distributed data parallelism, and its distributed optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

import miles.platform
from miles.config.schema import LayoutConfig, LoraConfig, OptimizerConfig
from miles.core import ConfigError, Layout
from miles.platform.layers import draft_spec, layer_spec, sparse_kernels
from miles.trainer.lora import LowRankAdapters
from miles.trainer.mtp import DraftingModel
from miles.trainer.streamed import stream
from miles.weights.mapping import Adapters, Architecture, SparseIndex, load_hf, read_architecture, shards_of
from miles.weights.mapping.tables import padded_vocab
from miles.weights.mapping.transfer import FLOAT32

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class PolicyModel:
    """The part of the policy that this rank holds."""

    chunks: list[DistributedDataParallel]  # one per virtual pipeline stage; today always one
    config: TransformerConfig
    arch: Architecture
    layout: Layout
    routing_replay: bool  # experts are those that were recorded; otherwise its routers choose, and are compared with these
    adapters: LowRankAdapters | None = None  # which are all that is trained, where there are some

    def updated(self) -> None:
        """Its parameters have changed: bring what follows from them into line."""
        if self.adapters is not None:
            self.adapters.merge()


def build_model(folder: str | Path, layout: Layout, *, precision: str = "fp32", recompute: str = "none", routing_replay: bool = True,
                stages: LayoutConfig | None = None, max_context: int = 32768, load: bool = True, value_head: bool = False, mtp: bool = False,
                lora: LoraConfig | None = None, seed: int = 1) -> PolicyModel:
    """The model of a Hugging Face folder on this rank, with its weights. Needs `init_distributed`; a collective call.

    `precision`: fp32 | bf16 (parameters and activations; gradients are always reduced in fp32). `stages`: first_stage_layers and
    last_stage_layers of an uneven pipeline. `load=False` leaves the parameters as they come (a checkpoint is loaded next). `value_head`: one number a token
    in place of the vocabulary, from weights of 0 that no folder has. `mtp`: with the draft layer, which is to be trained (miles.trainer.mtp).
    `lora`: adapters are trained in place of the weights, which are then those of the folder even if a checkpoint is loaded next; new ones follow from `seed`.
    A model with a value head knows no recorded experts.

    Raises ConfigError: an unsupported architecture or precision, or a layout that does not fit it.
    """
    arch = read_architecture(folder, draft=mtp)
    if lora is not None:
        arch = replace(arch, adapters=Adapters(lora.rank, lora.alpha, lora.targets))
    config = transformer_config(arch, layout, precision, recompute, not value_head, stages)
    layers = layer_spec(config)
    model = DraftingModel(
        config=config, transformer_layer_spec=layers, mtp_block_spec=draft_spec(config, layers), vocab_size=padded_vocab(arch.vocab, layout.tp),
        max_sequence_length=max_context,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(), parallel_output=True,
        share_embeddings_and_output_weights=arch.tied and not value_head, position_embedding_type="rope", rotary_percent=arch.rope_fraction,
        rotary_base=arch.rope_theta, rope_scaling=arch.llama3_rope_factor is not None, rope_scaling_factor=arch.llama3_rope_factor or 1.0,
    )
    if value_head and model.post_process:
        model.output_layer = torch.nn.Linear(arch.hidden, 1, bias=False, dtype=config.params_dtype)
        torch.nn.init.zeros_(model.output_layer.weight)
    stage, platform = model, miles.platform.current()
    if platform.name == "cuda":
        model = model.to(platform.device)
    if config.bf16:
        model = Float16Module(config, model)
        for name, buffer in model.named_buffers():
            if name.endswith(FLOAT32):  # megatron-core widens it again in the first forward pass, when what is loaded now would have been rounded
                buffer.data = buffer.data.float()
    for name, parameter in model.named_parameters():
        if ".indexer." in name:  # which keys are picked has no gradient: the index stays as it was loaded, and has neither gradients nor optimizer state
            parameter.requires_grad_(False)
    if load or lora is not None:
        load_hf([model], folder, arch)
    adapters = LowRankAdapters(model, arch, seed) if lora is not None else None
    if adapters is not None and config.recompute_granularity and stage.pre_process:
        # a layer whose input wants no gradient is not computed again, and its adapters would get none
        stage.embedding.register_forward_hook(lambda module, given, embedded: embedded.requires_grad_())
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = partial(_sum_gradients, adapters)
    config.no_sync_func = ddp.no_sync
    return PolicyModel([ddp], config, arch, layout, routing_replay and config.moe_enable_routing_replay, adapters)


def build_optimizer(model: PolicyModel, config: OptimizerConfig, state_dir: Path | None = None, mtp_lr: float | None = None):
    """Adam over this rank's shard of the parameters, fp32 main parameters and moments (megatron-core's distributed optimizer).

    `state_dir`: node-local folder of this rank for streamed state. `mtp_lr`: learning rate of draft layers; as all rates it is `max_lr` of a group of parameters.
    Raises EnvironmentFault: a folder unfit for that.
    """
    whole = MegatronOptimizerConfig(
        optimizer="adam", lr=config.lr, weight_decay=config.weight_decay, adam_beta1=config.beta1, adam_beta2=config.beta2, adam_eps=config.eps,
        clip_grad=config.clip_grad, bf16=model.config.bf16, params_dtype=model.config.params_dtype, use_distributed_optimizer=True,
    )
    drafts = {} if mtp_lr is None else {ParamKey(attr=GRAD_NORM_GROUP_ATTR): {"max_lr": mtp_lr}}  # which marks the parameters of draft layers, and no others
    optimizer = get_megatron_optimizer(whole, model.chunks, config_overrides={**get_standard_config_overrides(whole), **drafts})
    shards = shards_of(model.chunks, model.arch) if config.state == "stream" else {}
    for i, part in enumerate(optimizer.chained_optimizers):
        if config.state == "stream":
            stream(part, state_dir / str(i), shards, moments=config.moments, network=config.state_on_network)
        else:
            part.init_state_fn(part.optimizer, part.config)  # moments exist from the start, so that a checkpoint can be taken before the first step
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def transformer_config(arch: Architecture, layout: Layout, precision: str, recompute: str, recorded_routes: bool,
                       stages: LayoutConfig | None = None) -> TransformerConfig:
    """megatron-core's configuration of a model. `recorded_routes`: its routers may be given recorded experts. Raises ConfigError where the layout does not fit
    the architecture."""
    _check(arch, layout, precision)
    on_gpu = miles.platform.current().name == "cuda"
    dtype = DTYPES[precision]
    moe = {}
    if arch.experts:
        moe = {
            "num_moe_experts": arch.experts, "moe_router_topk": arch.top_k, "moe_ffn_hidden_size": arch.expert_ffn,
            "moe_layer_freq": [int(i in arch.moe_layers) for i in range(arch.layers)],
            "moe_router_score_function": arch.scoring, "moe_router_topk_scaling_factor": None if arch.route_scale == 1.0 else arch.route_scale,
            "moe_router_pre_softmax": arch.scoring == "softmax" and not arch.renormalize,
            "moe_router_num_groups": arch.expert_groups if arch.expert_groups > 1 else None,
            "moe_router_group_topk": arch.top_groups if arch.expert_groups > 1 else None,
            "moe_router_enable_expert_bias": arch.scoring == "sigmoid", "moe_router_bias_update_rate": 0.0,  # the bias stays as it was loaded
            "moe_shared_expert_intermediate_size": arch.shared_ffn or None,
            "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": on_gpu, "moe_enable_routing_replay": recorded_routes,
        }
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute == "full" else {}
    uneven = {}
    if stages is not None:
        uneven = {"num_layers_in_first_pipeline_stage": stages.first_stage_layers, "num_layers_in_last_pipeline_stage": stages.last_stage_layers}
    kind, latent = TransformerConfig, {}
    if arch.latent:
        kind, latent = MLATransformerConfig, _latent_attention(arch)
    config = kind(
        num_layers=arch.layers, hidden_size=arch.hidden, ffn_hidden_size=arch.ffn, num_attention_heads=arch.heads, num_query_groups=arch.groups,
        kv_channels=arch.head_dim, normalization="RMSNorm", layernorm_epsilon=arch.norm_eps, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, add_qkv_bias=arch.qkv_bias, qk_layernorm=arch.qk_norm or bool(arch.latent), attention_dropout=0.0, hidden_dropout=0.0,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=precision == "bf16",
        fp32_residual_connection=precision == "bf16" and not on_gpu,  # miles.platform.rounding
        use_cpu_initialization=not on_gpu, perform_initialization=False,
        transformer_impl="transformer_engine" if on_gpu else "local", gradient_accumulation_fusion=False,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp, sequence_parallel=layout.tp > 1,
        variable_seq_lengths=layout.pp > 1,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # also for dense models: the default is refused with variable lengths
        calculate_per_token_loss=True,  # gradients are summed, never averaged: the loss already carries the weight of each token
        mtp_num_layers=arch.draft_layers or None, mtp_detach_heads=bool(arch.draft_layers),
        **moe, **full, **uneven, **latent,
    )
    if arch.sparse:
        _check_stages(arch, config)
        _check_draft_index(arch, config)
    return config


def _check_draft_index(arch: Architecture, config: TransformerConfig) -> None:
    """megatron-core counts draft layers from 1 too, and keeps the index of a micro-batch under the number of its layer: after a recomputation of the draft layer
    that of the first layer is not what it was."""
    if arch.draft_layers and config.recompute_granularity and config.pipeline_model_parallel_size == 1 and arch.layers > 1 and not arch.sparse.computes(1):
        raise ConfigError("trainer.recompute = 'full' with [trainer.mtp] and a second layer that uses the sparse index of the first",
                          "recompute = 'none', pp > 1, or a model whose second layer computes an index", "set trainer.recompute = 'none'")


def _check_stages(arch: Architecture, config: TransformerConfig) -> None:
    """On every rank alike: one that stops alone leaves the others waiting."""
    for stage in range(config.pipeline_model_parallel_size):
        first = get_transformer_layer_offset(config, pp_rank=stage)
        if not arch.sparse.computes(first):
            raise ConfigError(f"trainer.layout: pipeline stage {stage + 1} starts on layer {first + 1}, which uses the sparse index of a layer before it",
                              f"a start on one of the layers {', '.join(str(i + 1) for i in arch.index_layers)}",
                              "set trainer.layout.first_stage_layers / last_stage_layers")


def _latent_attention(arch: Architecture) -> dict:
    """megatron-core makes the rotary embedding of latent attention itself, inside the layer."""
    a, y = arch.latent, arch.yarn
    stretched = {"rope_type": "rope"}
    if y:
        stretched = {"rope_type": "yarn", "rotary_scaling_factor": y.factor, "original_max_position_embeddings": y.original_context,
                     "beta_fast": y.beta_fast, "beta_slow": y.beta_slow, "mscale": y.mscale, "mscale_all_dim": y.mscale_all_dim}
    sparse = _sparse_attention(arch.sparse) if arch.sparse else {}
    return {"multi_latent_attention": True, "q_lora_rank": a.query_rank, "kv_lora_rank": a.kv_rank, "qk_head_dim": a.plain_dim,
            "qk_pos_emb_head_dim": a.rope_dim, "v_head_dim": a.value_dim, "rotary_base": arch.rope_theta, **stretched, **sparse}


def _sparse_attention(s: SparseIndex) -> dict:
    return {
        "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": s.heads, "dsa_indexer_head_dim": s.head_dim, "dsa_indexer_topk": s.top_k,
        "dsa_indexer_topk_freq": s.frequency, "dsa_indexer_skip_topk_offset": s.offset, "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_k_norm_epsilon": 1e-6, "dsa_indexer_loss_coeff": 0.0,
        "dsa_indexer_rotate_activation": False,  # a rotation of queries and keys alike, which changes no score; engines want it before they round to fp8
        "dsa_kernel_backend": sparse_kernels(),
        "cp_comm_type": "allgather",  # each rank has all keys
    }


def _check(arch: Architecture, layout: Layout, precision: str) -> None:
    if precision not in DTYPES:
        raise ConfigError(f"model.trainer_precision = {precision!r} is not implemented in the trainer", f"one of {', '.join(DTYPES)}",
                          "choose one of these")
    for name, value, what, size in (
        ("num_attention_heads", arch.heads, "tp", layout.tp), ("num_key_value_heads", arch.groups, "tp", layout.tp),
        ("intermediate_size", arch.ffn, "tp", layout.tp), ("experts", arch.experts, "ep", layout.ep), ("expert width", arch.expert_ffn, "etp", layout.etp),
    ):
        if value % size:
            raise ConfigError(f"the model's {name} = {value} is not divisible by trainer.layout.{what} = {size}", f"a divisor of {value}",
                              f"change trainer.layout.{what}")
    if layout.ep > 1 and not arch.experts:
        raise ConfigError(f"trainer.layout.ep = {layout.ep} with a dense model", "ep = 1", "remove trainer.layout.ep")
    if layout.pp > arch.layers:
        raise ConfigError(f"trainer.layout.pp = {layout.pp} with {arch.layers} layers", f"pp <= {arch.layers}", "lower trainer.layout.pp")


def _sum_gradients(adapters, chunks, num_tokens=None, **kwargs):
    """megatron-core's gradient reduction without its division by the number of tokens: see `calculate_per_token_loss` above."""
    finalize_model_grads(chunks, None, **kwargs)
    if adapters is not None:
        adapters.sum_gradients()
