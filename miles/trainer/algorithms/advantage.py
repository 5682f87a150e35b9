"""Advantages of the samples of a step from their rewards. Pure: float64 inside, float32 out.

Statistics are over samples, each once, whatever the number of its leaves: else a sample that branched often would move the mean towards itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miles.core import StructureError
from miles.core.functions import load_function

EPS = 1e-6

Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(rewards float64 [N], group of each int [N]) -> advantages [N], over the samples of one step."""


def grpo(rewards: np.ndarray, groups: np.ndarray, eps: float = EPS) -> np.ndarray:
    """(r - mean) / (std + eps) over its group's n members, std with /n   (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2)."""
    centred, group, size = _centred(rewards, groups)
    return centred / (np.sqrt(np.bincount(group, centred**2) / size)[group] + eps)


def dr_grpo(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """r - mean over its group: no division, which would favour prompts that are nearly always or nearly never solved (Liu et al. 2025, arXiv:2503.20783)."""
    return _centred(rewards, groups)[0]


def rloo(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """r - mean of the other n - 1 of its group = n / (n - 1) * (r - mean)   (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8). A group of one: 0."""
    centred, group, size = _centred(rewards, groups)
    return centred * (size / np.maximum(size - 1, 1))[group]


def reinforce_pp(rewards: np.ndarray, groups: np.ndarray, eps: float = EPS) -> np.ndarray:
    """(r - mean) / (std + eps) over all samples of the step   (REINFORCE++, Hu 2025, arXiv:2501.03262, eq. 3; its KL term: algorithm.kl = "k1", of each token alone)."""
    return grpo(rewards, np.zeros_like(groups), eps)


def reinforce_pp_baseline(rewards: np.ndarray, groups: np.ndarray, eps: float = EPS) -> np.ndarray:
    """r - mean over its group, then normalised over all samples of the step   (REINFORCE++ with baseline, arXiv:2501.03262, section 3)."""
    return grpo(_centred(rewards, groups)[0], np.zeros_like(groups), eps)


def reward_itself(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """r: advantages of tokens are made of it by a critic (miles.trainer.critic)."""
    return rewards


NAMED: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce++": reinforce_pp, "reinforce++_baseline": reinforce_pp_baseline,
                              "gae": reward_itself}


def load_advantage(name: str) -> Advantage:
    """One of NAMED, or a user's `package.module.function(rewards, groups) -> advantages`. Raises ConfigError: there is no such function."""
    return NAMED[name] if name in NAMED else load_function("algorithm.advantage", name, NAMED, "a function of rewards and groups")


def step_advantages(rewards: np.ndarray, groups: np.ndarray, samples: np.ndarray, advantage: Advantage) -> np.ndarray:
    """Advantage of each stored sequence of a step, float32 [N]: that of its sample. `rewards` [N]; `groups` and `samples` int [N]: a sequence is a leaf of
    sample `samples[i]` of group `groups[i]`.

    Raises StructureError: a non-finite reward, arrays of different length, leaves of one sample that differ in their reward, or a custom function that
    returns anything but N finite numbers.
    """
    rewards, keys = np.asarray(rewards, np.float64), np.stack([np.asarray(groups), np.asarray(samples)], axis=-1)
    if rewards.ndim != 1 or keys.shape != (len(rewards), 2):
        raise StructureError(f"rewards {rewards.shape} and keys {keys.shape}", "one group and sample per reward", cause="rewards")
    if not np.isfinite(rewards).all():
        raise StructureError(f"non-finite rewards {rewards[~np.isfinite(rewards)]}", "finite numbers", cause="rewards")
    unique, first, sample = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    sample = sample.reshape(-1)
    if (different := rewards != rewards[first][sample]).any():
        n = int(different.argmax())
        raise StructureError(f"a leaf of sample {keys[n, 1]} of group {keys[n, 0]} with reward {rewards[n]}", f"{rewards[first][sample][n]}, the reward of its first leaf",
                             cause="rewards")
    found = np.asarray(advantage(rewards[first], unique[:, 0]))
    if found.shape != (len(unique),) or not np.isfinite(found).all():
        raise StructureError(f"algorithm.advantage gave {found!r:.80}", f"{len(unique)} finite numbers, one per sample", "correct the function", cause="algorithm")
    return found.astype(np.float32)[sample]


def _centred(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(r - mean of its group, number of the group of each, size of each group). Equal rewards give exactly 0 whatever their value."""
    _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
    first = np.zeros(len(size))
    first[group[::-1]] = rewards[::-1]
    shifted = rewards - first[group]
    return shifted - (np.bincount(group, shifted) / size)[group], group, size
