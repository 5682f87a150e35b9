"""The projections of latent attention down to its latent vectors, whole on every tensor-parallel rank, on CPU.

On GPU Transformer Engine's linear layer plays this part. megatron-core's substitute without it splits these projections over the ranks and gathers what
they give, and leaves out a sum in the backward pass: the rotated key is shared by all heads, so each rank has the part of its gradient that its own heads
make (megatron-core 0.19.2, multi_latent_attention.py: `gather_from_tensor_model_parallel_region(kv_combined)`). With two ranks gradient norms are off by
one percent.
"""

from __future__ import annotations

import torch

import miles.platform

miles.platform.activate()

from megatron.core.transformer import multi_latent_attention  # noqa: E402  (after activate)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402


class WholeLinear(torch.nn.Linear):
    """Takes the arguments of Transformer Engine's linear layer in megatron-core with parallel_mode = "duplicated"."""

    def __init__(self, input_size, output_size, *, config, bias=False, **_unused):
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)
        # each rank sees its part of the sequence, so megatron-core sums the gradient over the tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return super().forward(x), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets)


multi_latent_attention.TELinear = WholeLinear  # what the layer asks for whole projections by
