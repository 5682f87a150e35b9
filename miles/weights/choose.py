"""`weights.transport = "auto"`: every way weights can go is tried on the first versions, and the fastest kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from miles.config import MilesConfig
from miles.config.precision import FORMATS

TRIALS = 2
"""Versions of each way. The shorter time counts: the first version over the wire makes its connections too."""

Figure = tuple[str, float | None]
"""A way that was tried, and the seconds until every engine served the version; None: it did not go that way, or some engine did not."""


def ways(config: MilesConfig) -> tuple[str, ...]:
    """How the weights of a run may go, in the order in which they are tried."""
    if config.weights.transport != "auto":
        return (config.weights.transport,)
    quantized = FORMATS[config.model.rollout_precision].block is not None  # shards are not quantized
    return ("disk", "broadcast") if quantized else ("disk", "broadcast", "p2p")


def choose(candidates: Sequence[str], figures: Sequence[Figure]) -> tuple[str, bool]:
    """How the next version goes, and whether that is decided. A way that failed once is not tried again; of equal ones the earlier is taken."""
    if len(candidates) == 1:
        return candidates[0], True
    best: dict[str, float] = {}
    for way in candidates:
        tried = [seconds for name, seconds in figures if name == way]
        if None in tried:
            continue
        if len(tried) < TRIALS:
            return way, False
        best[way] = min(tried)
    return min(best, key=best.__getitem__, default=candidates[0]), True
