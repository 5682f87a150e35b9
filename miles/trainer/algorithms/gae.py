"""Generalised advantage estimation over the sampled tokens of a sequence. Pure: float64 inside.

    delta_t = r_t + gamma V_{t+1} - V_t;    A_t = sum_{l >= 0} (gamma lambda)^l delta_{t+l}        (Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16)

t counts sampled tokens alone: what the environment said between two of them is part of the next state, not an action, so V_{t+1} is the value where the
next token was sampled. After the last one there is nothing to come, V = 0, also where a trajectory was cut short: its reward is what it is.
"""

from __future__ import annotations

import numpy as np

CHUNK = 128


def gae(rewards: np.ndarray, values: np.ndarray, *, gamma: float, lam: float, chunk: int = CHUNK) -> np.ndarray:
    """Advantages float64 [n] of the n sampled tokens of a sequence, from their rewards and values [n].

    A_t = delta_t + gamma lambda A_{t+1}, which is one step for each token, as n / chunk steps: within a chunk the sums are a product with a triangle of
    powers, and only the first advantage of each chunk goes on to the one before.
    """
    n = len(rewards)
    following = np.append(values[1:], 0.0)
    deltas = np.zeros(-(-n // chunk) * chunk)
    deltas[:n] = rewards + gamma * following - values
    decay = gamma * lam
    distance = np.arange(chunk)[:, None] - np.arange(chunk)[None, :]  # [j, i]: delta_j is distance steps after token i
    within = deltas.reshape(-1, chunk) @ np.where(distance >= 0, decay ** np.maximum(distance, 0), 0.0)
    carry = decay ** np.arange(chunk, 0, -1)
    out, after = within, 0.0
    for k in range(len(out) - 1, -1, -1):
        out[k] += carry * after
        after = out[k, 0]
    return out.reshape(-1)[:n]


def gae_of_sequences(final_rewards: np.ndarray, rewards: np.ndarray, values: np.ndarray, sequence: np.ndarray, *, gamma: float, lam: float) -> np.ndarray:
    """float64 [n], over sequences end to end: token t belongs to `sequence[t]`, non-decreasing. `rewards`: of each token; to the last one of each
    sequence its `final_rewards` (the same for all its tokens) is added."""
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    ends = np.append(starts, len(sequence))[1:]  # none of none: a rank without sequences has an empty micro-batch
    out = np.zeros(len(sequence))
    for start, end in zip(starts, ends, strict=True):
        part = slice(start, end)
        earned = np.array(rewards[part], np.float64)
        earned[-1] += final_rewards[end - 1]
        out[part] = gae(earned, values[part].astype(np.float64), gamma=gamma, lam=lam)
    return out
