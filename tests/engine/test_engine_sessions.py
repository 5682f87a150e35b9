"""Sessions on the real server: prefix hits, routes and log-probabilities across turns, exactness under an update."""

import asyncio

import numpy as np
import pytest
import torch

from miles.buffer import read_group
from miles.buffer.storage import write_part_file
from miles.engine import Sampling
from miles.session import ChatTokenizer, Engines, SessionLimits, SessionService
from tests.buffer.parts import seal_parts
from tests.engine.test_engine_real import changed, hf, logprobs, weights  # noqa: F401  (fixtures)
from tests.session.fake import finish

pytestmark = pytest.mark.engine


@pytest.fixture
def service(engine):
    return SessionService(Engines.of(engine.client), ChatTokenizer.from_folder(engine.folder), SessionLimits(1500, 40, 60.0, 1.0))


async def play(session, turns):
    """`turns` answered turns; those the random model does not end by itself are retried, as a harness might."""
    messages, attempts = [{"role": "user", "content": "list the files"}], 0
    while len(session.turns) < turns and attempts < 400:
        attempts += 1
        reply = await session.chat(messages)
        if reply.finish_reason == "stop":
            messages += [reply.message, {"role": "user", "content": f"output of command {len(session.turns)}"}]
    return session


@pytest.fixture
def eager_stop(engine, service, monkeypatch):
    """The random model hardly ever says <|im_end|>; let a quarter of its vocabulary end a turn, so that sessions have several."""
    stops = (*service.chat_tokenizer.stop_ids, *range(300, 390))
    monkeypatch.setattr(service.chat_tokenizer, "stop_ids", stops)


def test_a_session_of_several_turns_is_what_the_model_computed(engine, service, eager_stop, hf):  # noqa: F811
    session = engine.run(play(service.open("k"), 4))
    t = finish(session)
    assert t.turns == 4 and t.exact
    assert t.meta["reused_tokens"] == t.cacheable_tokens > 0  # every token this engine had computed for the session came from its cache
    lp, router = logprobs(hf(), t.tokens)
    at = np.flatnonzero(t.loss_mask)
    expected = np.array([lp[i - 1, t.tokens[i]].item() for i in at])
    assert np.abs(t.logprobs[at] - expected).max() < 1e-4
    routes = torch.stack([r.topk(2, -1).indices for r in router], 1)[:-1].numpy()
    assert (np.sort(t.routes, -1) == np.sort(routes, -1)).all()


async def stopped(session, messages):
    """A reply that the random model ended by itself; asked again until it does."""
    for _ in range(400):
        reply = await session.chat(messages)
        if reply.finish_reason == "stop":
            return reply.message
    raise AssertionError("no reply ended by itself")


def test_branches_of_a_session_are_what_the_model_computed_also_from_the_buffer(engine, service, eager_stop, hf, tmp_path):  # noqa: F811
    """Two turns, a fork at the second, a third turn of the first branch, and a folded context; then through a part file and a sealed group."""

    def user(text):
        return {"role": "user", "content": text}

    async def scenario():
        session = service.open("branches")
        one = await stopped(session, [user("list the files")])
        two = await stopped(session, [user("list the files"), one, user("output of the command")])
        await stopped(session, [user("list the files"), one, user("another output, after a fork")])
        await stopped(session, [user("list the files"), one, user("output of the command"), two, user("more output")])
        await stopped(session, [user("a summary of what was done"), user("go on")])
        return session

    service.branching = True
    session = engine.run(scenario())
    leaves = session.trajectories(group_id=0, sample=0, task_id="t", reward=1.0, finish_reason="done")
    (tmp_path / "parts").mkdir()
    (tmp_path / "groups").mkdir()
    write_part_file(tmp_path, leaves)
    stored = read_group(tmp_path, seal_parts(tmp_path, 0, [0])).trajectories
    nodes, last = session.history.nodes, session.history.leaves()
    assert len(stored) == len(last) == 3 and [t.turns for t in stored] == [2, 2, 1] and all(t.exact for t in stored)
    for leaf, t in zip(last, stored, strict=True):
        assert t.tokens.tolist() == nodes[leaf].tokens.tolist()
        lp, router = logprobs(hf(), t.tokens)
        at = np.flatnonzero(t.loss_mask)
        assert np.abs(t.logprobs[at] - np.array([lp[i - 1, t.tokens[i]].item() for i in at])).max() < 1e-4
        routes = torch.stack([r.topk(2, -1).indices for r in router], 1)[:-1].numpy()
        assert (t.routes == np.sort(routes, -1)).all()  # also of shared turns, whose KV this branch found in the cache
    kept = {i for leaf in last for i in session.history.path(leaf)}
    assert sum(t.sampled_tokens for t in stored) == sum(len(nodes[i].turn.output_ids) for i in kept)
    assert stored[1].loss_mask[: len(nodes[0].tokens)].sum() == 0 and session.branched["rewind"] + session.branched["content"] == session.branched.total()
    fork = nodes[last[0]]
    assert fork.cacheable_tokens >= len(nodes[0].tokens) - 1 and fork.reused_tokens == fork.cacheable_tokens


def test_sessions_around_an_update(engine, service, eager_stop, weights):  # noqa: F811
    async def scenario():
        before = await play(service.open("before"), 2)
        across = await play(service.open("across"), 1)
        messages = [*across.history.messages, {"role": "user", "content": "go on"}]
        await engine.client.pause("in_place")
        waiting = asyncio.create_task(across.chat(messages))
        await engine.client.update_tensors(changed(weights, 9), 8)
        await engine.client.resume()
        await waiting
        after = await play(service.open("after"), 2)
        await engine.client.update_tensors(weights, 7)
        await engine.client.flush()
        return before, across, after

    before, across, after = engine.run(scenario())
    assert (finish(before).exact, finish(across).exact, finish(after).exact) == (True, False, True)
    assert set(finish(across).versions.tolist()) == {-1, 7, 8} and set(finish(after).versions.tolist()) == {-1, 8}
    # the same first prompt: a namespace per version, so no prefix of the old weights serves a session of the new ones
    assert after.turns[0].cached_tokens == 0 or after.retries > 0


def test_streamed_tokens_are_those_of_the_record(engine, service):
    async def scenario():
        seen = []
        turn = await engine.client.generate("streamed", service.chat_tokenizer.first([{"role": "user", "content": "list the files"}]),
                                            Sampling(40, ignore_eos=True), routing_key="k", on_tokens=lambda ids: seen.append(list(ids)))
        return seen, turn

    seen, turn = engine.run(scenario())
    assert len(seen) >= 4 and seen[-1] == turn.output_ids.tolist() and len(turn.output_ids) == len(turn.logprobs) == 40
    assert all(turn.output_ids[: len(s)].tolist() == s for s in seen) and turn.routes is not None


def test_a_stop_text_ends_the_turn_and_the_conversation_goes_on_exactly(engine, service, hf):  # noqa: F811
    """Its tokens are sampled and trained; the stop token that the template wants is given, and the log-probabilities are those of that sequence."""
    async def scenario():
        session, messages = service.open("k"), [{"role": "user", "content": "list the files"}]
        while len(session.turns) < 3:
            reply = await session.chat(messages, stop=tuple("aeio"))
            assert not set(reply.content) & set("aeio")
            if reply.finish_reason == "stop" and session.turns[-1].output_ids[-1] not in service.chat_tokenizer.stop_ids:
                messages += [reply.message, {"role": "user", "content": f"output {len(session.turns)}"}]
        return session

    session = engine.run(scenario())
    t, chat = finish(session), service.chat_tokenizer
    first, second = session.turns[:2]
    assert not set(chat.text(first.output_ids[:-1])) & set("aeio") and set(chat.text(first.output_ids)) & set("aeio")  # one token may hold several
    assert second.input_ids[len(first.input_ids) + len(first.output_ids)] == chat.stop_ids[0] and second.input_ids.tolist() == chat.encode(
        chat.render([{"role": "user", "content": "list the files"}])) + first.output_ids.tolist() + second.input_ids[len(first.input_ids) + len(first.output_ids):].tolist()
    lp, _ = logprobs(hf(), t.tokens)
    at = np.flatnonzero(t.loss_mask)
    assert np.abs(t.logprobs[at] - np.array([lp[i - 1, t.tokens[i]].item() for i in at])).max() < 1e-4


def test_the_engine_is_told_when_a_streaming_client_hangs_up(engine, service):
    async def scenario():
        seen = asyncio.Event()
        service.limits = SessionLimits(1500, 1200, 60.0, 1.0)
        turn = asyncio.create_task(service.open("k").chat([{"role": "user", "content": "go"}], on_delta=lambda _: seen.set()))
        await asyncio.wait_for(seen.wait(), 30)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await asyncio.sleep(1.0)
        await engine.client.flush()  # refused while a request runs
        return turn.cancelled()

    assert engine.run(scenario())
