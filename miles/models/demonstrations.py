"""Demonstrations of mixed quality for a warm start, made by really running commands in the terminal environment.

For each task the demonstrator knows the solution (`solution/solve.sh`) and has five bad habits. The share of each way of acting is exact, not sampled:
a model that learns these demonstrations well acts right about as often as they do, on every task, and errs in ways that it shares
between tasks. That leaves reinforcement something to choose from: in a group of samples of one task some succeed and some fail.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from miles.core import ConfigError
from miles.env import EpisodeLimits, Task, run_episode
from miles.env.terminal import DONE, first_messages

SHARES = {  # way of acting -> share of a task's demonstrations
    "right": 0.38,
    "hasty": 0.22,  # looks, and says that it is done
    "misplaced": 0.22,  # does the right thing to another file
    "lost": 0.08,  # looks again and again until its turns are over
    "careless": 0.06,  # looks, then does what another task asks for
    "blind": 0.04,  # acts without looking
}
_AT_ONCE = 16  # episodes run at the same time


@dataclass(frozen=True)
class Demonstration:
    """One conversation with the share it has among its task's demonstrations."""

    task: str
    ways: tuple[str, ...]  # ways of acting that came to these same messages
    weight: float  # over one task the weights sum to 1
    messages: tuple[dict[str, str], ...]
    reward: float


def plan(tasks: Sequence[Task], max_turns: int, seed: int) -> list[tuple[Task, tuple[str, ...], float, tuple[str, ...]]]:
    """(task, replies, weight, ways) of every distinct demonstration, by task. Pure but for reading the solutions."""
    solutions = {t.name: _solution(t) for t in tasks}
    out = []
    for task in tasks:
        rng = random.Random(f"{seed}/{task.name}")
        right = solutions[task.name]
        siblings = sorted({s[-1] for t, s in solutions.items() if t.rsplit("-", 1)[0] == task.name.rsplit("-", 1)[0] and s[-1] != right[-1]})
        others = siblings or sorted({s[-1] for s in solutions.values() if s[-1] != right[-1]}) or [right[-1]]
        ways = {
            "right": [[*right, DONE]],
            "hasty": [[*right[:-1], DONE]],
            "misplaced": [[*right[:-1], f"{right[-1].rsplit(' ', 1)[0]} tmp.txt", DONE]],
            "lost": [[right[0]] * max_turns],
            "careless": [[*right[:-1], rng.choice(others), DONE]],
            "blind": [[rng.choice(others), DONE]],
        }
        weights: Counter[tuple[str, ...]] = Counter()
        names: dict[tuple[str, ...], list[str]] = {}
        for way, variants in ways.items():
            for replies in variants:
                weights[tuple(replies)] += SHARES[way] / len(variants)
                names.setdefault(tuple(replies), []).append(way)
        out += [(task, replies, weight, tuple(names[replies])) for replies, weight in weights.items()]
    return out


def plan_solutions(tasks: Sequence[Task], max_turns: int) -> list[tuple[Task, tuple[str, ...], float, tuple[str, ...]]]:
    """Like `plan`, with nothing but the solution of each task."""
    return [(t, tuple([*_solution(t, least=1), DONE][:max_turns]), 1.0, ("right",)) for t in tasks]


def demonstrate(planned: Sequence[tuple[Task, tuple[str, ...], float, tuple[str, ...]]], limits: EpisodeLimits) -> list[Demonstration]:
    """Run every planned demonstration for real: what the messages show is what the commands printed, the reward is what the tests said."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(task: Task, replies: tuple[str, ...], weight: float, ways: tuple[str, ...]) -> Demonstration:
        left = iter(replies)
        shown: list[dict[str, str]] = []

        async def chat(messages):
            reply = next(left)
            message = {"role": "assistant", "content": reply}
            shown[:] = [*messages, message]
            return SimpleNamespace(content=reply, finish_reason="stop", message=message)

        async with gate:
            episode = await run_episode(task, chat, limits)
        return Demonstration(task.name, ways, weight, tuple(shown or first_messages(task, limits)), episode.reward)

    async def run_all() -> list[Demonstration]:
        return await asyncio.gather(*(one(*p) for p in planned))

    return asyncio.run(run_all())


def _solution(task: Task, least: int = 2) -> list[str]:
    lines = task.solution.read_text(encoding="utf-8").splitlines() if task.solution.is_file() else []
    commands = [line for line in lines if line.strip() and not line.startswith("#")]
    if len(commands) < least:
        raise ConfigError(f"task {task.name} has no solution/solve.sh of at least {least} commands", "one command per line, to make demonstrations from",
                          "write it, or choose a model that needs no warm start")
    return commands
