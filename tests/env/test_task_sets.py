"""The task sets that come with Miles: each is solved by its own solution and not by doing nothing."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles.env import EpisodeLimits, load_tasks, run_episode

SETS = Path(__file__).parents[2] / "configs" / "tasks"
TASKS = [t for name in ("terminal", "terminal_easy") for t in load_tasks(SETS / name)]


def play(task, commands):
    replies = iter([*commands, "DONE"])

    async def chat(messages):
        reply = next(replies)
        return SimpleNamespace(content=reply, finish_reason="stop", message={"role": "assistant", "content": reply})

    return asyncio.run(run_episode(task, chat, EpisodeLimits(max_turns=5)))


def test_the_sets_have_the_size_they_promise():
    assert len(load_tasks(SETS / "terminal")) >= 24 and len(load_tasks(SETS / "terminal_easy")) >= 12


@pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.path.parent.name}/{t.name}")
def test_the_solution_solves_it_within_the_turns_and_nothing_does_not(task):
    commands = task.solution.read_text().splitlines()
    assert play(task, commands).reward == 1.0
    assert play(task, []).reward == 0.0
    assert play(task, commands[:-1]).reward == 0.0
