"""The reward of a sample, from the tests or from a user's function."""

import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from miles.config import load_config
from miles.core import ConfigError, StructureError
from miles.env import Episode, Task, load_reward

TASK = Task("count", Path("/nowhere"), "Count.", metadata={"bonus": 2})
SAID = [[{"role": "user", "content": "Count."}, {"role": "assistant", "content": "wc -l"}]]
ENDED = Episode(reward=0.5, finish="done", turns=3, env_s=1.0)


@pytest.fixture
def users(monkeypatch):
    """A module of the user, on the Python path."""
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module


def test_the_tests_give_the_reward_unless_a_function_is_named():
    assert load_config("configs/tiny_async.toml").tasks.reward == "tests"
    assert load_reward("tests")(TASK, SAID, ENDED) == 0.5


def test_a_users_function_makes_it_of_the_task_the_messages_and_the_result_of_the_tests(users):
    users.f = lambda task, conversations, episode: episode.reward * task.metadata["bonus"] - 0.1 * len(conversations[0][-1]["content"]) - episode.turns
    assert load_reward("my_rewards.f")(TASK, SAID, ENDED) == pytest.approx(0.5 * 2 - 0.1 * 5 - 3)


@pytest.mark.parametrize("value", [-3, True, Fraction(1, 4), np.float32(0.25)])
def test_any_real_number_is_a_reward(users, value):
    users.f = lambda *_: value
    found = load_reward("my_rewards.f")(TASK, SAID, ENDED)
    assert type(found) is float and found == value


@pytest.mark.parametrize("function", [lambda *_: 1 / 0, lambda task: 1.0, lambda *_: float("nan"), lambda *_: float("-inf"), lambda *_: None, lambda *_: "1", lambda *_: 10**400])
def test_one_that_fails_or_returns_no_finite_number_is_an_error_with_a_cause_and_no_reward(users, function):
    users.f = function
    with pytest.raises(StructureError, match="task count: the reward my_rewards.f") as e:
        load_reward("my_rewards.f")(TASK, SAID, ENDED)
    assert e.value.cause == "reward"


@pytest.mark.parametrize("name", ["no_such_package.module.f", "my_rewards.absent", "my_rewards.number"])
def test_what_is_no_function_is_refused_before_work_begins(users, name):
    users.number = 3
    with pytest.raises(ConfigError, match="tasks.reward"):
        load_reward(name)


@pytest.mark.parametrize("name", ["Tests", "a b.c", ""])
def test_names_that_are_no_dotted_path_are_refused_by_the_schema(name):
    with pytest.raises(ConfigError):
        load_config("configs/tiny_async.toml", (f"tasks.reward={name}",))
