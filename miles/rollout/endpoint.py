"""A session as the model of one harness: counts its turns, and remembers what a harness's ending has to be judged by."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from miles.core import EnvironmentFault, StructureError
from miles.env import Asked
from miles.session import ChatReply, Session, SessionBusy, SessionServer


class Endpoint:
    """Offers one session to one harness (`miles.env.Model`). The session server sees it as the session."""

    def __init__(self, server: SessionServer, session: Session, max_turns: int):
        self.asked = Asked()
        self._server, self._session, self._max_turns = server, session, max_turns
        self._refused = 0  # number of the last refused request

    @contextlib.asynccontextmanager
    async def serve(self, socket: Path) -> AsyncIterator[Asked]:
        async with self._server.serve_only(self, socket):
            yield self.asked

    async def chat(self, *args, **kwargs) -> ChatReply:
        """`Session.chat`, at most `max_turns` times: every reply counts, also one that the harness drops and asks again for, and a
        stream that it gives up when it has seen some of it: it must not look at any number of samples and keep the one it likes.

        Raises what it raises, and StructureError (cause "request:turns") for a turn too many.
        """
        asked = self.asked
        asked.requests += 1
        if asked.replies >= self._max_turns:
            asked.over = True
            asked.stop.set()
            raise StructureError(f"this conversation has had its {self._max_turns} turns", f"at most rollout.max_turns = {self._max_turns} replies",
                                 "end: nothing more is answered", cause="request:turns")
        number, began, aborted = asked.requests, time.monotonic(), self._session.aborted
        try:
            reply = await self._session.chat(*args, **kwargs)
        except (StructureError, SessionBusy) as e:
            busy = StructureError("the agent asked again before it was answered", "one request at a time", "set it up to wait", cause="session:busy")
            self._refused, asked.refused = number, e if isinstance(e, StructureError) else busy
            raise
        except Exception as e:
            asked.fault = e if isinstance(e, EnvironmentFault) else EnvironmentFault(f"the session failed: {e!r}", "a reply, or a refusal", "see the traceback in the rank's log")
            asked.stop.set()
            raise
        finally:
            asked.replies += self._session.aborted - aborted
            asked.waited_s += time.monotonic() - began
        asked.replies += 1
        asked.last = reply.finish_reason
        if number > self._refused:
            asked.refused = None
        return reply
