"""The policy loss: surrogate, importance weight and token weight put together."""

from __future__ import annotations

from typing import NamedTuple

import torch

from miles.config.schema import AlgorithmConfig
from miles.trainer.algorithms.importance import importance_weights
from miles.trainer.algorithms.surrogate import load_surrogate
from miles.trainer.algorithms.tokens import SampledTokens


class Loss(NamedTuple):
    value: torch.Tensor  # scalar with gradient; micro-batches and ranks are summed
    clipped: torch.Tensor  # bool [n], the gradient was cut by a clip
    cut: torch.Tensor  # bool [n], the importance weight was out of bounds


class PolicyLoss:
    """loss = - sum_t weight_t * w_t * objective_t over the sampled tokens t of a micro-batch."""

    def __init__(self, config: AlgorithmConfig):
        """Raises ConfigError: a function that `config` names does not exist."""
        self._config, self._surrogate = config, load_surrogate(config)

    def __call__(self, t: SampledTokens) -> Loss:
        objective, clipped = self._surrogate(t)
        importance, cut = importance_weights(t, self._config)
        # where, not a product: a masked token's objective may be anything
        terms = torch.where(importance == 0, 0.0, t.weights * importance * objective)
        return Loss(-terms.sum(), clipped, cut)

    def proximal(self, logprobs: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the policy that ratios are taken against: the one before this update (each batch is trained on once, so it is the
        current one), or the one that sampled."""
        return logprobs.detach() if self._config.proximal == "current" else rollout
