"""Which trainer ranks hold which parameter. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from miles.weights.mapping.tables import Rule

Key = tuple[str, int | None, int | None]  # (megatron name pattern, layer, expert)


class Place(NamedTuple):
    """Where one trainer rank stands in megatron-core's parallel dimensions, and the layers of its pipeline stage; draft layers are the last of the last."""

    stage: int
    first_layer: int
    last_layer: int  # included
    tp: int
    dp: int  # among ranks with the same dense weights: data and context parallel
    etp: int
    ep: int
    expert_dp: int  # among ranks with the same experts


def holders(rule: Rule, layer: int | None, expert: int | None, places: Sequence[Place], experts_per_rank: int) -> list[list[int]]:
    """Ranks that hold a parameter: for each of its shards, in order, the replicas of that shard, in order of their data-parallel rank. A parameter that is
    not sharded has one shard, of which those of the first tensor-parallel rank count.
    """
    stages = 1 + max(p.stage for p in places)
    found: dict[int, dict[int, int]] = {}
    for rank, p in enumerate(places):
        if layer is None:
            here = p.stage == (0 if rule.megatron.startswith("embedding") else stages - 1)
        else:
            here = p.first_layer <= layer <= p.last_layer
        if not here:
            continue
        if expert is None:
            found.setdefault(p.tp, {})[p.dp] = rank
        elif p.ep == expert // experts_per_rank:
            found.setdefault(p.etp, {})[p.expert_dp] = rank
    shards = [[ranks[i] for i in sorted(ranks)] for _, ranks in sorted(found.items())]
    return shards if rule.axis is not None else shards[:1]
