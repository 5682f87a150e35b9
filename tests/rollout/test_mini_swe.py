"""mini-swe-agent, unchanged, from its own environment, through the sandbox and a session. Needs .venv-mini: tools/mini_swe_env makes it (tools/test does)."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from miles.config import SiteConfig, load_config
from miles.env import Harness, run_harness
from miles.rollout.endpoint import Endpoint
from miles.session import (
    ChatTokenizer,
    Engines,
    SessionLimits,
    SessionServer,
    SessionService,
)
from tests.engine.conftest import (  # noqa: F401  (fixtures)
    engine,
    make_config,
    runner,
    tiny_moe,
    token_file,
)
from tests.engine.tiny import make_tokenizer
from tests.env.conftest import make_task  # noqa: F401  (fixture)
from tests.session.fake import open_session

pytestmark = pytest.mark.engine
HELLO = '[ "$(cat out.txt)" = hello ] || exit 1'
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FENCED = "THOUGHT: {}\n\n```mswea_bash_command\n{}\n```"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatTokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def mini(agent_config="/opt/mini-swe/agent.yaml", **changes):
    """The harness of configs/tiny_mini_swe.toml."""
    if not Path(".venv-mini/stamp").is_file():
        pytest.fail("no .venv-mini, mini-swe-agent's environment: run tools/mini_swe_env (half a minute)")
    harness = Harness.from_config(load_config("configs/tiny_mini_swe.toml"), SiteConfig())
    command = tuple(a.replace("/opt/mini-swe/agent.yaml", agent_config) for a in harness.command)
    return replace(harness, command=command, limits=replace(harness.limits, deadline_s=600.0, **changes))


def stock(config, model_class, *more):
    """The same with a configuration of its own, as it comes."""
    harness = mini(config)
    options = (f"--model-class={model_class}", "--model=openai/miles", "--config=model.cost_tracking=ignore_errors", *more)
    return replace(harness, command=(*harness.command, *options))


def play(chat, task, replies, harness, **options):
    s = open_session(chat, **options)
    s.engine.outputs = [[*chat.encode(r), chat.stop_ids[0]] for r in replies]
    endpoint = Endpoint(SessionServer(s.service, "token"), s.session, harness.limits.max_turns)
    episode = asyncio.run(run_harness(task, endpoint, harness))
    leaves = s.session.trajectories(group_id=1, sample=0, task_id="t", reward=episode.reward, finish_reason=episode.finish)
    return SimpleNamespace(episode=episode, trajectory=leaves[0], leaves=leaves, turns=s.engine.answered, session=s.session)


def tokens(turn):
    return [*turn.input_ids.tolist(), *turn.output_ids.tolist()]


def assert_holds_exactly(t, turns):
    """These turns' tokens are the trained ones, in their places, with the engine's log-probabilities, and nothing else is trained."""
    sampled = np.zeros(len(t.tokens), dtype=bool)
    for turn in turns:
        at = slice(len(turn.input_ids), len(turn.input_ids) + len(turn.output_ids))
        assert t.tokens[: at.stop].tolist() == tokens(turn)
        np.testing.assert_array_equal(t.logprobs[at], turn.logprobs)
        sampled[at] = True
    np.testing.assert_array_equal(t.loss_mask.astype(bool), sampled)
    assert len(t.tokens) == len(turns[-1].input_ids) + len(turns[-1].output_ids)


@pytest.mark.parametrize("more", [(), ("--config=model.set_cache_control=default_end",)], ids=["plain", "cache-control"])
def test_two_commands_and_a_submission_with_its_own_prompts(chat, make_task, more):  # noqa: F811
    """With cache control, the last message of each request is a list of parts with a mark, which it was not or will not be in others."""
    replies = [FENCED.format("look", "cat a.txt"), FENCED.format("write", "cp a.txt out.txt"), FENCED.format("end", SUBMIT)]
    played = play(chat, make_task(HELLO, {"a.txt": "hello\n"}), replies, stock("mini_textbased.yaml", "litellm_textbased", *more))
    assert (played.episode.reward, played.episode.finish, played.episode.turns) == (1.0, "done", 3)
    assert len(played.turns) == 3
    assert_holds_exactly(played.trajectory, played.turns)
    given = [chat.text(t.input_ids) for t in played.turns]
    assert "<returncode>0</returncode>\n<output>\nhello\n</output>" in given[1] and "Do it." in given[0]


def test_its_default_way_tool_calls(chat, make_task):  # noqa: F811
    replies = [f'I do it.\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "{c}"}}}}\n</tool_call>' for c in ("cat a.txt", "cp a.txt out.txt", SUBMIT)]
    played = play(chat, make_task(HELLO, {"a.txt": "hello\n"}), replies, stock("mini.yaml", "litellm"))
    assert (played.episode.reward, played.episode.finish, played.episode.turns) == (1.0, "done", 3)
    assert [m["role"] for m in played.session.history.messages] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert_holds_exactly(played.trajectory, played.turns)


def test_the_example_configuration_is_what_the_small_model_was_warm_started_on(chat, make_task):  # noqa: F811
    played = play(chat, make_task(HELLO, {"a.txt": "hello\n"}), ["cat a.txt", "cp a.txt out.txt; false", "DONE"], mini())
    assert (played.episode.reward, played.episode.finish) == (1.0, "done")
    assert played.session.history.messages == [
        {"role": "system", "content": "Reply with one command, or DONE."},
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "cat a.txt"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "cp a.txt out.txt; false"},
        {"role": "user", "content": "[exit 1]"},
        {"role": "assistant", "content": "DONE"},
    ]
    assert_holds_exactly(played.trajectory, played.turns)


def test_a_reply_without_a_command_is_dropped_by_the_agent_and_not_trained(chat, make_task):  # noqa: F811
    replies = [FENCED.format("a", "true"), "I am not sure", FENCED.format("b", "echo hello > out.txt"), FENCED.format("end", SUBMIT)]
    played = play(chat, make_task(HELLO), replies, stock("mini_textbased.yaml", "litellm_textbased"))
    assert (played.episode.reward, played.episode.finish, played.trajectory.turns, played.session.retries) == (1.0, "done", 3, 1)
    assert_holds_exactly(played.trajectory, [played.turns[0], *played.turns[2:]])


def test_with_a_branching_history_a_dropped_reply_is_trained_too_once(chat, make_task):  # noqa: F811
    replies = [FENCED.format("a", "true"), "I am not sure", FENCED.format("b", "echo hello > out.txt"), FENCED.format("end", SUBMIT)]
    played = play(chat, make_task(HELLO), replies, stock("mini_textbased.yaml", "litellm_textbased"), branching=True)
    assert (played.episode.reward, played.episode.finish, played.session.retries) == (1.0, "done", 0)
    dropped, kept = played.leaves  # in the order of their last answers; what they share is trained in the first
    assert dropped.tokens.tolist() == tokens(played.turns[1]) and kept.tokens.tolist() == tokens(played.turns[3])
    assert [int(t.loss_mask.sum()) for t in played.leaves] == [sum(len(t.output_ids) for t in part) for part in (played.turns[:2], played.turns[2:])]


def test_more_turns_than_the_run_allows_end_it(chat, make_task):  # noqa: F811
    played = play(chat, make_task(HELLO), ["echo hello > out.txt", "ls"], mini(max_turns=2))
    assert (played.episode.reward, played.episode.finish, played.episode.turns) == (1.0, "turns", 2)
    assert_holds_exactly(played.trajectory, played.turns)


def test_on_a_real_engine_every_sampled_token_is_the_engines(engine, make_task, monkeypatch):  # noqa: F811
    """The random model writes nonsense and hardly ever ends a turn; let a quarter of its vocabulary end one."""
    tokenizer = ChatTokenizer.from_folder(engine.folder)
    monkeypatch.setattr(tokenizer, "stop_ids", (*tokenizer.stop_ids, *range(300, 390)))
    service = SessionService(Engines.of(engine.client), tokenizer, SessionLimits(1500, 40, 60.0, 1.0))
    turns, harness, generate = [], mini(), engine.client.generate

    async def noted(*args, **kw):
        turns.append(await generate(*args, **kw))
        return turns[-1]

    monkeypatch.setattr(engine.client, "generate", noted)
    session = service.open("k")
    episode = engine.run(run_harness(make_task("exit 0"), Endpoint(SessionServer(service, "token"), session, harness.limits.max_turns), harness))
    assert episode.finish in ("done", "turns", "length") and episode.turns == len(turns) == len(session.turns) + session.retries
    # Replies of nothing but spaces are no command: the agent drops them, and the next request goes on from before.
    kept = [t for t, later in itertools.pairwise([*turns, None]) if later is None or later.input_ids.tolist()[: len(t.input_ids) + len(t.output_ids)] == tokens(t)]
    assert len(kept) == len(session.turns)
    (trajectory,) = session.trajectories(group_id=1, sample=0, task_id="t", reward=episode.reward, finish_reason=episode.finish)
    assert_holds_exactly(trajectory, kept)
