"""Proof by examples that a chat template is append-only: what `ChatTokenizer` appends is what the whole conversation would have had there."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence

from jinja2 import TemplateError

from miles.core import ConfigError, StructureError
from miles.session.tokenize import ChatTokenizer, Message

REPLIES = ("ok", "", "ls -la\ncat a.txt", "naïve – 日本語 🙂", '{"a": [1, 2]}', "a  b\tc")
TEXTS = ("go on", "", "$ cat a.txt\n  indented\n\n", "ß→∞ 🙂\u200d🙂", "<b>not a tag</b> & \\n", " leading space", "\ttab", "\r\nline")
ROLES = (("user",), ("tool",), ("system",), ("tool", "tool"), ("user", "user"), ("system", "user"), ("tool", "user"))
ARGUMENTS = ({}, {"path": "a.txt"}, {"deep": {"list": [1, {"k": None}], "text": 'quote " and \\ and \n'}, "n": 1.5}, {"ключ": "日本語 🙂"})
TOOLS = [{"type": "function", "function": {"name": name, "description": "a tool", "parameters": {"type": "object", "properties": {
    "path": {"type": "string"}}}}} for name in ("run", "read_file")]
LONG = "0123456789 abcdef\n" * 600  # one very long turn, 10,800 characters
RANDOM = 150  # random conversations, always the same ones


def conversations(*, reasoning: bool = False) -> list[list[Message]]:
    """Synthetic conversations, the smallest first: every role and text behind a reply, every reply, tool calls with their results, reasoning
    (where `reasoning`), very long turns, and random mixtures. Two of them may share all but their last messages, as a retry does."""
    found: list[list[Message]] = []
    for opening in ([], [_m("system", "You are terse.")]):
        start = [*opening, _m("user", "first question")]
        for roles, text in itertools.product(ROLES, TEXTS):
            found.append([*start, *_turn(roles, [text], _m("assistant", "ok"))])
        for reply in REPLIES:
            found.append([*start, _m("assistant", reply), _m("user", "go on")])
        for roles in ROLES:
            found.append([*start, *(_turn(roles, ["x"], _m("assistant", "ls")) * 3)])
        for arguments, calls in itertools.product(ARGUMENTS, (1, 3)):
            found.append([*start, *_turn(("tool",) * calls, ["out"], _m("assistant", "ok"), arguments)])
        for roles in (("user",), ("tool",)) if reasoning else ():
            found.append([*start, *(_turn(roles, ["x"], {**_m("assistant", "ls"), "reasoning_content": "because"}) * 3)])
    found += [[_m("user", LONG), _m("assistant", "ok"), _m("user", "go on")], [_m("user", "a"), _m("assistant", "ok"), _m("user", LONG)]]
    rng = random.Random(0)
    found += [_random_conversation(rng, reasoning) for _ in range(RANDOM)]
    return sorted(found, key=_size)


def _random_conversation(rng: random.Random, reasoning: bool) -> list[Message]:
    text = lambda: rng.choice([*TEXTS, "".join(rng.choices("ab \n\té日🙂{}<|>\"'\\", k=rng.randrange(12)))])
    messages = [_m("system", text())] * rng.randrange(2) + [_m("user", text())]
    for _ in range(rng.randrange(1, 5)):
        reply = _m("assistant", rng.choice(REPLIES))
        if reasoning and rng.random() < 0.5:
            reply["reasoning_content"] = rng.choice(("because", "first\n\nthen", "é日🙂"))
        roles = rng.choice(ROLES)
        messages += _turn(roles, [text() for _ in roles], reply, rng.choice(ARGUMENTS))
    return messages


def verify(chat: ChatTokenizer) -> int:
    """Check every synthetic conversation; returns how many were. A kind of message the template itself refuses is left out.

    Raises ConfigError with the smallest failing conversation, as messages, text and tokens.
    """
    checked = 0
    for messages in conversations(reasoning=chat.boundary.reasoning is not None):
        difference = _difference(chat, messages)
        if difference:
            messages, difference = _shrink(chat, messages, difference)
            raise ConfigError(
                f"the chat template is not append-only under the boundary rule {chat.boundary.name!r}\n  smallest failing conversation:\n"
                + "\n".join(f"    {_show(m)}" for m in messages) + f"\n  {difference}",
                "appended messages that read and tokenize the same whatever stands before them",
                "set model.boundary to the rule of this family, or use a template without look-back",
            )
        checked += difference is not None
    if not checked:
        raise ConfigError("the chat template refuses every synthetic conversation", "a template for user and assistant messages", "use another template")
    return checked


def first_difference(chat: ChatTokenizer, messages: Sequence[Message]) -> str:
    """Empty when the conversation, put together turn by turn, equals the one rendered whole; otherwise what differs first.

    Under a rule whose template drops earlier reasoning, reasoning is left out of the comparison of what stands before the appended messages;
    the appended messages themselves must be equal to the letter and to the token.
    """
    end = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    tools = TOOLS if any(m.get("tool_calls") for m in messages) else None
    text = chat.render(messages[:end], tools=tools)
    while end < len(messages):
        reply = messages[end]
        nxt = next((i for i in range(end + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        appended = messages[end + 1: nxt]
        whole, tail = chat.render(messages[:nxt], tools=tools), chat.tail(appended, reply, tools)
        if not whole.endswith(tail):
            return _two("appended text differs", chat, tail, whole[-len(tail):])
        head, before = whole[: len(whole) - len(tail)], text + _sampled(chat, reply)
        same = _without_reasoning(chat, head) == _without_reasoning(chat, before)
        if reply.get("tool_calls"):  # how calls are written is the model's affair; what stands before them must not change
            same = _without_reasoning(chat, head).startswith(_without_reasoning(chat, text)) and not any(s in head[len(text):] for s in chat.boundary.stops)
        if not same:
            return _two("text before the appended messages changed", chat, before, head)
        expected = chat.encode(whole)
        alone = chat.encode(tail)
        if expected[-len(alone):] != alone:
            return f"appended tokens differ:\n    put together: {alone[:40]}\n    in context:   {expected[-len(alone):][:40]} {_cut(tail)}"
        closed = tail.startswith(chat.boundary.stops)  # not so where a message opens with a token the model does not stop at (GLM's system)
        try:
            ids = chat.append(appended, alone[0] if closed else chat.stop_ids[0], reply, tools)
        except StructureError as e:
            if e.cause == "request:template":  # nothing is written for these messages: the session refuses them
                return ""
            return str(e)
        if ids != alone[closed:]:
            return f"the stop token is counted twice or not at all:\n    put together: {ids[:40]}\n    in context:   {alone[:40]} {_cut(tail)}"
        text, end = whole, nxt
    return ""


def _difference(chat: ChatTokenizer, messages: Sequence[Message]) -> str | None:
    try:
        return first_difference(chat, messages)
    except TemplateError:
        return None


def _shrink(chat: ChatTokenizer, messages: list[Message], difference: str) -> tuple[list[Message], str]:
    """The smallest conversation found by leaving out messages and shortening their texts that still fails."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(messages):
            found = _difference(chat, candidate)
            if found:
                messages, difference, smaller = candidate, found, True
                break
    return messages, difference


def _smaller(messages: list[Message]) -> Iterator[list[Message]]:
    for i in range(len(messages)):
        fewer = messages[:i] + messages[i + 1:]
        roles = [m["role"] for m in fewer]
        if "assistant" in roles[1:] and roles[-1] != "assistant" and ("assistant", "assistant") not in itertools.pairwise(roles) and roles[0] != "tool":
            yield fewer
    for i, m in enumerate(messages):
        plain = {k: v for k, v in m.items() if k not in ("tool_calls", "reasoning_content", "tool_call_id")}
        if plain != m:
            yield [*messages[:i], plain, *messages[i + 1:]]
        for content in ("", "a"):
            if len(content) < len(m["content"]):
                yield [*messages[:i], {**m, "content": content}, *messages[i + 1:]]


def _turn(roles: Sequence[str], texts: Sequence[str], reply: Message, arguments: dict | None = None) -> list[Message]:
    """A reply and what is appended to it; with calls in the reply where tool results come."""
    results = [i for i, r in enumerate(roles) if r == "tool"]
    appended = [_m(r, texts[i % len(texts)]) for i, r in enumerate(roles)]
    if not results:
        return [reply, *appended]
    names = [f["function"]["name"] for f in TOOLS]
    calls = []
    for i in results:
        name = names[i % len(names)]
        call_id = f"functions.{name}:{i}"
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}})
        appended[i] = {**appended[i], "tool_call_id": call_id}
    return [{**reply, "tool_calls": calls}, *appended]


def _sampled(chat: ChatTokenizer, reply: Message) -> str:
    """The reply as the model of this family writes it, as far as that can be known without its calls."""
    reasoning = reply.get("reasoning_content")
    if reasoning and chat.boundary.reasoning:
        opens, closes = chat.boundary.reasoning
        return f"{opens}{reasoning}{closes}{reply['content']}"
    return reply["content"]


def _without_reasoning(chat: ChatTokenizer, text: str) -> str:
    if not (chat.boundary.drops_reasoning and chat.boundary.reasoning):
        return text
    opens, closes = (re.escape(x) for x in chat.boundary.reasoning)
    closed = re.sub(rf"{opens}(?:(?!{opens}|{closes}).)*{closes}\s*", "", text, flags=re.DOTALL)
    return re.sub(rf"(?:{opens}|{closes})\s*", "", closed)  # what a prompt opened, or a template closed, around nothing


def _two(what: str, chat: ChatTokenizer, together: str, whole: str) -> str:
    """Both texts, with their tokens from a little before they part."""
    a, b = chat.encode(together), chat.encode(whole)
    at = max(next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) - 3, 0)
    return (f"{what}:\n    put together: {_cut(together)}\n      tokens from {at}: {a[at: at + 16]}\n"
            f"    whole:        {_cut(whole)}\n      tokens from {at}: {b[at: at + 16]}")


def _size(messages: Sequence[Message]) -> tuple[int, int]:
    return len(messages), sum(len(str(m)) for m in messages)


def _show(message: Message) -> str:
    more = "".join(f" {k}={message[k]!r:.200}" for k in ("reasoning_content", "tool_calls") if message.get(k))
    return f"{message['role']}: {_cut(message['content'])}{more}"


def _cut(text: str) -> str:
    return repr(text) if len(text) <= 400 else f"{text[:200]!r} ... {text[-200:]!r}"


def _m(role: str, content: str) -> Message:
    return {"role": role, "content": content}
