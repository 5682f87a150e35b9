"""Sparse attention (DSA) of megatron-core on CPU. Its plain code takes packed sequences and context parallelism; what it lacks there are the layers to build
the attention from, which it asks of Transformer Engine alone.
"""

from __future__ import annotations

import miles.platform

miles.platform.activate()

from megatron.core.models.backends import LocalSpecProvider  # noqa: E402  (after activate)
from megatron.core.models.gpt import experimental_attention_variant_module_specs  # noqa: E402
from megatron.core.transformer.experimental_attention_variant import absorbed_mla  # noqa: E402

from miles.platform.cpu_latent import WholeLinear  # noqa: E402


class CpuSpecProvider(LocalSpecProvider):
    """megatron-core's own layers, with whole projections to latent vectors and in the indexer."""

    def linear(self) -> type:
        return WholeLinear


experimental_attention_variant_module_specs._get_backend_spec_provider = lambda config: CpuSpecProvider()
absorbed_mla.TELinear = WholeLinear  # what the layer asks for whole projections by
