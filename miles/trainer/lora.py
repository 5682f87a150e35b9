"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): of a weight matrix W [out, in], which stays frozen, A [r, in] and B [out, r] are trained.

    h = W x + (alpha / r) B A x      ->      h = W' x,   W' = W + (alpha / r) B A, rounded to the dtype of W      (miles.weights.adapters.merge)

The model's own parameter is W', made anew after each step from the frozen W, which lies in host memory. So everything that reads weights sees the policy as it
is, and it computes with the bytes that engines serve; h = W x + B (A x) would be another sum in another order. Rounding has no gradient of its own:
dA = s B^T dW', dB = s dW' A^T with s = alpha / r. The gradient dW' of one matrix at a time is made for that, as in training W, and given up again.

Parallelism needs no communication of its own for that, but for one sum: of a matrix cut by columns (rows) B (A) is cut alike and A (B) is whole on every rank,
which has the part of its gradient that follows from its shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from miles.core import ConfigError
from miles.weights.adapters import merge, new_a
from miles.weights.digest import digest
from miles.weights.mapping import Architecture, Rule, Shard, export_hf, shards_of
from miles.weights.mapping.tables import factors_of, is_adapted
from miles.weights.store import combined_digest


class _Factor(NamedTuple):
    """A or B on this rank."""

    parameter: torch.nn.Parameter
    name: str  # in checkpoints
    rule: Rule
    weight: Shard

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which its weight is cut."""
        return parallel_state.get_expert_tensor_parallel_group() if self.rule.per_expert else parallel_state.get_tensor_model_parallel_group()


class _Adapted(NamedTuple):
    weight: torch.Tensor  # W', the parameter of the model
    base: torch.Tensor  # W, in host memory
    a: torch.nn.Parameter
    b: torch.nn.Parameter


class LowRankAdapters:
    """The adapters of this rank's part of a model, and the frozen weights under them."""

    def __init__(self, model: torch.nn.Module, arch: Architecture, seed: int):
        """Freezes `model`, which has its weights and is not under data parallelism yet, and gives it the adapters `arch.adapters`, new ones. A collective call.

        Raises ConfigError, on every rank: a pipeline stage has no weight of the kinds that are to have adapters.
        """
        self._scale, self._rank = arch.adapters.scale, arch.adapters.rank
        self._adapted: list[_Adapted] = []
        self._factors: list[_Factor] = []
        model.requires_grad_(False)
        owners = {p: (module, name) for module in model.modules() for name, p in module.named_parameters(recurse=False)}
        for weight, shard in shards_of([model], arch).items():
            if is_adapted(shard.rule, arch.adapters):
                self._adapt(*owners[weight], weight, shard, seed)
        fewest = torch.tensor(len(self._adapted), device=next(model.parameters()).device)
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
        if not fewest:
            raise ConfigError(f"trainer.lora.targets = {list(arch.adapters.targets)}: a pipeline stage has no such weight, and so nothing to train",
                              "adapters on every stage", "add 'attention' to trainer.lora.targets")

    def _adapt(self, module: torch.nn.Module, name: str, weight: torch.nn.Parameter, shard: Shard, seed: int) -> None:
        rows, columns = weight.shape
        cut = shard.rule.axis == 1
        a = new_a(shard.names[0], seed, self._rank, columns * shard.of if cut else columns)
        if cut:
            a = a[:, shard.index * columns:(shard.index + 1) * columns]
        suffix = name.removeprefix("weight")  # its number, in a module with the weights of several experts
        for rule, value in zip(factors_of(shard.rule), (a, torch.zeros(rows, self._rank)), strict=True):
            parameter = torch.nn.Parameter(value.to(weight).contiguous())
            parameter.allreduce = getattr(weight, "allreduce", True)  # of an expert, which has data-parallel ranks of its own
            set_tensor_model_parallel_attributes(parameter, rule.axis is not None, rule.axis or 0, 1)
            module.register_parameter(f"lora_{rule.factor}{suffix}", parameter)
            self._factors.append(_Factor(parameter, f"{shard.names[0].removesuffix('weight')}lora_{rule.factor}", rule, shard))
        _merge_in_forward(module, name, suffix, self._scale)
        base = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda).copy_(weight.detach())
        self._adapted.append(_Adapted(weight.detach(), base, *(f.parameter for f in self._factors[-2:])))

    def merge(self) -> None:
        """Make the model's weights those of the adapters."""
        for w in self._adapted:
            merge(w.base.to(w.weight.device, non_blocking=True), w.a.detach(), w.b.detach(), self._scale, w.weight)

    def merged_and_frozen(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each adapted weight as the model has it, and as it is in host memory. All others are those of the folder."""
        return [(w.weight, w.base) for w in self._adapted]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Collective, after the backward passes of a step: the gradients of factors that are whole on ranks that have a shard of the weight each."""
        groups: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for f in self._factors:
            if f.rule.axis is None and f.group.size() > 1:
                groups.setdefault(f.group, []).append(f.parameter.main_grad)
        for group, gradients in groups.items():
            together = torch.cat([g.view(-1) for g in gradients])
            dist.all_reduce(together, group=group)
            for g, summed in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                g.copy_(summed.view_as(g))

    # -- checkpoints -----------------------------------------------------------------------------------------------------------
    def sharded_state_dict(self) -> dict:
        """For megatron-core's dist_checkpointing: the adapters alone. The frozen weights are those of the model folder."""
        state = {}
        for f in self._factors:
            dp = parallel_state.get_expert_data_parallel_rank() if f.rule.per_expert else parallel_state.get_data_parallel_rank(with_context_parallel=True)
            if f.rule.axis is None:
                tensor = ShardedTensor.from_rank_offsets(f.name, f.parameter, replica_id=(0, f.group.rank(), dp))
            else:
                tensor = ShardedTensor.from_rank_offsets(f.name, f.parameter, (f.rule.axis, f.weight.index, f.weight.of), replica_id=(0, 0, dp))
            state[f.name] = apply_swiglu_sharded_factory(tensor, ()) if f.rule.kind == "stack" else tensor
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """What `sharded_state_dict` saved."""
        for f in self._factors:
            f.parameter.copy_(state[f.name])


def describe_base(chunks: list[torch.nn.Module], arch: Architecture) -> dict[str, Any]:
    """Collective, of a model with new adapters: what a reader has to know to make the same of its model folder (miles.weights.merged). That of rank 0 counts."""
    digests = {name: digest(tensor) for name, tensor in export_hf(chunks, arch)}
    dtype = next(p.dtype for p in chunks[0].module.parameters() if p.requires_grad)
    return {"base": combined_digest(digests), "dtype": str(dtype).removeprefix("torch."), "scale": arch.adapters.scale}


class _Merged(torch.autograd.Function):
    """A frozen merged weight as a function of its adapter."""

    @staticmethod
    def forward(ctx, weight, a, b, scale):
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return None, (b.t() @ grad).mul_(ctx.scale), (grad @ a.t()).mul_(ctx.scale), None


def _merge_in_forward(module: torch.nn.Module, name: str, suffix: str, scale: float) -> None:
    """Whoever asks the module for its weight gets one that leads back to the adapter; its parameters are what they are. A property, because modules of
    megatron-core and of Transformer Engine read their weights in many places, and few take them for an argument."""
    def weight(module):
        return _Merged.apply(module._parameters[name], module._parameters["lora_a" + suffix], module._parameters["lora_b" + suffix], scale)

    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {name: property(weight)})
