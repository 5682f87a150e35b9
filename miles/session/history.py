"""What a session remembers: an append-only tree of answered turns, and the decision what a new request means. Pure.

A linear history is the tree without branches: a retry of the last turn puts it away, and every other request that does not go on from the last turn
is refused. A branching history goes on from the deepest turn that a request still holds, and keeps the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from miles.core import StructureError, Turn
from miles.session.replay import Replay, strict

Message = dict[str, Any]
ROOT = -1
"""The parent of first turns."""


@dataclass(frozen=True)
class Checkpoint:
    """One answered turn: what was appended to the conversation, the reply as the harness got it, and the engine's record."""

    appended: tuple[Message, ...]
    reply: Message
    turn: Turn
    parent: int = ROOT  # index of the turn it goes on from
    root: int = 0  # index of the first turn of its conversation
    line: np.ndarray | None = None  # int32 [P+N], the turn's tokens where they lie already end to end
    cacheable_tokens: int = 0  # prompt tokens whose KV the engine had already computed for this session
    reused_tokens: int = 0  # of those, how many came from its prefix cache

    @property
    def tokens(self) -> np.ndarray:
        """int32 [P+N], everything up to and including this reply."""
        return self.line if self.line is not None else np.concatenate([self.turn.input_ids, self.turn.output_ids])

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.appended, self.reply)


class Match(NamedTuple):
    """What a request goes on from (`kept.head`), what it appends, and why it does not go on from the last turn ("": it does)."""

    kept: History
    appended: tuple[Message, ...]
    cause: str = ""


@dataclass(frozen=True)
class History:
    """A session's turns in the order of their answers. Never changed in place: a turn that fails leaves the session as it was."""

    nodes: tuple[Checkpoint, ...] = ()
    head: int = ROOT  # the turn that is continued
    branching: bool = False

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The turns up to `head`, oldest first."""
        return tuple(self.nodes[i] for i in self.path(self.head))

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(c.turn for c in self.checkpoints)

    @cached_property
    def messages(self) -> list[Message]:
        """The conversation up to `head` as the harness should hold it."""
        return [m for c in self.checkpoints for m in c.messages]

    @property
    def last(self) -> Checkpoint | None:
        """The turn that is continued; None at the beginning."""
        return self.nodes[self.head] if self.head != ROOT else None

    def path(self, node: int) -> list[int]:
        """Indices of the turns from the first one to `node`."""
        found = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def add(self, checkpoint: Checkpoint) -> History:
        """With a turn that goes on from `head`, which becomes the head."""
        node = replace(checkpoint, parent=self.head, root=self.last.root if self.last else len(self.nodes))
        grown = replace(self, nodes=(*self.nodes, node), head=len(self.nodes))
        vars(grown)["messages"] = [*self.messages, *node.messages]  # walking the whole path in every turn would cost more the longer the conversation is
        return grown

    def leaves(self) -> tuple[int, ...]:
        """The last turns of the conversations that are kept, in the order of their answers. A turn that was asked again with the same messages,
        and not continued, is not: the harness did not take that answer."""
        continued = {c.parent for c in self.nodes}
        kept = []
        for i, node in enumerate(self.nodes):
            again = any(n.parent == node.parent and _same(n.appended, node.appended) for n in self.nodes[i + 1:])
            if i not in continued and not again:
                kept.append(i)
        return tuple(kept)

    @property
    def conversations(self) -> list[list[Message]]:
        """The messages of each kept conversation, in the order of `leaves`."""
        return [[m for i in self.path(leaf) for m in self.nodes[i].messages] for leaf in self.leaves()]

    def match(self, request: Sequence[Message], same: Replay = strict) -> Match:
        """What a request with these messages (the whole conversation) continues.

        Linear: the last turn, or the one before it (a retry of the last turn, which also may roll back to the empty history). Anything else
        raises StructureError, cause "history:" and what differs. The first request may bring replies as examples; they are given text. Branching:
        always the deepest turn it holds; replies that were not sampled here are given text. A turn cut by length can be retried, not continued; a
        branch holds it as given text.
        """
        if self._continued_unchanged(request):
            return Match(self, tuple(request[len(self.messages):]))
        node, at, cause, problem = self._walk(request, same)
        if self.branching:
            return self._branch(request, node, at, cause)
        appended = tuple(request[at:])
        foreign = any(m["role"] == "assistant" for m in appended) and not (node == ROOT and self._begins_with_examples(appended, same))
        if cause == "truncated":
            raise StructureError(f"{problem} and cannot be continued", "a turn that ended with a stop token", "end the session, or retry that turn",
                                 cause="history:truncated")
        before_last = self.last.parent if self.last else ROOT
        if not appended or foreign or node not in (self.head, before_last):
            problem = problem or ("it has an assistant message that was not sampled here" if foreign else "it goes back more than one turn, or adds nothing")
            raise StructureError(f"the request does not continue this session: {problem}",
                                 "the stored conversation, or that without its last turn, and new messages of user, tool or system",
                                 "send the replies back unchanged; for another branch open another session",
                                 cause=f"history:{cause or ('foreign-reply' if foreign else 'rewind')}")
        if node == self.head:
            return Match(self, appended)
        return Match(replace(self, nodes=self.nodes[:-1], head=node), appended, "retry")

    def _continued_unchanged(self, request: Sequence[Message]) -> bool:
        """The usual case, known by one comparison: everything up to the last turn is there as it was, and no reply comes after it."""
        held = self.messages
        return (self.last is not None and self.last.turn.finish_reason == "stop" and len(request) > len(held) and request[: len(held)] == held
                and not any(m["role"] == "assistant" for m in request[len(held):]))

    def _begins_with_examples(self, appended: Sequence[Message], same: Replay) -> bool:
        """Whether replies in a first request are a prompt's examples: there was no turn yet, or the turn that is retried had the same."""
        if not self.nodes:
            return appended[-1]["role"] != "assistant"
        last = max(i for i, m in enumerate(appended) if m["role"] == "assistant")
        held = self.nodes[0].appended
        return len(held) > last and len(appended) > last + 1 and not any(same(h, g) for h, g in zip(held[: last + 1], appended, strict=False))

    def _walk(self, request: Sequence[Message], same: Replay) -> tuple[int, int, str, str]:
        """(deepest turn all of whose messages the request holds and has more after, how many messages that are, why not deeper in a word,
        and in a sentence)."""
        children = defaultdict(list)
        for i, c in enumerate(self.nodes):
            children[c.parent].append(i)
        best, frontier = (0, ROOT), [(0, ROOT)]
        stop = (0, "", "")  # the mismatch that is furthest into the request
        while frontier:
            best = max(frontier)
            reached, frontier = frontier, []
            for at, node in reached:
                for child in children[node]:
                    place, word = _first_mismatch(self.nodes[child].messages, request, at, same)
                    if not word and self.nodes[child].turn.finish_reason != "stop":
                        word = "truncated"
                    if not word:
                        frontier.append((place, child))
                    elif word != "short" and place >= stop[0]:
                        stop = (place, word, self._explain(child, at, word, request, place))
        at, node = best
        return node, at, stop[1], stop[2]

    def _explain(self, child: int, start: int, word: str, request: Sequence[Message], place: int) -> str:
        checkpoint = self.nodes[child]
        if word == "truncated":
            return f"the last turn ended by {checkpoint.turn.finish_reason!r}"
        return f"messages[{place}] is {request[place]!r:.160}, the session has {checkpoint.messages[place - start]!r:.160} ({word} differs)"

    def _branch(self, request: Sequence[Message], node: int, at: int, cause: str) -> Match:
        if not request or request[-1]["role"] == "assistant":
            raise StructureError("the request ends with an assistant message", "new messages of user, tool or system at its end", cause="history:nothing-appended")
        while node != ROOT and request[at]["role"] == "assistant":  # a template has no place for two replies in a row
            at -= len(self.nodes[node].messages)
            node = self.nodes[node].parent
            cause = cause or "foreign-reply"
        return Match(replace(self, head=node), tuple(request[at:]), "" if node == self.head else cause or "rewind")


IGNORED_KEYS = frozenset({"refusal", "annotations", "audio", "function_call", "provider_specific_fields", "cache_control"})
"""Keys of a message that clients add and that no chat template reads."""


def check_messages(request: Any, held: Sequence[Message] = ()) -> list[Message]:
    """The request's messages, validated and in one form: content is text (text parts are joined by a newline), `developer` is `system`, keys that
    say nothing are left out. Those that begin with what is `held` already are not looked at again. Raises StructureError (cause "history:message"), and for parts that are no text "request:content-part"."""
    if not isinstance(request, (list, tuple)) or not request:
        raise StructureError(f"messages = {request!r:.80}", "a list with at least one message", cause="history:message")
    known = len(held) if held and request[: len(held)] == held else 0
    return [*held[:known], *(_checked(i, m) for i, m in enumerate(request[known:], known))]


def _checked(i: int, m: Any) -> Message:
    if not isinstance(m, dict) or m.get("role") not in _ROLES:
        raise StructureError(f"messages[{i}] = {m!r:.120}", f"role ({', '.join(_ROLES)}) and content", cause="history:message")
    content, role = m.get("content"), m["role"]
    if role == "developer" or isinstance(content, list) or not IGNORED_KEYS.isdisjoint(m) or (content is None and role == "assistant"):
        m = {k: v for k, v in m.items() if k not in IGNORED_KEYS}
        m["role"] = "system" if role == "developer" else role
        if isinstance(content, list):
            m["content"] = "\n".join(_text_of(i, part) for part in content)
        elif content is None and not m.get("tool_calls"):
            m["content"] = ""
    if not _has_content(m):
        raise StructureError(f"messages[{i}] = {m!r:.120}", "content (text, or text parts); only a reply with tool calls may lack it", cause="history:message")
    return m


def _text_of(i: int, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise StructureError(f"messages[{i}] has a content part of type {kind!r}", 'parts {"type": "text", "text": ...}; this model sees text alone',
                         cause="request:content-part")


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _has_content(message: Message) -> bool:
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is None or calls == []:
        return isinstance(content, str)
    return message["role"] == "assistant" and isinstance(content, str | None) and isinstance(calls, list) and all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) and isinstance(c["function"].get("name"), str) for c in calls)


def _first_mismatch(held: Sequence[Message], request: Sequence[Message], at: int, same: Replay) -> tuple[int, str]:
    """(index in the request, what differs there); (index after them, "") when all are there and more follow; "short" when none follow."""
    for i, h in enumerate(held, at):
        if i >= len(request):
            return len(request), "short"
        word = same(h, request[i])
        if word:
            return i, word
    end = at + len(held)
    return (end, "") if end < len(request) else (len(request), "short")


def _same(a: Sequence[Message], b: Sequence[Message]) -> bool:
    return len(a) == len(b) and not any(strict(x, y) for x, y in zip(a, b, strict=True))
