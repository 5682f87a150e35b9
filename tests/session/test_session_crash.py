"""kill -9 of a session server in the middle of turns: its successor continues every conversation, and what is trained is what the engine sampled."""

import asyncio
import json
import os
import random
import signal
import sys

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core import StructureError
from miles.engine import ModelShape, lease_port
from miles.session import Engines, SessionLimits, SessionService, SessionStore
from tests.conftest import ROOT
from tests.engine.stub import StubEngine
from tests.engine.tiny import make_tokenizer
from tests.session.conftest import SHAPE_CONFIG, user
from tests.session.fake import FakeEngine, finish
from tests.session.server_program import TOKEN


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE_CONFIG))
    save_file({"model.norm.weight": torch.zeros(2)}, folder / "model.safetensors")
    return folder


class Server:
    """The server process, started again in a new epoch after each kill, at the same address."""

    def __init__(self, model, engine, store):
        self._args, self.epoch, self._lease = (str(model), engine, str(store)), 0, lease_port(36200)
        self.url = f"http://127.0.0.1:{self._lease.port}"

    async def start(self):
        self.epoch += 1
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.session.server_program", *self._args, str(self.epoch), str(self._lease.port), stdout=asyncio.subprocess.PIPE,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert (await self._child.stdout.readline()).decode().strip() == self.url

    async def kill(self):
        self._child.send_signal(signal.SIGKILL)
        await self._child.wait()

    async def close(self):
        await self.kill()
        self._lease.release()


async def persistent(http, method, url, body=None):
    """What an agent's client does: the same request again until there is an answer."""
    while True:
        try:
            async with http.request(method, url, json=body) as r:
                answer = await r.json()
                if r.status < 500 and r.status != 409:
                    return r.status, answer
        except (aiohttp.ClientError, ConnectionError):
            await asyncio.sleep(0.05)


async def converse(http, base, turns, said):
    messages = [user("hello")]
    for i in range(turns):
        status, answer = await persistent(http, "POST", base + "/v1/chat/completions", {"messages": messages})
        assert status == 200, answer
        said.append(answer["choices"][0]["message"]["content"])
        messages += [answer["choices"][0]["message"], user(f"output {i}")]
    return await persistent(http, "POST", base + "/finish", {"arrays": True})


def test_killed_at_random_times_every_conversation_goes_on(model, chat, tmp_path):
    """Eight conversations of six turns under five kills. Whatever was answered stands; only turns without an answer are asked again."""
    async def scenario():
        rng = random.Random(7)
        stub = StubEngine(ModelShape.from_folder(model), chat.stop_ids[0])
        server = Server(model, await stub.start(), tmp_path / "sessions")
        stub.delay = 0.03
        await server.start()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=aiohttp.ClientTimeout(total=60)) as http:
            opened = [(await persistent(http, "POST", server.url + "/sessions", {"id": f"c{n}"}))[1] for n in range(8)]
            said = [[] for _ in opened]
            talks = [asyncio.create_task(converse(http, f"{server.url}/sessions/{o['id']}", 6, s)) for o, s in zip(opened, said, strict=True)]
            for _ in range(5):
                await asyncio.sleep(rng.uniform(0.05, 0.25))
                await server.kill()
                await server.start()
            finished = await asyncio.gather(*talks)
        await server.close()
        await stub.stop()
        return stub, said, finished

    stub, said, finished = asyncio.run(scenario())
    by_input = {tuple(r["input_ids"]): r for r in stub.requests}
    for replies, (status, summary) in zip(said, finished, strict=True):
        assert status == 200 and len(summary["turns"]) == 6 and summary["exact"], summary
        (arrays,) = summary["arrays"]
        tokens, mask = np.array(arrays["tokens"]), np.array(arrays["loss_mask"])
        starts = np.flatnonzero(np.diff(np.concatenate([[0], mask])) == 1)
        for k, start in enumerate(starts):
            # the engine was asked with exactly the tokens before, and answered (a pure function of them) with exactly those that are trained
            sampled = tokens[start: start + int(np.argmin(np.append(mask[start:], 0)))].tolist()
            request = by_input[tuple(tokens[:start].tolist())]
            assert sampled == stub.reply_ids(request["input_ids"], 16)
            assert chat.text(sampled) == replies[k], "the harness was told what is trained"
    assert len(stub.requests) >= 48


acts = st.lists(st.sampled_from(["turn", "retry", "retry", "restart", "cut", "refused"]), min_size=1, max_size=12)


@settings(max_examples=40)
@given(acts=acts, seed=st.integers(0, 99))
def test_a_restored_session_is_the_one_that_was_killed(chat, tmp_path_factory, acts, seed):
    """Random turns, retries and restarts: after each restart tokens, turns and counters are those of a session that was never killed."""
    folder, rng = tmp_path_factory.mktemp("sessions"), random.Random(seed)

    async def scenario():
        engine, epoch = FakeEngine(chat.stop_ids), 0

        def start():
            nonlocal epoch
            epoch += 1
            return SessionService(Engines.of(engine), chat, SessionLimits(4000, 64, 5.0, 1.0), store=SessionStore(folder, 0, epoch))

        service = start()
        session = await service.open_durable("key", "s")
        messages, trained = [user("hello")], []
        for act in ("turn", *acts):
            if act == "restart":
                before = session
                service = start()  # without a word to the old one: it is dead
                session = service.sessions["s"]
                assert session.turns and [t.output_ids.tolist() for t in session.turns] == [t.output_ids.tolist() for t in before.turns]
                assert [t.drafts for t in session.turns] == [t.drafts for t in before.turns]
                assert session.history.messages == before.history.messages and session.retries == before.retries
                assert (session.opened_at, session.routing_key, session.engine_s) == (before.opened_at, before.routing_key, before.engine_s)
                continue
            if act == "refused":
                status = session.history
                with pytest.raises(StructureError):
                    await session.chat([user("something else"), {"role": "assistant", "content": "forged"}, user("x")])
                assert session.history is status
                continue
            if act == "retry" and trained:
                messages, trained = messages[:-2], trained[:-1]
            out = [rng.randrange(10, 250) for _ in range(rng.randrange(1, 6))]
            engine.outputs = [out if act == "cut" else [*out, chat.stop_ids[0]]]
            reply = await session.chat(messages)
            trained.append(engine.answered[-1].output_ids.tolist())
            if act == "cut":  # cannot be continued: it is asked again
                trained.pop()
                engine.outputs = [[*out, chat.stop_ids[0]]]
                reply = await session.chat(messages)
                trained.append(engine.answered[-1].output_ids.tolist())
            messages = [*messages, reply.message, user(f"say {rng.random()}")]
        t = finish(session)
        assert [x for out in trained for x in out] == t.tokens[t.loss_mask == 1].tolist()
        assert (t.routes[:, 0, 0] == t.tokens[:-1] % 8).all(), "routes are those of their tokens, also across a restart"
        await service.forget(session)
        assert not start().sessions

    asyncio.run(scenario())
