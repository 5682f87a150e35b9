"""From an episode to its sample's reward: what the tests gave, or a user's function of it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from miles.core import StructureError
from miles.core.functions import load_function
from miles.env.tasks import Task
from miles.env.terminal import Episode

Conversation = list[dict[str, Any]]
"""Messages as the environment sent and got them, oldest first: role, content, and for replies what else the model's template knows (tool_calls, ...)."""

Reward = Callable[[Task, list[Conversation], Episode], float]
"""(task, the kept conversations, not to be changed: one, or one for each leaf of a branching history, in the order of their last replies; how the episode ended:
`reward` is that of the tests, 0..1) -> the reward of the sample, any finite number. Called in a thread, for several samples at once; it has no time limit but its
own."""


def tests(task: Task, conversations: list[Conversation], episode: Episode) -> float:
    """What tests/test.sh gave."""
    return episode.reward


NAMED: dict[str, Reward] = {"tests": tests}


def load_reward(name: str) -> Reward:
    """`tests`, or a user's `package.module.function`. Raises ConfigError when there is no such function.

    The reward raises StructureError, cause `reward`, when the user's function fails or returns anything but a finite number: the sample is dropped.
    """
    if name in NAMED:
        return NAMED[name]
    found = load_function("tasks.reward", name, NAMED, "a function of a task, its conversations and how the episode ended")

    def users(task: Task, conversations: list[Conversation], episode: Episode) -> float:
        try:
            reward = found(task, conversations, episode)
            value = float(reward) if isinstance(reward, numbers.Real) else math.nan
        except Exception as e:
            raise StructureError(f"task {task.name}: the reward {name} failed: {e!r}", "a finite number", "correct the function", cause="reward") from e
        if not math.isfinite(value):
            raise StructureError(f"task {task.name}: the reward {name} returned {reward!r}", "a finite number", "correct the function", cause="reward")
        return value

    return users
