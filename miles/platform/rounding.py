"""Where the engine rounds: in a 16-bit format the same sums, rounded at other places, are other log-probabilities, and other experts.

What SGLang 0.5.23 does, and megatron-core does otherwise:

router     a softmax router's scores are a product in the format of the weights (Qwen3-MoE); those of sigmoid routers (GLM, DeepSeek) are float32.
           megatron-core's are float32 for both
residual   a norm reads the sum of residual and output as it is, in float32; what is carried on is that sum, rounded. megatron-core's reads it rounded
experts    outputs of a token's experts are rounded, weighted and added up in float32, and rounded once. megatron-core weights what goes into the last
           product, and rounds after each addition

The router's are rounded on every platform. The rest belongs to megatron-core's own layers, which are used without CUDA: on a GPU Transformer Engine's kernels
round where they do. With float32 weights nothing here rounds anything.
"""

from __future__ import annotations

import torch

import miles.platform

miles.platform.activate()

from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402  (after activate)
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402


class Router(TopKRouter):
    """megatron-core's, with the engine's scores."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., experts], float32."""
        scores = super().gating(input)
        return scores.to(input.dtype).to(scores.dtype) if self.config.moe_router_score_function == "softmax" else scores


class Experts(SequentialMLP):
    """megatron-core's, whose outputs are weighted, and leave in float32: the token dispatcher adds them up in the format that it is given."""

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, None]:
        """tokens [n, hidden], those of an expert together; weights [n]. Returns float32 [n, hidden]."""
        parts = torch.split(tokens, tokens_per_expert.tolist())
        out = torch.cat([expert(part)[0] for expert, part in zip(self.local_experts, parts, strict=True)])
        return out.float() * weights[:, None], None


class ExpertLayer(MoELayer):
    """megatron-core's, with what its `Experts` add up to rounded before the shared expert's is added."""

    def postprocess(self, output: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        """float32 [n * top_k, hidden] and the model's format [..., hidden] -> the model's format [..., hidden]."""
        routed = super().postprocess(output, None).to(self.config.params_dtype)
        return routed if shared is None else routed + shared


def add_to_residual(training: bool, fused: bool):
    """In the place of megatron-core's `get_bias_dropout_add`; there are neither biases nor dropout. With `fp32_residual_connection` hidden states travel between
    layers as the sum that has not been rounded."""

    def add(output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        """float32 [..., hidden] of an output in the model's format and a residual that is such a sum, or an embedding."""
        output, _ = output_with_bias
        return residual.to(output.dtype).float() + output.float()

    return add


class RMSNorm(torch.nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight, computed in float32, rounded once to the format of the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(self.weight.dtype)
