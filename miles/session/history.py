"""Linear history of a session: immutable checkpoints, one per turn, and the decision what a new request means. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles.core import StructureError, Turn

Message = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """One answered turn: what was appended to the conversation, the reply as the harness got it, and the engine's record."""

    appended: tuple[Message, ...]
    reply: Message
    turn: Turn

    @property
    def tokens(self) -> np.ndarray:
        """int32 [P+N], everything up to and including this reply."""
        return np.concatenate([self.turn.input_ids, self.turn.output_ids])


@dataclass(frozen=True)
class History:
    """A session's turns, oldest first. Never changed in place: a turn that fails leaves the session as it was."""

    checkpoints: tuple[Checkpoint, ...] = field(default=())

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(c.turn for c in self.checkpoints)

    @property
    def messages(self) -> list[Message]:
        """The conversation as the harness should hold it."""
        return [m for c in self.checkpoints for m in (*c.appended, c.reply)]

    def add(self, checkpoint: Checkpoint) -> History:
        return replace(self, checkpoints=(*self.checkpoints, checkpoint))

    def match(self, request: Sequence[Message]) -> tuple[History, tuple[Message, ...]]:
        """What a request with these messages (the whole conversation) continues: the history to keep, and the messages appended to it.

        It may continue the last turn, or the one before it (a retry of the last turn, which also may roll back to the empty history).
        Anything else raises StructureError (cause "history:..."). A turn cut by length can be retried, not continued.
        """
        wanted = [_comparable(m) for m in request]
        problem = ""
        for kept in (self, replace(self, checkpoints=self.checkpoints[:-1])):
            held = [_comparable(m) for m in kept.messages]
            appended = request[len(held):]
            if wanted[: len(held)] == held and appended:
                return kept._continue(tuple(appended))
            problem = problem or _first_mismatch(held, wanted)
            if not self.checkpoints:
                break
        raise StructureError(f"the request does not continue this session: {problem}", "the stored conversation, or that without its last turn, and new messages",
                             "send the replies back unchanged; for another branch open another session", cause="history:mismatch")

    def _continue(self, appended: tuple[Message, ...]) -> tuple[History, tuple[Message, ...]]:
        if any(m["role"] == "assistant" for m in appended):
            raise StructureError("the request appends an assistant message that was not sampled here", "user, tool or system messages",
                                 "only the session's own replies may stand in a conversation that is trained on", cause="history:foreign-reply")
        if self.checkpoints and self.checkpoints[-1].turn.finish_reason != "stop":
            raise StructureError(f"the last turn ended by {self.checkpoints[-1].turn.finish_reason!r} and cannot be continued", "a turn that ended with a stop token",
                                 "end the session, or retry that turn", cause="history:truncated")
        return self, appended


def check_messages(request: Any) -> list[Message]:
    """The request's messages, validated. Raises StructureError (cause "history:message") for anything but role and string content."""
    if not isinstance(request, (list, tuple)) or not request:
        raise StructureError(f"messages = {request!r:.80}", "a list with at least one message", cause="history:message")
    for i, m in enumerate(request):
        if not isinstance(m, dict) or m.get("role") not in ("system", "user", "assistant", "tool") or not isinstance(m.get("content"), str):
            raise StructureError(f"messages[{i}] = {m!r:.120}", "role (system, user, assistant, tool) and content (a string)", cause="history:message")
    return list(request)


def _comparable(message: Message) -> Message:
    """Keys that harnesses add without a value do not make a message another one."""
    return {k: v for k, v in message.items() if v is not None}


def _first_mismatch(held: Sequence[Message], wanted: Sequence[Message]) -> str:
    for i, h in enumerate(held):
        if i >= len(wanted):
            return f"it has {len(wanted)} messages, the session {len(held)}"
        if h != wanted[i]:
            return f"messages[{i}] is {wanted[i]!r:.160}, the session has {h!r:.160}"
    return f"nothing is appended to the {len(held)} messages of the session"
