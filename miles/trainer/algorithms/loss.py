"""The loss: surrogate, divergence from the reference, importance weight, entropy and token weight put together."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from miles.config.schema import AlgorithmConfig
from miles.trainer.algorithms import kl
from miles.trainer.algorithms.importance import importance_weights
from miles.trainer.algorithms.surrogate import load_surrogate
from miles.trainer.algorithms.tokens import SampledTokens


class Loss(NamedTuple):
    value: torch.Tensor  # scalar with gradient; micro-batches and ranks are summed
    clipped: torch.Tensor  # bool [n], the gradient was cut by a clip
    cut: torch.Tensor  # bool [n], the importance weight was out of bounds


class PolicyLoss:
    """loss = - sum_t weight_t * (w_t * (objective_t - beta * kl_t) + gamma * entropy_t) over the sampled tokens t of a micro-batch.

    beta = kl_coefficient, gamma = entropy_coefficient. w_t, which corrects for who sampled the token, is not on the entropy: that is a mean over all tokens
    that could have been sampled.
    """

    def __init__(self, config: AlgorithmConfig):
        """Raises ConfigError: a function that `config` names does not exist."""
        self._config, self._surrogate = config, load_surrogate(config)

    def __call__(self, t: SampledTokens) -> Loss:
        c = self._config
        if c.kl_coefficient and c.kl == "k1" and c.critic is None:  # a critic takes it out of the rewards
            t = replace(t, advantages=t.advantages - c.kl_coefficient * kl.k1(t).detach())
        objective, clipped = self._surrogate(t)
        if c.kl_coefficient and c.kl != "k1":
            objective = objective - c.kl_coefficient * kl.LOSS_TERMS[c.kl](t)
        importance, cut = importance_weights(t, c)
        # where, not a product: a masked token's objective may be anything
        loss = -torch.where(importance == 0, 0.0, t.weights * importance * objective).sum()
        if c.entropy_coefficient:
            loss = loss - c.entropy_coefficient * (t.weights * t.entropy).sum()
        return Loss(loss, clipped, cut)

    def proximal(self, logprobs: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the policy that ratios are taken against: the one before this update (each batch is trained on once, so it is the
        current one), or the one that sampled."""
        return logprobs.detach() if self._config.proximal == "current" else rollout
