"""Sessions over one engine: messages in, replies out, the engine's tokens kept as they came."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import numpy as np

from miles.config import MilesConfig
from miles.core import EnvironmentFault, MilesError, StructureError, Trajectory, Turn
from miles.engine import EngineClient, KeyRequired, Sampling
from miles.session.assemble import to_trajectory
from miles.session.history import Checkpoint, History, Message, check_messages
from miles.session.tokenize import ChatTokenizer


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
    finish_reason: str  # stop | length
    turn: Turn | None

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.content}


class Session:
    """One conversation with one engine. Made by `SessionService.open`."""

    def __init__(self, service: SessionService, session_id: str, routing_key: str, opened_at: int, dp_rank: int | None):
        self.id, self.routing_key, self.opened_at, self.dp_rank = session_id, routing_key, opened_at, dp_rank
        self.history = History()
        self.retries = 0  # turns that were rolled back
        self.engine_s = 0.0
        self.cacheable_tokens = 0  # prompt tokens this engine had already computed for this session, over all turns
        self.reused_tokens = 0  # of those, how many came from its prefix cache
        self.opened = time.monotonic()
        self._service = service
        self._busy = False
        self._requests = 0
        self._computed = np.zeros(0, dtype=np.int32)  # tokens of the last request whose KV the engine has
        self._computed_at = ""  # URL of the engine that has it

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.history.turns

    @property
    def tokens(self) -> int:
        """Length so far, given and sampled."""
        return len(self.history.checkpoints[-1].tokens) if self.history.checkpoints else 0

    async def chat(self, messages: list[Message], max_tokens: int | None = None) -> ChatReply:
        """Answer a conversation that continues this session (see `History.match`; all messages, not only the new ones).

        Nothing of the session changes unless a reply came. Raises StructureError for messages that do not continue it, SessionBusy for a
        second request at the same time, EnvironmentFault when the engine fails, aborts or takes longer than the turn's deadline.
        """
        if self._busy:
            raise SessionBusy(f"session {self.id} is answering another request", "one request at a time", "wait for its reply")
        self._busy = True
        try:
            return await self._chat(messages, max_tokens)
        finally:
            self._busy = False

    async def _chat(self, messages: list[Message], max_tokens: int | None) -> ChatReply:
        service, limits = self._service, self._service.limits
        kept, appended = self.history.match(check_messages(messages))
        before = kept.checkpoints[-1].tokens if kept.checkpoints else np.zeros(0, dtype=np.int32)
        new = service.chat_tokenizer.append(appended, int(before[-1])) if len(before) else service.chat_tokenizer.first(appended)
        input_ids = np.concatenate([before, np.asarray(new, dtype=np.int32)])
        room = min(limits.max_turn_tokens, limits.max_session_tokens - len(input_ids), max_tokens or limits.max_turn_tokens)
        if room < 1:
            return ChatReply("", "length", None)

        self._requests += 1
        turn = await service.client.generate(
            f"{self.id}.{self._requests}", input_ids,
            Sampling(max_new_tokens=room, temperature=limits.temperature, stop_token_ids=service.chat_tokenizer.stop_ids),
            routing_key=self.routing_key, routes_from=max(len(before) - 1, 0), extra_key=f"v{self.opened_at}", dp_rank=self.dp_rank,
            deadline_s=limits.turn_deadline_s,
        )
        self.engine_s += turn.seconds
        if turn.finish_reason == "abort" or not len(turn.output_ids):
            raise EnvironmentFault(f"session {self.id}: the engine aborted the turn after {len(turn.output_ids)} tokens {turn.extra}",
                                   "a reply that ends by itself or by length", "start the trajectory again")
        self._account_prefix(input_ids, turn)
        reply = ChatReply(service.chat_tokenizer.text(turn.output_ids), turn.finish_reason, turn)
        self.retries += len(self.history.checkpoints) - len(kept.checkpoints)
        self.history = kept.add(Checkpoint(appended, reply.message, turn))
        return reply

    def _account_prefix(self, input_ids: np.ndarray, turn: Turn) -> None:
        url = self._service.client.url
        # The engine computes at least the last input token anew, and never the last one it sampled.
        cacheable = min(_common_prefix(self._computed, input_ids), len(input_ids) - 1) if self._computed_at == url else 0
        self.cacheable_tokens += cacheable
        self.reused_tokens += min(turn.cached_tokens, cacheable)
        self._computed, self._computed_at = np.concatenate([input_ids, turn.output_ids[:-1]]), url

    def trajectory(self, *, group_id: int, sample: int, task_id: str, reward: float, finish_reason: str, meta: dict | None = None) -> Trajectory:
        """This session as a training sequence. Raises StructureError (with its cause) unless every token is accounted for."""
        return to_trajectory(
            self.turns, group_id=group_id, sample=sample, task_id=task_id, reward=reward, finish_reason=finish_reason, opened_at=self.opened_at,
            cacheable_tokens=self.cacheable_tokens, reused_tokens=self.reused_tokens, seconds=time.monotonic() - self.opened,
            meta={"retried_turns": self.retries, "engine_s": self.engine_s, **(meta or {})},
        )


class SessionService:
    """Opens sessions on one engine and keeps those that are open by id."""

    def __init__(self, client: EngineClient, chat_tokenizer: ChatTokenizer, limits: SessionLimits, *, dp_ranks: int = 1):
        self.client, self.chat_tokenizer, self.limits = client, chat_tokenizer, limits
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
