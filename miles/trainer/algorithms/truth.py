"""How far trainer and rollout are apart: figures over the sampled tokens of a step, also of each staleness. Pure functions of tensors.

The staleness of a token is the number of weight versions from the one that sampled it to the one being trained, along the weights (miles.buffer.versions). (That of a trajectory is the largest
of its tokens'. A token of staleness 0 may stand on a context that older weights have read; where it does not, it is called exact.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from miles.trainer.algorithms.tokens import MAX_LOG_RATIO

HISTOGRAM_EDGES = torch.logspace(-10, 3, 1301, dtype=torch.float64)  # 100 bins per decade: a quantile is off by at most 2.4 %
STALENESS_BINS = 4  # 0, 1, 2, and 3 or more
SUMS = ("tokens", "abs_diff", "kl", "ratio", "ratio_squared", "clipped", "cut", "abs_advantage", "exact_tokens", "exact_abs_diff")


class Truth(NamedTuple):
    """What is added (`maxima`: maximised) over micro-batches and ranks; float64. S = STALENESS_BINS."""

    sums: torch.Tensor  # [S, len(SUMS)]
    histograms: torch.Tensor  # [S, len(HISTOGRAM_EDGES) + 1], of |difference|
    maxima: torch.Tensor  # [S + 1]: the largest |difference| of each staleness, then of exact tokens

    @classmethod
    def nothing(cls, device: torch.device | str = "cpu") -> Truth:
        shapes = ((STALENESS_BINS, len(SUMS)), (STALENESS_BINS, len(HISTOGRAM_EDGES) + 1), (STALENESS_BINS + 1,))
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))


class Apart(NamedTuple):
    """Figures over some sampled tokens. Differences are |trainer - rollout| log-probabilities (nats), before the update."""

    tokens: int
    logprob_diff_mean: float
    logprob_diff_p99: float  # rounded up to a histogram edge, at most 2.4 %
    logprob_diff_max: float
    kl_mean: float  # KL(rollout || trainer), k3
    ess: float  # effective sample size over the tokens, (sum r)^2 / (n sum r^2), in (0, 1]
    clip_fraction: float


def truth_of(logprobs: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, exact: torch.Tensor, staleness: torch.Tensor, clipped: torch.Tensor,
             cut: torch.Tensor) -> Truth:
    """Of n sampled tokens, [n] each; `staleness` is int64.

    kl: the k3 estimator of KL(rollout || trainer), e^d - 1 - d with d = log pi - log pi_rollout (Schulman 2020, "Approximating KL divergence").
    """
    diff = (logprobs - rollout).detach().double()
    size, d = diff.abs(), diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = d.exp()
    on_exact = torch.where(exact, size, 0.0)
    of_token = torch.stack([torch.ones_like(size), size, ratio - 1 - d, ratio, ratio**2, clipped.double(), cut.double(), advantages.double().abs(), exact.double(), on_exact])
    bin_, zero = staleness.clamp(0, STALENESS_BINS - 1), size.new_zeros(1)
    inside = [bin_ == k for k in range(STALENESS_BINS)]
    sums = torch.stack([torch.where(here, of_token, 0.0).sum(1) for here in inside])
    maxima = torch.stack([torch.cat([x, zero]).max() for x in (*(torch.where(here, size, 0.0) for here in inside), on_exact)])
    edges = len(HISTOGRAM_EDGES) + 1
    cells = torch.bucketize(size, HISTOGRAM_EDGES.to(size.device)) + edges * bin_
    return Truth(sums, torch.bincount(cells, minlength=edges * STALENESS_BINS).double().view(STALENESS_BINS, edges), maxima)


def apart(sums: torch.Tensor, histogram: torch.Tensor, largest: float) -> Apart:
    """Figures from a row of sums [len(SUMS)], of the histogram, and the maximum; of no tokens 0, and an ess of 1."""
    s = dict(zip(SUMS, sums.tolist(), strict=True))
    n = max(s["tokens"], 1.0)
    return Apart(int(s["tokens"]), s["abs_diff"] / n, min(quantile_of_histogram(histogram, 0.99), largest), largest, s["kl"] / n,
                 s["ratio"] ** 2 / (n * s["ratio_squared"]) if s["ratio_squared"] else 1.0, s["clipped"] / n)


def quantile_of_histogram(histogram: torch.Tensor, q: float) -> float:
    """The value below which a share q of the counted values lies, rounded up to a bin edge (0 for an empty histogram)."""
    total = float(histogram.sum())
    if total == 0:
        return 0.0
    index = int(torch.searchsorted(histogram.cumsum(0), q * total))
    return float(HISTOGRAM_EDGES[min(index, len(HISTOGRAM_EDGES) - 1)])
