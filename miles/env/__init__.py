"""Environments: what the model acts on and what it is rewarded for.

Owns task folders (`tasks`), the sandbox in which commands of the model run (`sandbox`, its launchers `backends`), the shell that lives for an episode
(`shell`), its folder (`workspace`), the terminal agent loop with its tests (`terminal`), agent programs of others in its place (`harness`) and the reward (`reward`). Knows
messages and rewards; must not know tokens, engines or the trainer. A failure of the machine raises
`EnvironmentFault` and is never a reward of 0.
"""

from miles.env.harness import Asked, Harness, Model, run_harness
from miles.env.reward import Reward, load_reward
from miles.env.sandbox import CommandLimits, CommandResult, Sandbox, Workspace
from miles.env.shell import Shell
from miles.env.tasks import Task, load_task, load_tasks
from miles.env.terminal import SYSTEM_PROMPT, Episode, EpisodeLimits, run_episode
from miles.env.workspace import sweep

__all__ = [
    "SYSTEM_PROMPT", "Asked", "CommandLimits", "CommandResult", "Episode", "EpisodeLimits", "Harness", "Model", "Reward", "Sandbox", "Shell", "Task", "Workspace",
    "load_reward", "load_task", "load_tasks", "run_episode", "run_harness", "sweep",
]
