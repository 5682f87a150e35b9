"""Whether a message that a harness sends back is the one the session holds. Pure.

Tokens never depend on the answer: the session keeps those that were sampled. It decides only whether a request continues this conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from miles.core import EnvironmentFault
from miles.core.functions import load_function

Message = dict[str, Any]
Replay = Callable[[Message, Message], str]
"""(held, given) -> "" where they are the same message, otherwise what differs, in a word that mismatches are counted by."""


def strict(held: Message, given: Message) -> str:
    """Every key and value equal; a key without a value, and empty content, count as absent."""
    return "" if held is given or held == given else _difference(_comparable(held), _comparable(given))


def loose(held: Message, given: Message) -> str:
    """Like `strict`, but arguments of tool calls are compared as JSON (empty text is no arguments), and reasoning may be left out."""
    if held is given or held == given:
        return ""
    a, b = _comparable(held), _comparable(given)
    if "reasoning_content" not in b:
        a.pop("reasoning_content", None)
    for m in (a, b):
        if isinstance(m.get("tool_calls"), list):
            m["tool_calls"] = [_canonical_call(c) for c in m["tool_calls"]]
    return _difference(a, b)


def load_replay(name: str) -> Replay:
    """`strict`, `loose`, or a user's `package.module.function(held, given) -> bool`. Raises ConfigError when there is no such function."""
    if name in NAMED:
        return NAMED[name]
    same = load_function("rollout.replay", name, NAMED, "a function of two messages")

    def users(held: Message, given: Message) -> str:
        try:
            return "" if same(held, given) else strict(held, given) or "function"
        except Exception as e:
            raise EnvironmentFault(f"the replay function {name} failed: {e!r}", "True or False", "correct the function") from e

    return users


NAMED: dict[str, Replay] = {"strict": strict, "loose": loose}


def _comparable(message: Message) -> Message:
    return {k: v for k, v in message.items() if v is not None and not (k in ("content", "tool_calls") and not v)}


def _canonical_call(call: Any) -> Any:
    """A call with its arguments in one spelling. `index` belongs to streaming, not to the call."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function, given = call["function"], call["function"].get("arguments")
    try:
        # As text, because Python holds true and 1 for equal.
        arguments = json.dumps(json.loads(given) if isinstance(given, str) and given else given or {}, sort_keys=True)
    except (ValueError, RecursionError):
        arguments = given
    return {**{k: v for k, v in call.items() if k != "index"}, "function": {**function, "arguments": arguments}}


def _difference(held: Message, given: Message) -> str:
    if held == given:
        return ""
    different = {k for k in held.keys() | given.keys() if held.get(k) != given.get(k)}
    if "tool_calls" in different and _without_arguments(held) == _without_arguments(given):
        return "arguments"
    if different == {"reasoning_content"} and "reasoning_content" not in given:
        return "reasoning-dropped"
    named = {"role": "role", "content": "content", "tool_calls": "tool-calls", "reasoning_content": "reasoning"}
    return next((word for key, word in named.items() if key in different), "fields")


def _without_arguments(message: Message) -> Any:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return None
    return [{**c, "function": {**c["function"], "arguments": None}} if isinstance(c, dict) and isinstance(c.get("function"), dict) else c for c in calls]
