"""The policy loss and the figures that tell how far trainer and rollout are apart. Pure functions of tensors.

All take flat tensors over the sampled tokens of a micro-batch (nothing masked is ever passed in) and are safe against
non-finite intermediate values: differences of log-probabilities are clamped before they are exponentiated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: beyond, a ratio is clipped or truncated anyway
HISTOGRAM_EDGES = torch.logspace(-10, 3, 1301, dtype=torch.float64)  # 100 bins per decade: a quantile is off by at most 2.4 %


@dataclass(frozen=True)
class LossSettings:
    """Clip range of the policy ratio and truncation of the importance weight; fields as in AlgorithmConfig."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_low: float = 0.0
    tis_high: float = 2.0


def log_ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b, limited to +-MAX_LOG_RATIO."""
    return (a - b).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_loss(logprobs: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor,
                settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, clipped, cut) over n tokens; all inputs float32 [n].

    r_t = pi(t) / pi_old(t);   w_t = clip(pi_old(t) / pi_rollout(t), tis_low, tis_high), a constant
    loss = sum_t weight_t * -w_t * min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    The clipped surrogate is PPO's (Schulman et al. 2017, eq. 7) with separate bounds (clip-higher: DAPO, Yu et al. 2025, eq. 8);
    w is truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    `old` is the policy at the start of the step; with one update per batch it is the current policy: pass `logprobs.detach()`.
    `weights` sum to 1 over the whole step, so losses of micro-batches and ranks are summed.

    clipped: bool [n], the clipped branch was taken and its gradient is 0. cut: bool [n], w was changed by the truncation.
    """
    old, rollout, advantages = old.detach(), rollout.detach(), advantages.detach()
    ratio = log_ratio(logprobs, old).exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    free, clipped_value = ratio * advantages, bounded * advantages
    raw = log_ratio(old, rollout).exp()
    importance = raw.clamp(settings.tis_low, settings.tis_high)
    loss = -(weights * importance * torch.minimum(free, clipped_value)).sum()
    return loss, (clipped_value < free).detach(), importance != raw


SUMS = ("tokens", "abs_diff", "kl", "ratio", "ratio_squared", "clipped", "cut", "abs_advantage", "exact_tokens", "exact_abs_diff")
MAXIMA = ("max_diff", "exact_max_diff")


def truth_sums(logprobs: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, exact: torch.Tensor, clipped: torch.Tensor,
               cut: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sums [len(SUMS)], maxima [len(MAXIMA)], histogram of |difference|), float64: to be added (maxima: maximised) over ranks.

    kl: the k3 estimator of KL(rollout || trainer), e^d - 1 - d with d = log pi - log pi_rollout (Schulman 2020, "Approximating KL divergence").
    """
    diff = (logprobs - rollout).detach().double()
    size, d = diff.abs(), diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = d.exp()
    on_exact = torch.where(exact, size, 0.0)
    sums = torch.stack([
        torch.tensor(float(len(size)), dtype=torch.float64, device=size.device), size.sum(), (ratio - 1 - d).sum(), ratio.sum(), (ratio**2).sum(),
        clipped.double().sum(), cut.double().sum(), advantages.double().abs().sum(), exact.double().sum(), on_exact.sum(),
    ])
    zero = size.new_zeros(1)
    maxima = torch.stack([torch.cat([size, zero]).max(), torch.cat([on_exact, zero]).max()])
    bins = torch.bucketize(size, HISTOGRAM_EDGES.to(size.device))
    return sums, maxima, torch.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1).double()


def quantile_of_histogram(histogram: torch.Tensor, q: float) -> float:
    """The value below which a share q of the counted values lies, rounded up to a bin edge (0 for an empty histogram)."""
    total = float(histogram.sum())
    if total == 0:
        return 0.0
    index = int(torch.searchsorted(histogram.cumsum(0), q * total))
    return float(HISTOGRAM_EDGES[min(index, len(HISTOGRAM_EDGES) - 1)])
