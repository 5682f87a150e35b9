"""Advantages from rewards. Pure."""

from __future__ import annotations

import numpy as np

from miles.core import StructureError


def group_advantages(rewards: np.ndarray, group_ids: np.ndarray, *, normalize_std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """Group-relative advantages, float32 [N], for the rewards [N] of samples and the group of each, int [N].

    A_i = r_i - mean(r of i's group)                               (Dr.GRPO, Liu et al. 2025, arXiv:2503.20783)
    A_i = (r_i - mean) / (std + eps), std over the n members (/n)   (GRPO, Shao et al. 2024, arXiv:2402.03300)

    Groups may differ in size. A group whose rewards are all equal, also a group of one, has advantage exactly 0.

    Raises StructureError: a non-finite reward, or arrays of different length.
    """
    rewards = np.asarray(rewards, np.float64)
    group_ids = np.asarray(group_ids)
    if rewards.shape != group_ids.shape or rewards.ndim != 1:
        raise StructureError(f"rewards {rewards.shape} and group ids {group_ids.shape}", "one group id per reward", cause="rewards")
    if not np.isfinite(rewards).all():
        raise StructureError(f"non-finite rewards {rewards[~np.isfinite(rewards)]}", "finite numbers", cause="rewards")
    _, group, size = np.unique(group_ids, return_inverse=True, return_counts=True)
    # shifting by a member of the group keeps equal rewards at exactly 0 whatever their value
    first = np.zeros(len(size))
    first[group[::-1]] = rewards[::-1]
    shifted = rewards - first[group]
    centred = shifted - (np.bincount(group, shifted) / size)[group]
    if not normalize_std:
        return centred.astype(np.float32)
    std = np.sqrt(np.bincount(group, centred**2) / size)[group]
    return (centred / (std + eps)).astype(np.float32)


def leaf_advantages(rewards: np.ndarray, samples: np.ndarray, *, normalize_std: bool = True) -> np.ndarray:
    """Advantages of the stored sequences of one group, float32 [N], for the reward of each [N] and the sample that each is a leaf of, int [N].

    The group's statistics are over samples, each once whatever the number of its leaves: else a sample that branched often would move the mean
    towards itself. Every leaf has its sample's advantage.

    Raises StructureError: leaves of one sample differ in their reward; and like `group_advantages`.
    """
    rewards, samples = np.asarray(rewards, np.float64), np.asarray(samples)
    if rewards.shape != samples.shape:
        raise StructureError(f"rewards {rewards.shape} and samples {samples.shape}", "one sample per reward", cause="rewards")
    _, first, sample = np.unique(samples, return_index=True, return_inverse=True)
    expected = rewards[first][sample]
    different = (rewards != expected) & ~(np.isnan(rewards) & np.isnan(expected))
    if different.any():
        n = int(different.argmax())
        raise StructureError(f"a leaf of sample {samples[n]} with reward {rewards[n]}", f"{expected[n]}, the reward of its first leaf", cause="rewards")
    return group_advantages(rewards[first], np.zeros(len(first), np.int64), normalize_std=normalize_std)[sample]
