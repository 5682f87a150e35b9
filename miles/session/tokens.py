"""The tokens of a conversation end to end, so that a turn costs what it appends and not what came before."""

from __future__ import annotations

import msgspec
import numpy as np


class TokenLine:
    """Grows int32 arrays in place, and their text for a request. What it returns are views: never write to them."""

    def __init__(self):
        self._data, self._used = np.empty(1024, dtype=np.int32), 0
        self._text, self._written = bytearray(b"["), 0  # the first `_written` tokens of `_data`, each with a comma behind it

    def extend(self, base: np.ndarray, new: np.ndarray | list[int]) -> np.ndarray:
        """int32 [len(base) + len(new)]. `base` is what an earlier call returned, or empty; it is copied only where the line has gone another way since."""
        n, total = len(base), len(base) + len(new)
        if n != self._used or (n and base.base is not self._data) or total > len(self._data):
            grown = np.empty(max(total * 2, 1024), dtype=np.int32)
            grown[:n] = base
            if n < self._written or not np.array_equal(base[: self._written], self._data[: self._written]):
                self._text, self._written = bytearray(b"["), 0
            self._data = grown
        self._data[n:total] = new
        self._used = total
        return self._data[:total]

    def json(self, ids: np.ndarray) -> msgspec.Raw:
        """`ids`, which is what `extend` returned last, as a JSON array: only what was appended since the last call is formatted. Formatting a long
        conversation in every turn would cost more than all else that a turn takes."""
        if ids.base is not self._data or len(ids) != self._used or not len(ids):
            return msgspec.Raw(msgspec.json.encode(ids.tolist()))
        if self._written < len(ids):
            self._text += msgspec.json.encode(ids[self._written:].tolist())[1:-1] + b","
            self._written = len(ids)
        return msgspec.Raw(self._text[:-1] + b"]")
