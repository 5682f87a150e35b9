"""Sessions over one engine: messages in, replies out, the engine's tokens kept as they came."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError

from miles.config import MilesConfig
from miles.core import EnvironmentFault, MilesError, StructureError, Trajectory, Turn
from miles.engine import EngineClient, KeyRequired, Sampling
from miles.session.assemble import to_trajectories
from miles.session.history import Checkpoint, History, Message, check_messages
from miles.session.replay import Replay, strict
from miles.session.tokenize import ChatTokenizer
from miles.session.tools import check_tools, parse_calls


class SessionBusy(MilesError):
    """A second request came while one was running: a session has one line of conversation."""


@dataclass(frozen=True)
class SessionLimits:
    """What a session may use. Tokens count everything, given and sampled."""

    max_session_tokens: int
    max_turn_tokens: int
    turn_deadline_s: float
    temperature: float

    @classmethod
    def from_config(cls, config: MilesConfig) -> SessionLimits:
        r = config.rollout
        return cls(r.max_session_tokens, r.max_turn_tokens, r.turn_deadline_s, r.temperature)


@dataclass(frozen=True)
class ChatReply:
    """One answer. `turn` is None when the budget left no room to sample: content "" and finish_reason "length"."""

    content: str
    finish_reason: str  # stop | length | tool_calls
    turn: Turn | None
    tool_calls: tuple[dict[str, Any], ...] = ()  # OpenAI's format
    reasoning: str | None = None  # None for families without

    @property
    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content or None if self.tool_calls else self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


class Session:
    """One conversation with one engine. Made by `SessionService.open`."""

    def __init__(self, service: SessionService, session_id: str, routing_key: str, opened_at: int, dp_rank: int | None):
        self.id, self.routing_key, self.opened_at, self.dp_rank = session_id, routing_key, opened_at, dp_rank
        self.history = History(branching=service.branching)
        self.retries = 0  # turns that were rolled back
        self.refused: Counter[str] = Counter()  # requests that did not continue this session, by cause
        self.branched: Counter[str] = Counter()  # answered requests that did not go on from the turn before, by cause
        self.engine_s = 0.0
        self.opened = time.monotonic()
        self._service = service
        self._busy = False
        self._requests = 0
        self._tools: dict[int, list[dict[str, Any]] | None] = {}  # of each first turn, and so of all that go on from it
        self._computed: list[np.ndarray] = []  # int32, tokens of earlier requests whose KV the engine has; none is a prefix of another
        self._computed_at = ""  # URL of the engine that has them

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.history.turns

    @property
    def tokens(self) -> int:
        """Length so far, given and sampled."""
        last = self.history.last
        return len(last.turn.input_ids) + len(last.turn.output_ids) if last else 0

    async def chat(self, messages: list[Message], max_tokens: int | None = None, tools: list[dict[str, Any]] | None = None) -> ChatReply:
        """Answer a conversation that continues this session (see `History.match`; all messages, not only the new ones).

        With `tools` (OpenAI's format, the same in every turn of a conversation) the template shows them to the model and its calls are parsed. Nothing of the
        session changes unless a reply came. Raises StructureError for messages that do not continue it, SessionBusy for a second request at
        the same time, EnvironmentFault when the engine fails, aborts or takes longer than the turn's deadline.
        """
        if self._busy:
            raise SessionBusy(f"session {self.id} is answering another request", "one request at a time", "wait for its reply")
        self._busy = True
        try:
            return await self._chat(messages, max_tokens, tools)
        except StructureError as e:
            self.refused[e.cause] += 1
            raise
        finally:
            self._busy = False

    async def _chat(self, messages: list[Message], max_tokens: int | None, tools: list[dict[str, Any]] | None) -> ChatReply:
        service, limits, chat = self._service, self._service.limits, self._service.chat_tokenizer
        tools = check_tools(tools)
        kept, appended, cause = self.history.match(check_messages(messages), service.replay)
        last = kept.last
        if last and tools != self._tools[kept.root(kept.head)]:
            raise StructureError("the tools of this request are not those of the conversation's first turn, which stand in its prompt",
                                 "the same tools in every turn", "open another session for other tools", cause="history:tools")
        before = last.tokens if last else np.zeros(0, dtype=np.int32)
        try:
            new = chat.append(appended, int(before[-1]), last.reply, tools) if last else chat.first(appended, tools)
        except TemplateError as e:
            raise StructureError(f"the chat template refuses these messages: {e}", "a conversation that this model's template can write",
                                 cause="request:template") from e
        input_ids = np.concatenate([before, np.asarray(new, dtype=np.int32)])
        room = min(limits.max_turn_tokens, limits.max_session_tokens - len(input_ids), max_tokens or limits.max_turn_tokens)
        if room < 1:
            return ChatReply("", "length", None)

        self._requests += 1
        turn = await service.client.generate(
            f"{self.id}.{self._requests}", input_ids,
            Sampling(max_new_tokens=room, temperature=limits.temperature, stop_token_ids=chat.stop_ids),
            routing_key=self.routing_key, routes_from=max(len(before) - 1, 0), extra_key=f"v{self.opened_at}", dp_rank=self.dp_rank,
            deadline_s=limits.turn_deadline_s,
        )
        self.engine_s += turn.seconds
        if turn.finish_reason == "abort" or not len(turn.output_ids):
            raise EnvironmentFault(f"session {self.id}: the engine aborted the turn after {len(turn.output_ids)} tokens {turn.extra}",
                                   "a reply that ends by itself or by length", "start the trajectory again")
        cacheable, reused = self._account_prefix(input_ids, turn)
        reply = await self._read(kept, turn, tools)
        self.retries += len(self.history.nodes) - len(kept.nodes)
        if cause and kept.branching:
            self.branched[cause] += 1
        self.history = kept.add(Checkpoint(appended, reply.message, turn, cacheable_tokens=cacheable, reused_tokens=reused))
        if last is None:
            self._tools[self.history.head] = tools
        return reply

    async def _read(self, kept: History, turn: Turn, tools: list[dict[str, Any]] | None) -> ChatReply:
        """What the turn's tokens say: reasoning, content, tool calls. A reply that was cut has no calls."""
        chat = self._service.chat_tokenizer
        reasoning, content = chat.split_reasoning(chat.text(turn.output_ids))
        if not tools or turn.finish_reason != "stop":
            return ChatReply(content, turn.finish_reason, turn, reasoning=reasoning)
        earlier = sum(len(m.get("tool_calls") or ()) for m in kept.messages)
        content, calls = await asyncio.to_thread(parse_calls, content, tools, chat.boundary, earlier)  # a thread: the first call imports SGLang
        return ChatReply(content, "tool_calls" if calls else turn.finish_reason, turn, tuple(calls), reasoning)

    def _account_prefix(self, input_ids: np.ndarray, turn: Turn) -> tuple[int, int]:
        """(prompt tokens whose KV this engine had already computed for this session, how many of them came from its cache)."""
        if self._computed_at != self._service.client.url:
            self._computed, self._computed_at = [], self._service.client.url
        shared = [_common_prefix(earlier, input_ids) for earlier in self._computed]
        # The engine computes at least the last input token anew, and never the last one it sampled.
        cacheable = min(max(shared, default=0), len(input_ids) - 1)
        self._computed = [earlier for earlier, n in zip(self._computed, shared, strict=True) if n < len(earlier)]
        self._computed.append(np.concatenate([input_ids, turn.output_ids[:-1]]))
        return cacheable, min(turn.cached_tokens, cacheable)

    def trajectories(self, *, group_id: int, sample: int, task_id: str, reward: float, finish_reason: str, meta: dict | None = None) -> list[Trajectory]:
        """This session as training sequences, one for each kept leaf of its history. Raises StructureError (with its cause) unless every token is
        accounted for."""
        return to_trajectories(
            self.history, group_id=group_id, sample=sample, task_id=task_id, reward=reward, finish_reason=finish_reason, opened_at=self.opened_at,
            seconds=time.monotonic() - self.opened,
            meta={"retried_turns": self.retries, "refused_requests": dict(self.refused), "branched_requests": dict(self.branched),
                  "engine_s": self.engine_s, **(meta or {})},
        )


class SessionService:
    """Opens sessions on one engine and keeps those that are open by id."""

    def __init__(self, client: EngineClient, chat_tokenizer: ChatTokenizer, limits: SessionLimits, *, dp_ranks: int = 1, replay: Replay = strict,
                 branching: bool = False):
        """`branching`: a request that does not go on from the last turn opens a branch of its session's history, and is not refused."""
        self.client, self.chat_tokenizer, self.limits, self.replay, self.branching = client, chat_tokenizer, limits, replay, branching
        self.sessions: dict[str, Session] = {}
        self._dp_ranks = dp_ranks

    def open(self, routing_key: str, session_id: str | None = None) -> Session:
        """A new session whose every turn goes to this engine (with dp-attention: to its rank with the fewest open sessions).

        Raises KeyRequired without a routing key, StructureError for an id in use, EnvironmentFault while the engine has no known weights.
        """
        if not routing_key:
            raise KeyRequired("a session without a routing key", "a key, the same for all turns", "pass one; the trajectory's name will do")
        if self.client.version < 0:
            raise EnvironmentFault(f"the engine at {self.client.url} serves no known weight version yet", "the current weights", "update it before it gets traffic")
        session_id = session_id or uuid.uuid4().hex
        if session_id in self.sessions:
            raise StructureError(f"session {session_id} exists already", "a new id", cause="session:exists")
        session = Session(self, session_id, routing_key, self.client.version, self._emptiest_rank())
        self.sessions[session_id] = session
        return session

    def close(self, session: Session) -> None:
        """Forget a session. Its turns stay with whoever holds it."""
        self.sessions.pop(session.id, None)

    def _emptiest_rank(self) -> int | None:
        if self._dp_ranks == 1:
            return None
        load = [0] * self._dp_ranks
        for s in self.sessions.values():
            load[s.dp_rank or 0] += 1
        return load.index(min(load))


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
