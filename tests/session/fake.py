"""An engine without HTTP that answers with what it is told to, and a session over it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np

from miles.core import Drafts, EnvironmentFault, Turn
from miles.session import Engines, SessionLimits, SessionService


class FakeEngine:
    """Keeps every answered request; `outputs` are the next replies (cut to the room there is), `fail` lets the next request fail."""

    url, version = "fake", 0

    def __init__(self, stop_ids):
        self.stop_ids, self.outputs, self.fail, self.answered = stop_ids, [], False, []

    async def generate(self, rid, input_ids, sampling, *, routes_from, **kw):
        if self.fail:
            self.fail = False
            raise EnvironmentFault("the engine died")
        out = self.outputs.pop(0)[: sampling.max_new_tokens]
        everything = np.array([*input_ids, *out], dtype=np.int32)[:-1]
        turn = Turn(np.asarray(input_ids, dtype=np.int32), np.array(out, dtype=np.int32), np.array([-t / 1000 for t in out], dtype=np.float32),
                    np.zeros(len(out), dtype=np.int32), "stop" if out[-1] in self.stop_ids else "length",
                    routes=(everything[routes_from:, None, None] % 8).astype(np.uint8), routes_start=routes_from, drafts=Drafts(len(out), 2 * len(out), 1))
        self.answered.append(turn)
        return turn


def open_session(chat, *, replay=None, branching=False, **limits):
    """(engine, session, ask); `ask(messages, output ids, ...)` answers one request with these tokens."""
    engine = FakeEngine(chat.stop_ids)
    service = SessionService(Engines.of(engine), chat, SessionLimits(**{
        "max_session_tokens": 100_000, "max_turn_tokens": 1000, "turn_deadline_s": 5.0, "temperature": 1.0, **limits}), branching=branching,
        **({"replay": replay} if replay else {}))
    session = service.open("key")

    def ask(messages, output, **kw):
        engine.outputs = [list(output)]
        return asyncio.run(session.chat(messages, **kw))

    return SimpleNamespace(engine=engine, session=session, ask=ask, service=service)


def leaves(session):
    return session.trajectories(group_id=1, sample=0, task_id="t", reward=1.0, finish_reason="done")


def finish(session):
    """The trajectory of a session that did not branch."""
    (only,) = leaves(session)
    return only
