"""Which versions nobody needs any more. Pure.

A rank's acknowledgement (miles.weights.acks) is its lease: whoever serves version v may be reading, right now, what leads on from v. That is the files after
the newest keyframe that is not newer than v, or all of them where it serves nothing yet. A lease needs no file and no message of its own: the acknowledgement
is durable, one per rank, written before the rank reads anything and again when it has what it read, and fenced by the epoch. A rank whose epoch is over holds
nothing back.

A lease ends when its rank acknowledges a newer version, or with its epoch. One that does neither is bounded by what is published, not by a clock: there are
never more than `HELD` times as many keyframes as are kept anyway. A reader that is overtaken so far finds its files gone in the middle, and starts again from
the newest keyframe.

A version that went over the wire has a manifest alone, and is looked for only while it is the newest: no files lead over it, an engine has its bytes already, and one that
starts again can load them from its rank's memory only while nothing newer is there. A few stay, for who has just looked for the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

HELD = 2
"""Keyframes that leases can keep, as a multiple of weights.keep_keyframes."""


WIRED = 8
"""Versions without files that stay."""


def expired(versions: Sequence[int], keyframes: Sequence[int], keep: int, serving: Iterable[int], wired: Sequence[int] = ()) -> list[int]:
    """Those of `versions` (ascending; `keyframes` among them, and `wired`, which have no files) that can be removed. The `keep` newest keyframes stay, with all
    files after them, and what the ranks that serve the versions `serving` (-1: nothing yet) may be reading, back to the `HELD` x `keep`-th newest keyframe; and
    the newest of those without files."""
    first = versions[0] if versions else 0
    if len(keyframes) > keep:
        leased = [max((k for k in keyframes if k <= v), default=first) for v in serving]
        bound = keyframes[-HELD * keep] if len(keyframes) > HELD * keep else first
        first = max(bound, min([keyframes[-keep], *leased]))
    passed = set(wired[:-WIRED])
    return [v for v in versions if v < first or v in passed]
