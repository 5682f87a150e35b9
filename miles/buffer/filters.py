"""Which finished groups are worth training: pure functions of a group's summaries that return "" (keep it) or the reason to drop it.

Applied by the rollout leader when it seals. There the summaries are at hand, a refused group takes no room in the buffer and is replaced at once, and
nothing of it is written but the record of its drop. What depends on the version being trained (staleness) is decided when the group is taken.
"""

from __future__ import annotations

from collections.abc import Callable

from miles.core import EnvironmentFault
from miles.core.functions import load_function

Filter = Callable[[list[dict]], str]
"""(summaries of all trajectories, as of `miles.buffer.Sealed`) -> "" or a short reason."""


def none(summaries: list[dict]) -> str:
    """Every group is trained."""
    return ""


def equal_rewards(summaries: list[dict]) -> str:
    """Groups whose samples all have the same reward: every advantage is 0, so they cost a step's time and teach nothing (dynamic sampling, DAPO,
    arXiv:2503.14476, section 3.2)."""
    return "equal_rewards" if len({s["reward"] for s in summaries}) == 1 else ""


NAMED: dict[str, Filter] = {"none": none, "equal_rewards": equal_rewards}


def load_filter(name: str) -> Filter:
    """`none`, `equal_rewards`, or a user's `package.module.function`. Raises ConfigError when there is no such function.

    The filter raises EnvironmentFault when the user's function fails or returns anything but text.
    """
    if name in NAMED:
        return NAMED[name]
    found = load_function("buffer.filter", name, NAMED, "a function of a group's summaries")

    def users(summaries: list[dict]) -> str:
        try:
            reason = found(summaries)
        except Exception as e:
            raise EnvironmentFault(f"the filter {name} failed: {e!r}", '"" or a reason', "correct the function") from e
        if not isinstance(reason, str):
            raise EnvironmentFault(f"the filter {name} returned {reason!r}", '"" to keep the group, or the reason to drop it, as text', "correct the function")
        return reason

    return users
