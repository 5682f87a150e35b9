"""Sessions: messages in, replies out, the engine's tokens kept as they came."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from jinja2 import TemplateError

from miles.config import MilesConfig
from miles.core import Drafts, EnvironmentFault, MilesError, StructureError, Trajectory, Turn
from miles.engine import EngineGone, KeyRequired, Sampling, TurnOverdue
from miles.session.affinity import NOWHERE, Engines, Place
from miles.session.assemble import to_trajectories
from miles.session.history import Checkpoint, History, Match, Message, check_messages
from miles.session.replay import Replay, strict
from miles.session.store import Answered, Closed, Opened, SessionStore, Stored
from miles.session.stream import ReplyStream
from miles.session.tokenize import ChatTokenizer
from miles.session.tokens import TokenLine
from miles.session.tools import check_tools, parse_calls

ENGINES_A_TURN = 3  # engines that may die under one turn before it fails


class SessionBusy(MilesError):
    """A second request came while one was running: a session has one line of conversation."""


class TooManySessions(MilesError):
    """The server has as many sessions as it may."""


@dataclass(frozen=True)
class SessionLimits:
    """What a session may use. Tokens count everything, given and sampled."""

    max_session_tokens: int
    max_turn_tokens: int
    turn_deadline_s: float
    temperature: float
    max_sessions: int = 1024  # open at once over HTTP
    deadline_s: float = 3600.0  # of a session over HTTP

    @classmethod
    def from_config(cls, config: MilesConfig) -> SessionLimits:
        r = config.rollout
        return cls(r.max_session_tokens, r.max_turn_tokens, r.turn_deadline_s, r.temperature, r.max_sessions, r.deadline_s)


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
    """One conversation. Made by `SessionService.open`."""

    def __init__(self, service: SessionService, session_id: str, routing_key: str, opened_at: int, place: Place, *, durable: bool, wall: float):
        self.id, self.routing_key, self.opened_at, self.place, self.durable = session_id, routing_key, opened_at, place, durable
        self.history = History(branching=service.branching)
        self.retries = 0  # turns that were rolled back
        self.aborted = 0  # replies that were given up, or failed, when a part of them was shown already
        self.moves = 0  # engines that died under it
        self.refused: Counter[str] = Counter()  # requests that did not continue this session, by cause
        self.branched: Counter[str] = Counter()  # answered requests that did not go on from the turn before, by cause
        self.engine_s = 0.0
        self.opened = wall  # unix seconds
        self._age, self._since = max(0.0, time.time() - wall), time.monotonic()  # of one that was restored, as old as the wall clock says
        self.trajectory = False  # played by this process
        self._service = service
        self._busy = False
        self._requests = 0
        self._tools: dict[int, list[dict[str, Any]] | None] = {}  # of each first turn, and so of all that go on from it
        self._line = TokenLine()
        self._stored: deque[Answered] = deque()  # turns of the same trajectory that are on disk and not asked for again yet
        self.resumed_turns = self.abandoned_turns = 0  # of those: given again, and left because the conversation went another way
        self._computed: list[np.ndarray] = []  # int32, tokens of earlier requests whose KV the engine has, without those that later ones extend
        self._computed_at: Place | None = None  # who has them

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.history.turns

    @property
    def age(self) -> float:
        """Seconds since it was opened. A wall clock that jumps while this process lives changes nothing."""
        return self._age + time.monotonic() - self._since

    @property
    def tokens(self) -> int:
        """Length so far, given and sampled."""
        last = self.history.last
        return len(last.turn.input_ids) + len(last.turn.output_ids) if last else 0

    async def chat(self, messages: list[Message], max_tokens: int | None = None, tools: list[dict[str, Any]] | None = None, *,
                   stop: Sequence[str] = (), seed: int | None = None, on_delta: Callable[[dict[str, str]], None] | None = None) -> ChatReply:
        """Answer a conversation that continues this session (see `History.match`; all messages, not only the new ones).

        With `tools` (OpenAI's format, the same in every turn of a conversation) the template shows them to the model and its calls are parsed.
        `stop`: texts that end the turn; they are sampled, and not in the reply's content. `on_delta` gets parts of the reply's message while it is
        sampled.
        Nothing of the session changes unless a reply came, and in a durable session it is on disk before this returns. Raises StructureError for
        messages that do not continue it, or are nested too deeply to be compared or written, SessionBusy for a second request at the same time, EnvironmentFault
        when the engine fails, aborts or takes longer than the turn's deadline.
        """
        if self._busy:
            raise SessionBusy(f"session {self.id} is answering another request", "one request at a time", "wait for its reply")
        self._busy = True
        commit, shown, whole = None, False, False

        def show(delta: dict[str, str]) -> None:
            nonlocal shown
            shown = True
            on_delta(delta)

        try:
            match, reply, checkpoint, stored = await self._answer(check_messages(messages, self.history.messages), max_tokens, check_tools(tools), tuple(stop),
                                                                  seed, show if on_delta else None)
            if stored is not None:
                self._take_stored(match.kept, checkpoint, stored)
            elif checkpoint is not None and (commit := self._commit(match, checkpoint, tools or None)) is not None:
                await asyncio.shield(commit)
            whole = True
            return reply
        except (StructureError, RecursionError) as e:
            error = e if isinstance(e, StructureError) else StructureError(
                f"a message or a tool is nested too deeply: {e}", f"fewer than {sys.getrecursionlimit()} levels", cause="request:nesting")
            self.refused[error.cause] += 1
            error.evidence["request"] = {"messages": messages, "max_tokens": max_tokens, "tools": tools, "stop": stop, "seed": seed}
            raise error from e.__cause__
        finally:
            self.aborted += shown and not whole
            if commit is None:  # otherwise the end of the commit says so
                self._busy = False

    async def _answer(self, messages: list[Message], max_tokens: int | None, tools: list[dict[str, Any]] | None, stop: tuple[str, ...], seed: int | None,
                      on_delta: Callable[[dict[str, str]], None] | None) -> tuple[Match, ChatReply, Checkpoint | None, Answered | None]:
        """What the request goes on from, its reply, the turn (None where the budget left no room), and its record where it is on disk already."""
        service, limits, chat = self._service, self._service.limits, self._service.chat_tokenizer
        match = self.history.match(messages, service.replay)
        kept, appended = match.kept, match.appended
        last = kept.last
        if last and tools != self._tools[last.root]:
            raise StructureError("the tools of this request are not those of the conversation's first turn, which stand in its prompt",
                                 "the same tools in every turn", "open another session for other tools", cause="history:tools")
        before = last.tokens if last else np.zeros(0, dtype=np.int32)
        try:
            new = chat.append(appended, int(before[-1]), last.reply, tools) if last else chat.first(appended, tools)
        except TemplateError as e:
            raise StructureError(f"the chat template refuses these messages: {e}", "a conversation that this model's template can write",
                                 cause="request:template") from e
        room = min(limits.max_turn_tokens, limits.max_session_tokens - len(before) - len(new), max_tokens or limits.max_turn_tokens)
        if room < 1:
            return match, ChatReply("", "length", None), None, None
        input_ids = self._line.extend(before, new)
        stream = None if on_delta is None else ReplyStream(chat, stop, bool(tools), on_delta)
        sampling = Sampling(max_new_tokens=room, temperature=limits.temperature, stop_token_ids=chat.stop_ids, stop=stop, seed=seed)
        stored = self._next_stored(kept, new, tools)
        turn = to_turn(stored, input_ids) if stored else await self._generate(input_ids, sampling, max(len(before) - 1, 0), stream)
        reply = await self._read(kept, turn, tools, stop)
        if stream is not None:
            try:
                stream.finish(reply.message)
            except StructureError as e:
                e.evidence["output_ids"] = turn.output_ids.tolist()
                raise
        return match, reply, Checkpoint(appended, reply.message, turn, line=self._line.extend(input_ids, turn.output_ids)), stored

    def _next_stored(self, kept: History, new: list[int], tools: list[dict[str, Any]] | None) -> Answered | None:
        """The turn that a predecessor got for exactly these tokens, if that is what came next then. Otherwise the conversation goes another way (a
        command printed something else this time): what was stored from here on belongs to no conversation any more."""
        if not self._stored:
            return None
        record = self._stored[0]
        if (record.kept, record.parent) == (len(kept.nodes), kept.head) and record.new_ids == np.asarray(new, dtype=np.int32).tobytes() \
                and (kept.last is not None or record.tools == (tools or None)):
            return record
        self.abandoned_turns += len(self._stored)
        self._stored.clear()
        return None

    def _take_stored(self, kept: History, checkpoint: Checkpoint, record: Answered) -> None:
        """The engine's cache and its counts are of the first time; nothing is written."""
        self._stored.popleft()
        self.resumed_turns += 1
        self._add(kept, replace(checkpoint, cacheable_tokens=record.cacheable, reused_tokens=record.reused), record.tools)
        self._count(record)

    async def _generate(self, input_ids: np.ndarray, sampling: Sampling, routes_from: int, stream: ReplyStream | None) -> Turn:
        """One turn from the session's engine; from another, with the same tokens, when that one has died."""
        limits, deaths, input_json = self._service.limits, 0, self._line.json(input_ids)
        deadline = time.monotonic() + limits.turn_deadline_s
        while True:
            if not self.place.engine.alive:
                await self._settle(deadline)
            self._requests += 1
            try:
                turn = await self.place.engine.client.generate(
                    f"{self.id}.{self._requests}", input_ids, sampling, routing_key=self.routing_key, routes_from=routes_from,
                    extra_key=f"v{self.opened_at}", dp_rank=self.place.dp_rank, deadline_s=deadline - time.monotonic(), on_tokens=stream and stream.feed,
                    input_json=input_json)
                break
            except EngineGone:
                deaths += 1
                if deaths >= ENGINES_A_TURN or (stream is not None and stream.started):
                    raise  # what a client has already seen cannot be taken back
                if stream is not None:
                    stream.restart()
                await self._service.engines.lost(self.place.engine)
            except TurnOverdue:
                await asyncio.shield(self._service.engines.overdue(self.place.engine))  # also when the episode is over meanwhile
                raise
        self.engine_s += turn.seconds
        if turn.finish_reason == "abort" or not len(turn.output_ids):
            raise EnvironmentFault(f"session {self.id}: the engine aborted the turn after {len(turn.output_ids)} tokens {turn.extra}",
                                   "a reply that ends by itself or by length", "start the trajectory again")
        return turn

    async def _settle(self, deadline: float) -> None:
        """Move to a living engine, waiting for one until `deadline`."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                place = await self._service.engines.settle(self.place)
        except TimeoutError:
            raise EnvironmentFault(f"session {self.id}: no engine lived within {self._service.limits.turn_deadline_s:g} s", "a living engine",
                                   "read the engines' logs") from None
        self.moves += place is not self.place
        self.place = place

    def _commit(self, match: Match, checkpoint: Checkpoint, tools: list[dict[str, Any]] | None) -> asyncio.Future[None] | None:
        """Take the turn into the session: at once (None), or when it is on disk. Whoever gives up waiting finds it there nevertheless: on disk and in
        memory the session is the same."""
        kept, turn = match.kept, checkpoint.turn
        if self._computed_at != self.place:
            self._computed, self._computed_at = [], self.place
        shared = [_common_prefix(earlier, turn.input_ids) for earlier in self._computed]
        # The engine computes at least the last input token anew, and never the last one it sampled.
        cacheable = min(max(shared, default=0), len(turn.input_ids) - 1)
        checkpoint = replace(checkpoint, cacheable_tokens=cacheable, reused_tokens=min(turn.cached_tokens, cacheable))
        retries = self.retries + len(self.history.nodes) - len(kept.nodes)
        branched = self.branched + Counter([match.cause] if match.cause and kept.branching else [])

        def take(error: BaseException | None) -> None:
            self._busy = False
            if error is None:
                self.retries, self.branched = retries, branched
                self._computed = [*(earlier for earlier, n in zip(self._computed, shared, strict=True) if n < len(earlier)), checkpoint.tokens[:-1]]
                self._add(kept, checkpoint, tools)

        if self.durable:
            before = len(kept.last.tokens) if kept.last else 0
            counters = {"retries": retries, "aborted": self.aborted, "moves": self.moves, "engine_s": self.engine_s, "refused": dict(self.refused), "branched": dict(branched)}
            written = self._service.store.append(to_record(self.id, kept, checkpoint, before, tools if kept.last is None else None, counters))
            written.add_done_callback(lambda written: take(written.exception()))
        else:
            written = None
            take(None)
        return written

    def _add(self, kept: History, checkpoint: Checkpoint, tools: list[dict[str, Any]] | None) -> None:
        self.history = kept.add(checkpoint)
        if kept.last is None:
            self._tools[self.history.head] = tools

    def hold(self, turns: list[Answered]) -> None:
        """Give these turns again to the requests that they answered."""
        self._stored.extend(turns)

    def restore(self, turns: list[Answered]) -> None:
        """Continue from what a predecessor wrote. Its engine's cache is gone."""
        for record in turns:
            kept = History(self.history.nodes[: record.kept], record.parent, self.history.branching)
            before = kept.last.tokens if kept.last else np.zeros(0, dtype=np.int32)
            inputs = self._line.extend(before, np.frombuffer(record.new_ids, dtype=np.int32))
            turn = to_turn(record, inputs)
            checkpoint = Checkpoint(tuple(record.appended), record.reply, turn, line=self._line.extend(inputs, turn.output_ids),
                                    cacheable_tokens=record.cacheable, reused_tokens=record.reused)
            self._add(kept, checkpoint, record.tools)
            self._count(record)

    def _count(self, record: Answered) -> None:
        for name, value in record.counters.items():
            setattr(self, name, Counter(value) if isinstance(value, dict) else value)

    async def _read(self, kept: History, turn: Turn, tools: list[dict[str, Any]] | None, stop: tuple[str, ...]) -> ChatReply:
        """What the turn's tokens say: reasoning, content, tool calls. A reply that was cut has no calls."""
        chat = self._service.chat_tokenizer
        reasoning, content = chat.split_reasoning(before_stop(chat.text(turn.output_ids), stop))
        if not tools or turn.finish_reason != "stop":
            return ChatReply(content, turn.finish_reason, turn, reasoning=reasoning)
        earlier = sum(len(m.get("tool_calls") or ()) for m in kept.messages)
        content, calls = await asyncio.to_thread(parse_calls, content, tools, chat.boundary, earlier)  # a thread: the first call imports SGLang
        return ChatReply(content, "tool_calls" if calls else turn.finish_reason, turn, tuple(calls), reasoning)

    def trajectories(self, *, group_id: int, sample: int, task_id: str, reward: float, finish_reason: str, meta: dict | None = None) -> list[Trajectory]:
        """This session as training sequences, one for each kept leaf of its history. Raises StructureError (with its cause) unless every token is
        accounted for."""
        return to_trajectories(
            self.history, group_id=group_id, sample=sample, task_id=task_id, reward=reward, finish_reason=finish_reason, opened_at=self.opened_at,
            seconds=self.age,
            meta={"retried_turns": self.retries, "aborted_turns": self.aborted, "moves": self.moves, "refused_requests": dict(self.refused), "branched_requests": dict(self.branched),
                  "engine_s": self.engine_s, "resumed_turns": self.resumed_turns, "abandoned_turns": self.abandoned_turns, **(meta or {})},
        )


class SessionService:
    """Opens sessions, gives each its engine, and keeps those that are open by id."""

    def __init__(self, engines: Engines, chat_tokenizer: ChatTokenizer, limits: SessionLimits, *, replay: Replay = strict, branching: bool = False,
                 store: SessionStore | None = None):
        """With a `store`, sessions may be durable; those that its predecessors left open are open from the start, or `held` until their trajectory is
        played again. `branching`: a request that does not go on from the last turn opens a branch of its session's history, and is not refused."""
        self.engines, self.chat_tokenizer, self.limits, self.replay, self.branching, self.store = engines, chat_tokenizer, limits, replay, branching, store
        self.sessions: dict[str, Session] = {}
        self.held: dict[str, Stored] = {}  # unfinished trajectories of predecessors, by id
        for opened, turns in store.restored.values() if store else ():
            if opened.trajectory:
                self.held[opened.id] = (opened, turns)
                continue
            session = Session(self, opened.id, opened.routing_key, opened.version, NOWHERE, durable=True, wall=opened.wall)
            session.restore(turns)
            self.sessions[opened.id] = session

    def open(self, routing_key: str, session_id: str | None = None, *, rank: int | None = None) -> Session:
        """A new session, kept in memory, whose every turn goes to one engine: that of `rank`, or the one with the fewest sessions.

        Raises KeyRequired without a routing key, StructureError for an id in use, EnvironmentFault while no engine has known weights.
        """
        if not routing_key:
            raise KeyRequired("a session without a routing key", "a key, the same for all turns", "pass one; the trajectory's name will do")
        session_id = session_id or uuid.uuid4().hex
        if session_id in self.sessions:
            raise StructureError(f"session {session_id} exists already", "a new id", cause="session:exists")
        place = self.engines.place(prefer=rank)
        session = Session(self, session_id, routing_key, place.engine.client.version, place, durable=False, wall=time.time())
        self.sessions[session_id] = session
        return session

    async def open_durable(self, routing_key: str, session_id: str | None = None, *, rank: int | None = None) -> Session:
        """Like `open`, for a conversation whose other end survives this process: it is on disk, and so is each turn before its answer."""
        await self._expire()
        if sum(s.durable and not s.trajectory for s in self.sessions.values()) >= self.limits.max_sessions:
            raise TooManySessions(f"{self.limits.max_sessions} sessions are open on this server", "fewer than rollout.max_sessions",
                                  "finish one, or come back later")
        session = self.open(routing_key, session_id, rank=rank)
        if self.store is not None:
            session.durable = True
            try:
                await self.store.append(Opened(session.id, routing_key, session.opened_at, session.opened))
            except BaseException:
                self.close(session)
                raise
        return session

    async def open_trajectory(self, name: str, *, rank: int | None = None, held: Stored | None = None) -> Session:
        """The session of a trajectory that this process plays; `name` is its id and routing key. It is on disk, and so is each turn before its answer.

        When a predecessor has played a part of it (`held`, read from another rank's file, or from `self.held`), the same requests get the same turns
        again, without the engine, up to the last one that was answered; from where a request differs, the engine is asked. Otherwise it is played from its
        beginning, whatever this service holds of it: that is older, and is let go. Raises like `open`.
        """
        session = self.open(name, name, rank=rank)
        known = self.held.pop(name, None)  # in this store's file already
        opened, turns = held or (Opened(name, name, session.opened_at, session.opened, trajectory=True), [])
        session.opened_at, session.durable, session.trajectory = opened.version, True, True
        session.hold(turns)
        if known is None or held is not known:
            try:
                await self.store.append(opened, *turns)
            except BaseException:
                self.close(session)
                raise
        return session

    async def release(self, names: Iterable[str]) -> None:
        """Let go of held trajectories that nobody will play again."""
        if gone := [n for n in names if self.held.pop(n, None)]:
            await self.store.append(*map(Closed, gone))

    def close(self, session: Session) -> None:
        """Forget a session. Its turns stay with whoever holds it."""
        if self.sessions.pop(session.id, None) is not None:
            self.engines.leave(session.place)

    async def forget(self, session: Session) -> None:
        """Close a session also on disk."""
        self.close(session)
        if session.durable:
            session.durable = False
            await self.store.append(Closed(session.id))

    async def _expire(self) -> None:
        """Sessions whose harness never finished them."""
        for session in [s for s in self.sessions.values() if s.durable and not s.trajectory and s.age > self.limits.deadline_s]:
            await self.forget(session)


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """A reply up to the first stop text in it."""
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


def to_record(session_id: str, kept: History, checkpoint: Checkpoint, before: int, tools: list[dict[str, Any]] | None, counters: dict[str, Any]) -> Answered:
    """A turn as it is written: of its input, what follows the first `before` tokens."""
    t = checkpoint.turn
    return Answered(
        session_id, len(kept.nodes), kept.head, list(checkpoint.appended), checkpoint.reply, t.input_ids[before:].tobytes(), t.output_ids.tobytes(),
        t.logprobs.tobytes(), t.versions.tobytes(), t.finish_reason, tools, t.cached_tokens, checkpoint.cacheable_tokens, checkpoint.reused_tokens,
        t.seconds, None if t.routes is None else t.routes.tobytes(), "" if t.routes is None else t.routes.dtype.str,
        () if t.routes is None else t.routes.shape, t.routes_start, counters, astuple(t.drafts))


def to_turn(record: Answered, input_ids: np.ndarray) -> Turn:
    routes = None if record.routes is None else np.frombuffer(record.routes, dtype=record.routes_dtype).reshape(record.routes_shape)
    return Turn(input_ids, np.frombuffer(record.output_ids, dtype=np.int32), np.frombuffer(record.logprobs, dtype=np.float32),
                np.frombuffer(record.versions, dtype=np.int32), record.finish, record.cached, routes, record.routes_start, record.seconds, Drafts(*record.drafts))


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
