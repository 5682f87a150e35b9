"""The tokens of a conversation end to end, so that a turn costs what it appends and not what came before."""

from __future__ import annotations

import numpy as np


class TokenLine:
    """Grows int32 arrays in place. What it returns are views: never write to them."""

    def __init__(self):
        self._data, self._used = np.empty(1024, dtype=np.int32), 0

    def extend(self, base: np.ndarray, new: np.ndarray | list[int]) -> np.ndarray:
        """int32 [len(base) + len(new)]. `base` is what an earlier call returned, or empty; it is copied only where the line has gone another way since."""
        n, total = len(base), len(base) + len(new)
        if n != self._used or (n and base.base is not self._data) or total > len(self._data):
            grown = np.empty(max(total * 2, 1024), dtype=np.int32)
            grown[:n] = base
            self._data = grown
        self._data[n:total] = new
        self._used = total
        return self._data[:total]
