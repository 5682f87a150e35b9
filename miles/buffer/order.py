"""Which of the ready groups a step takes, where a function of the user decides (`buffer.order = "package.module.function"`).

The decision is taken once, by the trainer's leader, and recorded as `taken` before anybody acts on it: the function need not be one that decides the same twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.buffer.state import BufferState, GroupInfo
from miles.core import EnvironmentFault
from miles.core.functions import load_function

NAMED = ("sealed", "index")
FIELDS = ("group_id", "index", "task_id", "samples", "trajectories", "tokens", "reward_mean")

Order = Callable[[list[dict[str, Any]], int], list[int]]
"""(ready groups that are not too old, first sealed first, each with FIELDS and its `staleness`; how many are wanted) -> their `group_id`s, in the order in which they are
trained: that many, or fewer (also none) to wait until there are others."""


def load_order(name: str) -> Order | None:
    """None: a named one. Raises ConfigError when there is no such function."""
    return None if name in NAMED else load_function("buffer.order", name, NAMED, "a function of ready groups and how many are wanted")


def take_by(order: Order, name: str, state: BufferState, version: int, fresh: list[GroupInfo], count: int, capacity: int) -> list[GroupInfo]:
    """What `order` takes of `fresh`; nothing, where that is fewer than `count`. Raises EnvironmentFault when the function fails, returns anything else, or would wait although
    the buffer, of `capacity` groups, is full, so that nothing new is begun."""
    groups = {g.group_id: g for g in fresh}
    try:
        chosen = list(order([{**{k: getattr(g, k) for k in FIELDS}, "staleness": state.staleness(version, g)} for g in fresh], count))
    except Exception as e:
        raise EnvironmentFault(f"the order {name} failed: {e!r}", f"{count} group numbers, or fewer to wait", "correct the function") from e
    if len(set(chosen)) < len(chosen) or len(chosen) > count or not groups.keys() >= set(chosen):
        raise EnvironmentFault(f"the order {name} returned {chosen}", f"at most {count} of {sorted(groups)}, each once", "correct the function")
    if len(chosen) < count <= len(fresh) and len(fresh) >= capacity:
        raise EnvironmentFault(f"the order {name} takes {len(chosen)} of {len(fresh)} ready groups and waits for others, but the buffer is full (buffer.capacity_groups = {capacity})",
                               f"{count} of them when as many are ready as the buffer takes", "correct the function, or raise buffer.capacity_groups")
    return [groups[i] for i in chosen]
