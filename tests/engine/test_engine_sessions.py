"""Sessions on the real server: prefix hits, routes and log-probabilities across turns, exactness under an update."""

import asyncio

import numpy as np
import pytest
import torch

from miles.session import ChatTokenizer, Engines, SessionLimits, SessionService
from tests.engine.test_engine_real import changed, hf, logprobs, weights  # noqa: F401  (fixtures)

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


def finish(session):
    return session.trajectory(group_id=0, sample=0, task_id="t", reward=0.0, finish_reason="done")


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
