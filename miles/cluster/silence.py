"""Has a rank frozen? What its parent (miles.cluster.rank) makes of its signs of life (miles.comm.pulse), as a function of these and of a clock.

Imports next to nothing, as its parent does.
"""

from __future__ import annotations

from typing import NamedTuple

LOOK_S = 2.0
"""How often the parent looks."""


class Silence(NamedTuple):
    """`seconds` that the parent has listened since the newest `sign` came; `looked`: its clock then."""

    sign: bytes
    looked: float
    seconds: float = 0.0

    def look(self, sign: bytes, now: float) -> Silence:
        """After one more look. Only time counts in which the parent ran itself: a job that was suspended, or a machine that slept, was not silent."""
        if sign != self.sign:
            return Silence(sign, now)
        return Silence(sign, now, self.seconds + min(now - self.looked, 2 * LOOK_S))
