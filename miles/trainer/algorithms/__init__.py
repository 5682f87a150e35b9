"""From rewards and log-probabilities to the loss: one module for each idea, all pure, each with its paper's equation.

    advantage.py    rewards of a step -> advantage of each sample
    gae.py          rewards and values of a critic -> advantage of each token
    surrogate.py    policy ratio and advantage -> objective of each token (PPO's clip, GSPO, CISPO)
    importance.py   trainer against engine -> weight of each token
    kl.py           trainer against a reference policy -> divergence of each token
    tokens.py       what they are given
    loss.py         these put together; weights of tokens (the reduction) come from miles.trainer.batching
    truth.py        how far trainer and engine are apart, by the staleness of tokens
"""

from miles.trainer.algorithms.advantage import load_advantage, step_advantages
from miles.trainer.algorithms.gae import gae_of_sequences
from miles.trainer.algorithms.kl import k3
from miles.trainer.algorithms.loss import PolicyLoss
from miles.trainer.algorithms.tokens import SampledTokens
from miles.trainer.algorithms.truth import SUMS, Apart, Truth, apart, truth_of

__all__ = ["SUMS", "Apart", "PolicyLoss", "SampledTokens", "Truth", "apart", "gae_of_sequences", "k3", "load_advantage", "step_advantages", "truth_of"]
