"""The objective of each token, to be maximised, from the policy ratio r = pi / pi_old and the advantage A. Pure.

All are written so that with pi = pi_old (one update per batch, `proximal = "current"`) the gradient is A * grad log pi.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from miles.config.schema import AlgorithmConfig
from miles.core import StructureError
from miles.core.functions import load_function
from miles.trainer.algorithms.tokens import SampledTokens, log_ratio

Surrogate = Callable[[SampledTokens], tuple[torch.Tensor, torch.Tensor]]
"""(objective float32 [n] with the gradient of `logprobs`; bool [n], its gradient was cut by a clip)."""


def clipped(t: SampledTokens, low: float, high: float, dual: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A)          (PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7)

    With separate bounds: clip-higher (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8). With `dual` = c > 1, where A < 0: max of that and c A, so that a
    bad token that became much likelier does not dominate the step (dual-clip PPO, Ye et al. 2020, arXiv:1912.09729, eq. 5).
    """
    return _clip(log_ratio(t.logprobs, t.old).exp(), t.advantages, low, high, dual)


def sequence_clipped(t: SampledTokens, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7): one ratio for a sequence of T sampled tokens,

    s = (pi(sequence) / pi_old(sequence))^(1/T) = exp(mean_t log r_t);    objective of the sequence: min(s A, clip(s, 1 - low, 1 + high) A)

    Given out by token as sg[s] * pi_t / sg[pi_t] (GSPO-token, eq. 13), whose sum with weights of 1/T has the value and the gradient of the sequence's
    objective. So a sequence that is cut over context-parallel ranks needs their sums only, and no gradient crosses ranks.
    """
    s = t.mean_of_sequence(log_ratio(t.logprobs, t.old)).exp()
    return _clip(s * (t.logprobs - t.logprobs.detach()).exp(), t.advantages, low, high, None)


def cispo(t: SampledTokens, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (MiniMax-M1, 2025, arXiv:2506.13585, eq. 4 and 5): sg[clip(r, 1 - low, 1 + high)] A log pi.

    The ratio's weight is clipped, the gradient never: rare tokens that an update made much likelier keep teaching. (The paper sets no lower bound;
    low = 1 - a tiny number is that.) The value is not a meaningful objective, its gradient is.
    """
    ratio = log_ratio(t.logprobs, t.old).exp().detach()
    bounded = ratio.clamp(1 - low, 1 + high)
    return bounded * t.advantages * t.logprobs, torch.zeros_like(bounded, dtype=torch.bool)


def _clip(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    free, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    value, cut = torch.minimum(free, bounded), bounded < free
    if dual is not None:
        floor = dual * advantages
        lifted = (advantages < 0) & (value < floor)
        value, cut = torch.where(lifted, floor, value), cut | lifted
    return value, cut.detach()


NAMED = ("grpo", "gspo", "cispo")


def load_surrogate(c: AlgorithmConfig) -> Surrogate:
    """That of `algorithm.name`, or a user's `package.module.function(tokens: SampledTokens) -> objective float32 [n]`.

    Raises ConfigError: there is no such function. The surrogate raises StructureError when the user's function returns anything else.
    """
    match c.name:
        case "grpo":
            return partial(clipped, low=c.clip_low, high=c.clip_high, dual=c.dual_clip)
        case "gspo":
            return partial(sequence_clipped, low=c.clip_low, high=c.clip_high)
        case "cispo":
            return partial(cispo, low=c.clip_low, high=c.clip_high)
    users = load_function("algorithm.name", c.name, NAMED, "a function of the sampled tokens")

    def custom(t: SampledTokens) -> tuple[torch.Tensor, torch.Tensor]:
        value = users(t)
        if not isinstance(value, torch.Tensor) or value.shape != t.logprobs.shape or (t.logprobs.requires_grad and not value.requires_grad):
            raise StructureError(f"{c.name} returned {value!r:.80}", f"the objective of each of {len(t.logprobs)} tokens, with a gradient",
                                 "return a tensor made from tokens.logprobs", cause="algorithm")
        return value, torch.zeros_like(value, dtype=torch.bool)

    return custom


