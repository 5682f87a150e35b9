"""Proof by examples that a chat template is append-only: what `ChatTokenizer` appends is what the whole conversation would have had there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jinja2 import TemplateError

from miles.core import ConfigError
from miles.session.tokenize import ChatTokenizer, Message

REPLIES = ("ok", "", "ls -la\ncat a.txt", "naïve – 日本語 🙂", '{"a": [1, 2]}', "a  b\tc")
TEXTS = ("go on", "", "$ cat a.txt\n  indented\n\n", "ß→∞ 🙂\u200d🙂", "<b>not a tag</b> & \\n", " leading space")
ROLES = (("user",), ("tool",), ("system",), ("tool", "tool"), ("user", "user"), ("system", "user"))


def conversations() -> list[list[Message]]:
    """Synthetic conversations, the smallest first: every role and text behind a reply, every reply, three turns, with and without a system message."""
    found: list[list[Message]] = []
    for opening in ([], [_m("system", "You are terse.")]):
        start = [*opening, _m("user", "first question")]
        for roles, text in itertools.product(ROLES, TEXTS):
            found.append([*start, _m("assistant", "ok"), *(_m(r, text) for r in roles)])
        for reply in REPLIES:
            found.append([*start, _m("assistant", reply), _m("user", "go on")])
        for roles in ROLES:
            turn = [_m("assistant", "ls"), *(_m(r, "x") for r in roles)]
            found.append([*start, *turn, *turn, *turn])
    return sorted(found, key=len)


def verify(chat: ChatTokenizer) -> int:
    """Check every synthetic conversation; returns how many were. A kind of message the template itself refuses is left out.

    Raises ConfigError with the smallest failing conversation, as messages, text and tokens.
    """
    checked = 0
    for messages in conversations():
        try:
            difference = first_difference(chat, messages)
        except TemplateError:
            continue
        if difference:
            raise ConfigError(
                f"the chat template is not append-only under the boundary rule {chat.boundary.name!r}\n  smallest failing conversation:\n"
                + "\n".join(f"    {m['role']}: {m['content']!r}" for m in messages) + f"\n  {difference}",
                "appended messages that read and tokenize the same whatever stands before them",
                "set model.boundary to the rule of this family, or use a template without look-back",
            )
        checked += 1
    if not checked:
        raise ConfigError("the chat template refuses every synthetic conversation", "a template for user and assistant messages", "use another template")
    return checked


def first_difference(chat: ChatTokenizer, messages: Sequence[Message]) -> str:
    """Empty when the conversation, put together turn by turn, equals the one rendered whole; otherwise what differs first."""
    end = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    text = chat.render(messages[:end])
    while end < len(messages):
        reply = messages[end]["content"]
        nxt = next((i for i in range(end + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        appended = messages[end + 1: nxt]
        whole = chat.render(messages[:nxt])
        before = text + reply
        tail = whole[len(before):]
        if not whole.startswith(before):
            return f"text before the appended messages changed:\n    put together: {before!r}\n    whole:        {whole!r}"
        closed = tail.startswith(chat.boundary.stops)  # not so where a message opens with a token the model does not stop at (GLM's system)
        if not closed and not chat.boundary.opens_next:
            return f"no stop token after the reply, but {tail[:40]!r}"
        expected = chat.encode(whole)[-len(chat.encode(tail)) + closed:]
        ids = chat.append(appended, chat.encode(tail)[0] if closed else chat.stop_ids[0])
        if ids != expected:
            return f"appended tokens differ:\n    put together: {ids}\n    in context:   {expected} {tail!r}"
        text, end = whole, nxt
    return ""


def _m(role: str, content: str) -> Message:
    return {"role": role, "content": content}
