"""The sampled tokens of a micro-batch, as the loss sees them. Nothing masked is ever among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: beyond, a ratio is clipped or truncated anyway


@dataclass(frozen=True)
class SampledTokens:
    """n tokens; float32 [n] unless said otherwise. Only `logprobs` and `entropy` have a gradient."""

    logprobs: torch.Tensor  # of the policy that is trained
    entropy: torch.Tensor  # nats, of its distribution over the vocabulary where the token was sampled
    old: torch.Tensor  # of the proximal policy, which ratios are taken against
    rollout: torch.Tensor  # of the engine that sampled
    advantages: torch.Tensor
    weights: torch.Tensor  # share of each token in the step's loss; they sum to 1 over the step
    sequence: torch.Tensor  # int64 [n], which sequence of the micro-batch it is a token of, 0 .. sequences - 1
    sequences: int
    reference: torch.Tensor | None = None  # log-probabilities of the reference policy, where there is one
    group: dist.ProcessGroup | None = None  # ranks that hold other tokens of the same sequences (context parallel)

    def mean_of_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [n]: for each token the mean of `values` [n] over all sampled tokens of its sequence. Without gradient."""
        sums = torch.zeros(2, self.sequences, dtype=torch.float64, device=values.device)
        sums[0].index_add_(0, self.sequence, values.detach().double())
        sums[1].index_add_(0, self.sequence, torch.ones_like(values, dtype=torch.float64))
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(sums, group=self.group)
        return (sums[0] / sums[1].clamp(min=1))[self.sequence].float()

    def length_of_sequence(self) -> torch.Tensor:
        """float32 [n]: for each token the number of sampled tokens of its sequence."""
        counts = torch.zeros(self.sequences, dtype=torch.float64, device=self.sequence.device)
        counts.index_add_(0, self.sequence, torch.ones_like(self.sequence, dtype=torch.float64))
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(counts, group=self.group)
        return counts[self.sequence].float()


def log_ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b, limited to +-MAX_LOG_RATIO, so that its exponential is finite whatever the two are."""
    return (a - b).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
