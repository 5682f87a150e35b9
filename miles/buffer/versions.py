"""How far weight versions lie apart: along the weights, not by their numbers. Pure.

Numbers are never used twice. A trainer that starts from the checkpoint of an earlier step publishes the weights of that checkpoint again, under the number
behind the newest there ever was; what its predecessor published after the checkpoint is undone. So versions form a tree:

    1 -- 2 -- 3 -- 4 -- 5          newest 5, checkpoint with the weights of 3
              |
              6 -- 7 -- 8          6 is 3 again

The parent of v is v - 1, at distance 1; that of the first version of a trainer epoch is the version that it started from, at distance 0. Staleness is the
distance in this tree: for weights that led to those being trained, the steps since then; for undone ones, back to the checkpoint and forward again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

FIRST = 1  # the first version of a run: the weights that every start without a checkpoint begins with


class Lineage:
    """The tree. `branches`: for each start of a trainer behind a published version (newest number before it, version whose weights it started from)."""

    def __init__(self, branches: Iterable[tuple[int, int]] = ()):
        self.branches = list(branches)
        self.newest = 0  # the highest number that is known to be used

    def restore(self, version: int, newest: int) -> None:
        """A trainer starts with the weights of `version`, and goes on behind the number `newest`. In the order of epochs: `newest` never falls."""
        self.used(newest)
        if newest:
            self.branches.append((newest, version))

    def used(self, version: int) -> None:
        self.newest = max(self.newest, version)

    def distance(self, a: int, b: int) -> int:
        """Between two versions."""
        (i, a), (k, b), steps = self._place(a), self._place(b), 0
        while i != k:
            if i < k:
                (i, a), (k, b) = (k, b), (i, a)
            newest, start = self.branches[i - 1]
            steps += a - newest - 1
            i, a = self._place(start)
        return steps + abs(a - b)

    def staleness(self, version: int, versions: Iterable[int]) -> int:
        """At `version`, of what `versions` have sampled: the distance of the farthest, which need not be the one with the lowest number."""
        return max(self.distance(version, v) for v in versions)

    def counted_back(self, version: int, versions: np.ndarray) -> np.ndarray:
        """`versions` as numbers as far below `version` as their weights are from its: the same where no restart lies between. Negative ones stay."""
        found = versions.copy()
        for v in np.unique(versions[versions >= 0]).tolist():
            found[versions == v] = version - self.distance(version, v)
        return found

    def _place(self, version: int) -> tuple[int, int]:
        """(branch that it lies on, 0 is the first trainer's; version). Of branches behind one number the last counts: the others published nothing."""
        return bisect_left(self.branches, (version,)), version
