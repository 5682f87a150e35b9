"""Tool calls in a reply, read by SGLang's own parsers. What does not parse as a whole stays content; tokens are never touched."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from miles.core import StructureError
from miles.session.boundary import Boundary

log = logging.getLogger(__name__)


def parse_calls(text: str, tools: Sequence[dict[str, Any]], rule: Boundary, earlier_calls: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """(content, OpenAI's tool_calls) of what a model of this family said; (text, []) where there is no call or one of them does not parse.

    `earlier_calls`: calls in the conversation before, for families that number them. Imports SGLang (seconds) when first called.
    """
    if not text.strip():
        return text, []
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    offered, typed = {t["function"]["name"] for t in tools}, _sglang_tools(tools)
    for name in rule.parsers:
        parser = FunctionCallParser(typed, name)
        if not parser.has_tool_call(text):
            continue
        try:
            content, items = parser.parse_non_stream(text)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:  # a parser meets whatever a model can write
            log.info("%s could not parse a tool call: %s", name, e)
            continue
        calls = [c for i, item in enumerate(items) if item.name in offered and (c := _call(item.name, item.parameters, rule, earlier_calls + i))]
        # Some parsers leave out single calls that do not parse, or name a function that was not offered; others let them through.
        if calls and len(calls) >= max(len(items), text.count(rule.call_mark)):
            return content, calls
    return text, []


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """`tools` of a request, validated; None for none. Raises StructureError (cause "request:tools")."""
    if not tools:
        return None
    ok = isinstance(tools, (list, tuple)) and all(
        isinstance(t, dict) and t.get("type") == "function" and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str) for t in tools)
    if not ok:
        raise StructureError(f"tools = {tools!r:.160}", 'a list of {"type": "function", "function": {"name": ..., "parameters": ...}}', cause="request:tools")
    return list(tools)


def _call(name: str, parameters: str, rule: Boundary, index: int) -> dict[str, Any] | None:
    try:
        if not isinstance(json.loads(parameters or "{}"), dict):
            return None
    except (ValueError, RecursionError):
        return None
    call_id = f"functions.{name}:{index}" if rule.numbered_calls else f"call_{uuid.uuid4().hex[:24]}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parameters or "{}"}}


def _sglang_tools(tools: Sequence[dict[str, Any]]) -> list[Any]:
    from pydantic import ValidationError
    from sglang.srt.entrypoints.openai.protocol import Tool

    try:
        return [Tool.model_validate(t) for t in tools]
    except ValidationError as e:
        raise StructureError(f"tools: {e}", "OpenAI's format", cause="request:tools") from e
