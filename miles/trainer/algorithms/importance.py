"""The weight of each token for having been sampled by the engine and not by the proximal policy: w = f(pi_old / pi_rollout), a constant. Pure.

The engine computes with other kernels and precision than the trainer, and in asynchronous runs it sampled with older weights. Without a bound these
ratios have no bounded variance; bounding them trades a bias for it (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"). The ratio is that of

    token      each token
    sequence   all sampled tokens of its sequence, prod_t w_t: the unbiased one, of enormous variance for long sequences
    geometric  their geometric mean, (prod_t w_t)^(1/T)

and out of [low, high] it is

    truncate   brought to the nearest bound (TIS)
    mask       0: the token teaches nothing (token: IcePop, Ling Team 2025, arXiv:2510.18855, eq. 3; sequence: masked importance sampling)
"""

from __future__ import annotations

import torch

from miles.config.schema import AlgorithmConfig
from miles.trainer.algorithms.tokens import MAX_LOG_RATIO, SampledTokens, log_ratio


def importance_weights(t: SampledTokens, c: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(w float32 [n] without gradient; bool [n], the ratio was out of bounds)."""
    ratio = _log_ratio_of(t, c.importance_level).exp()
    if c.importance == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    outside = (ratio < c.importance_low) | (ratio > c.importance_high)
    if c.importance == "mask":
        return torch.where(outside, 0.0, ratio), outside
    return ratio.clamp(c.importance_low, c.importance_high), outside


def _log_ratio_of(t: SampledTokens, level: str) -> torch.Tensor:
    ratio = log_ratio(t.old, t.rollout).detach()
    if level == "token":
        return ratio
    mean = t.mean_of_sequence(ratio)
    if level == "geometric":
        return mean
    return (mean * t.length_of_sequence()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
