"""Divergence from a reference policy, estimated on the token that was sampled. Pure.

With x = pi_ref / pi of a token (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html), KL(pi || pi_ref) is the mean over
tokens sampled from pi of

    k1         -log x            without bias; its gradient is grad log pi, whose mean is 0, so it teaches nothing as a loss
    k2         (log x)^2 / 2     biased in value; its gradient is that of the divergence
    k3         x - 1 - log x     without bias and never negative; its gradient, (1 - x) grad log pi, is that of the divergence to first order (GRPO, Shao et
                                 al. 2024, arXiv:2402.03300, eq. 4)
    unbiased   (pi / pi_old) k3  the gradient also goes through the ratio: -log x grad log pi, that of the divergence, for tokens that pi_old sampled
                                 (DeepSeek-V3.2, 2025, arXiv:2512.02556, section 3.1)

So `k1` is taken out of the advantage, a constant, and the others are terms of the loss. Taken out of the advantage of its own token, k1 has the gradient of k2.
"""

from __future__ import annotations

import torch

from miles.trainer.algorithms.tokens import SampledTokens, log_ratio


def k1(t: SampledTokens) -> torch.Tensor:
    return log_ratio(t.logprobs, t.reference)


def k2(t: SampledTokens) -> torch.Tensor:
    return 0.5 * k1(t) ** 2


def k3(t: SampledTokens) -> torch.Tensor:
    log_x = -k1(t)
    return log_x.exp() - 1 - log_x


def unbiased(t: SampledTokens) -> torch.Tensor:
    return log_ratio(t.logprobs, t.old).exp() * k3(t)


LOSS_TERMS = {"k2": k2, "k3": k3, "unbiased": unbiased}
"""Those that have a gradient; each gives float32 [n]."""
