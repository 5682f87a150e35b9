"""How far trainer and rollout are apart: figures over the sampled tokens of a step. Pure functions of tensors."""

from __future__ import annotations

import torch

from miles.trainer.algorithms.tokens import MAX_LOG_RATIO

HISTOGRAM_EDGES = torch.logspace(-10, 3, 1301, dtype=torch.float64)  # 100 bins per decade: a quantile is off by at most 2.4 %
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
