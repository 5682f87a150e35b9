"""A harness on a real session: what it made the model produce is trained on as it was sampled, and every other ending has a reason."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from miles.core import EnvironmentFault, StructureError
from miles.env import EpisodeLimits, Harness, run_harness
from miles.rollout.endpoint import Endpoint
from miles.session import ChatTokenizer, SessionServer
from tests.engine.tiny import make_tokenizer
from tests.env.conftest import make_task  # noqa: F401  (fixture)
from tests.env.test_harness import AGENT, HELLO, LOOP
from tests.session.fake import FakeEngine, open_session


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatTokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def play(chat, make_task):  # noqa: F811
    """play(agent, replies) -> the episode, and the session with its engine. A reply is text that ends by itself, or the ids as they are."""

    def run(agent, replies, max_turns=4, test=HELLO, **limits):
        s = open_session(chat, **limits)
        s.engine.outputs = [[*chat.encode(r), chat.stop_ids[0]] if isinstance(r, str) else r for r in replies]
        endpoint = Endpoint(SessionServer(s.service, "token"), s.session, max_turns)
        harness = Harness(("python3", "agent.py", "{url}", "{instruction}"), limits=EpisodeLimits(max_turns=max_turns, deadline_s=30.0))
        episode = asyncio.run(run_harness(make_task(test, files={"agent.py": agent}), endpoint, harness))
        return SimpleNamespace(episode=episode, session=s.session, engine=s.engine, asked=endpoint.asked)

    return run


def finish(played):
    (trajectory,) = played.session.trajectories(group_id=1, sample=0, task_id="t", reward=played.episode.reward, finish_reason=played.episode.finish)
    return trajectory


def test_every_token_of_an_agents_conversation_is_the_engines(play):
    played = play(LOOP, ["echo hello > out.txt", "cat out.txt", "DONE"])
    t = finish(played)
    assert (t.reward, t.finish_reason, t.turns) == (1.0, "done", 3)
    last = played.engine.answered[-1]
    assert t.tokens.tolist() == [*last.input_ids, *last.output_ids]
    for turn in played.engine.answered:
        sampled = slice(len(turn.input_ids), len(turn.input_ids) + len(turn.output_ids))
        assert t.tokens[sampled].tolist() == turn.output_ids.tolist() and t.loss_mask[sampled].all()
        np.testing.assert_array_equal(t.logprobs[sampled], turn.logprobs)
    assert t.loss_mask.sum() == sum(len(turn.output_ids) for turn in played.engine.answered)


def test_the_turn_after_the_last_is_refused_with_the_reason(play):
    agent = LOOP.replace("    choice = ask(messages)", "    try:\n        choice = ask(messages)\n    except urllib.error.HTTPError as e:\n"
                         "        error = json.load(e)['error']\n        open('told.txt', 'w').write(f\"{e.code} {error['code']}\")\n        sys.exit(1)")
    played = play(agent, ["true", "true"], max_turns=2, test='[ "$(cat told.txt)" = "400 request:turns" ] || exit 1')
    assert (played.episode.finish, played.episode.turns, played.episode.reward) == ("turns", 2, 1.0)
    assert finish(played).turns == 2


def test_an_answer_that_the_agent_drops_and_asks_again_is_a_turn_of_the_run_but_not_of_the_trajectory(play):
    agent = AGENT + "ask(messages)\nask([*messages, {'role': 'user', 'content': 'one command, please'}])\n"
    played = play(agent, ["I will look", "ls"])
    assert (played.episode.turns, finish(played).turns, played.session.retries) == (2, 1, 1)
    assert finish(played).loss_mask.sum() == len(played.engine.answered[-1].output_ids)


def test_an_agent_that_rewrites_its_history_and_fails_over_it_gives_no_trajectory_but_the_cause(play):
    agent = AGENT + "ask(messages)\nask([{'role': 'user', 'content': 'summary so far'}, {'role': 'assistant', 'content': 'x'}, *messages])\n"
    with pytest.raises(StructureError) as e:
        play(agent, ["ls"])
    assert e.value.cause.startswith("history:")


def test_with_a_branching_history_an_agent_may_rewrite_its_own_and_every_sampled_token_is_trained_once(play):
    agent = AGENT + "ask(messages)\nask([{'role': 'user', 'content': 'summary so far'}])\n"
    played = play(agent, ["ls", "echo hello > out.txt"], branching=True)
    leaves = played.session.trajectories(group_id=1, sample=0, task_id="t", reward=0.0, finish_reason=played.episode.finish)
    assert (played.episode.finish, len(leaves)) == ("done", 2)
    for leaf, turn in zip(leaves, played.engine.answered, strict=True):
        assert leaf.tokens.tolist() == [*turn.input_ids.tolist(), *turn.output_ids.tolist()]
        assert leaf.loss_mask.tolist() == [0] * len(turn.input_ids) + [1] * len(turn.output_ids)


def test_an_agent_that_fails_because_it_asked_twice_at_once_gives_no_trajectory_but_the_cause(play):
    real = FakeEngine.generate

    async def slow(self, *args, **kw):
        await asyncio.sleep(1)
        return await real(self, *args, **kw)

    agent = AGENT + "import threading, time\nthreading.Thread(target=ask, args=(messages,)).start()\ntime.sleep(0.3)\nask(messages)\n"
    with pytest.MonkeyPatch.context() as m, pytest.raises(StructureError) as e:
        m.setattr(FakeEngine, "generate", slow)
        play(agent, ["ls"])
    assert e.value.cause == "session:busy"


def test_a_reply_that_hit_the_turns_limit_of_tokens_ends_an_agent_that_goes_on_from_it_by_length(play, chat):
    played = play(LOOP, [chat.encode("echo hello hello hello hello")], max_turn_tokens=3)
    assert (played.episode.finish, played.episode.turns, finish(played).turns) == ("length", 1, 1)


def test_an_engine_that_fails_is_a_fault_of_the_machine(play):
    def failing(*_args, **_kw):
        raise EnvironmentFault("the engine died")

    with pytest.MonkeyPatch.context() as m:
        m.setattr(FakeEngine, "generate", failing)
        with pytest.raises(EnvironmentFault, match="the engine died"):
            play(LOOP, ["ls"])


def test_connections_without_end_are_closed_and_the_conversation_goes_on(play):
    flood = ("import socket\nfound = [socket.socket(socket.AF_UNIX) for _ in range(200)]\nfor s in found:\n    s.connect('/miles/session')\n    s.settimeout(0.1)\n"
             "def closed(s):\n    try:\n        return s.recv(1) == b''\n    except TimeoutError:\n        return False\n    except ConnectionError:\n        return True\n"
             "open('closed.txt', 'w').write(str(sum(map(closed, found))))\n")
    played = play(f"{AGENT}{flood}[s.close() for s in found]\nimport time; time.sleep(0.5)\nask(messages)\n", ["ok"], test='[ "$(cat closed.txt)" -ge 150 ] || exit 1')
    assert (played.episode.finish, played.episode.reward) == ("done", 1.0)


def test_a_body_that_no_session_could_hold_is_refused_unread(play):
    agent = AGENT + ("try:\n    ask([{'role': 'user', 'content': 'x' * (7 << 20)}])\nexcept urllib.error.HTTPError as e:\n    open('told.txt', 'w').write(str(e.code))\n"
                     "ask(messages)\n")
    played = play(agent, ["ok"], test='[ "$(cat told.txt)" = 413 ] || exit 1')  # the session has room for 100,000 tokens
    assert (played.episode.finish, played.episode.reward) == ("done", 1.0)


def test_a_request_that_the_server_refuses_outright_is_in_the_fault(play):
    agent = AGENT.replace('"messages": messages}', '"messages": messages, "temperature": 0.125}') + (
        "try:\n    ask(messages)\nexcept urllib.error.HTTPError as e:\n    sys.exit(e.read().decode())\n")
    with pytest.raises(EnvironmentFault, match=r"exit code 1 before the model answered it once[\s\S]*temperature = 0.125"):
        play(agent, [])


def test_an_error_that_nobody_foresaw_is_a_fault_of_the_machine(play):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(ChatTokenizer, "text", lambda *_: 1 / 0)
        with pytest.raises(EnvironmentFault, match="the session failed: ZeroDivisionError"):
            play(LOOP, ["ls"])


@pytest.mark.parametrize(("shown", "counted"), [("ls -l", 1), ("", 0)])
def test_a_stream_that_is_given_up_counts_as_a_reply_when_some_of_it_was_shown(chat, shown, counted):
    """Otherwise an agent could look at any number of samples and keep the one that it likes."""
    async def stream(self, *args, on_tokens, **kw):
        on_tokens(chat.encode(shown))
        await asyncio.sleep(60)

    async def scenario():
        s = open_session(chat)
        endpoint, ask = Endpoint(SessionServer(s.service, "token"), s.session, 2), [{"role": "user", "content": "hello"}]
        for _ in range(2):
            asking = asyncio.ensure_future(endpoint.chat(ask, on_delta=(got := []).append))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.wait({asking})
            assert "".join(d["content"] for d in got) == shown
        assert (endpoint.asked.replies, s.session.aborted, len(s.session.turns)) == (2 * counted, 2 * counted, 0)
        if counted:
            with pytest.raises(StructureError, match="has had its 2 turns"):
                await endpoint.chat(ask)
            assert endpoint.asked.over and endpoint.asked.stop.is_set()

    with pytest.MonkeyPatch.context() as m:
        m.setattr(FakeEngine, "generate", stream)
        asyncio.run(scenario())
