"""Messages to token ids: the whole prompt once, afterwards only what is appended. Replies are never rendered nor tokenized again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from miles.core import ConfigError, StructureError
from miles.session.boundary import MARK_PROBES, Boundary, find_rule

Message = dict[str, Any]
"""An OpenAI chat message: at least `role` and `content`."""
Tools = Sequence[dict[str, Any]]
"""OpenAI's `tools` of a request."""

PROBE_USER: Message = {"role": "user", "content": "probe-question"}
PROBE_REPLY = "probe-answer"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def apply_chat_template(self, conversation: list[Message], *, tools: list | None, tokenize: bool, add_generation_prompt: bool) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class ChatTokenizer:
    """Renders and tokenizes for one model.

    Appended messages are rendered together behind a short stand-in conversation, and the text after the stand-in's reply is tokenized. It
    starts with the stop token, a special token at which every tokenizer splits, so its ids are those it has in the whole conversation, and the
    cost depends on what is appended, not on the history. `miles.session.verify` proves it for a template before it is used.
    """

    def __init__(self, tokenizer: Tokenizer, boundary: str = "auto"):
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)  # the Rust tokenizer itself: the wrapper around it costs ten times what it does
        self.boundary: Boundary = find_rule(boundary, self.tail([PROBE_USER]), self._marks)
        self._stops = {s: i for s in self.boundary.stops if (i := self._single(s)) is not None}
        self.stop_ids: tuple[int, ...] = tuple(self._stops.values())
        if self.boundary.stops[0] not in self._stops:
            raise ConfigError(f"boundary rule {self.boundary.name}: {self.boundary.stops[0]!r} is not one token of this vocabulary",
                              "a special token", "use the tokenizer that belongs to the chat template")
        opens = self.boundary.reasoning[0] if self.boundary.reasoning else ""
        self._prompt_opens_reasoning = bool(opens) and self.render([PROBE_USER]).rstrip().endswith(opens)

    @classmethod
    def from_folder(cls, folder: str | Path, boundary: str = "auto") -> ChatTokenizer:
        """Tokenizer and template of a Hugging Face folder. Raises ConfigError when it has none or no rule fits."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as e:
            raise ConfigError(f"no tokenizer in {folder}: {e}", "tokenizer files and a chat template", "set model.path to a whole Hugging Face folder") from e
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer in {folder} has no chat template", "chat_template.jinja or tokenizer_config.json with one", "use a chat model")
        return cls(tokenizer, boundary)

    def first(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Ids of a conversation that starts with these messages, up to where the model answers."""
        return self.encode(self.render(messages, tools=tools))

    def append(self, messages: Sequence[Message], last_id: int, reply: Message | None = None, tools: Tools | None = None) -> list[int]:
        """Ids that follow a reply whose last sampled token is `last_id`, for all messages appended to it, up to where the model answers.

        `reply`: the reply's message; tool results are rendered behind its calls. Raises StructureError (cause "tokenization:merge") where the
        stop token does not stand alone in front of them: its ids then differ from those in context, and nothing may be trained on them; and
        (cause "request:template") where the template writes nothing.
        """
        text = self.tail(messages, reply, tools)
        ids = self.encode(text)
        opening = next((s for s in self.boundary.stops if text.startswith(s)), "")
        if (opening and ids[:1] != [self._stops.get(opening)]) or not (opening or self.boundary.opens_next):
            raise StructureError(f"what follows the reply, {text[:40]!r}, begins with token {ids[:1]}", f"the stop token {opening!r} by itself",
                                 "a special token as stop token; run tools/verify_template on the model's folder", cause="tokenization:merge")
        # The sampled stop token stands for the one the template writes, unless this rule's stop token opens a message and the model opened
        # another kind than the one that came. A turn that a stop text ended has none: the template's is given to it.
        sampled_stop = last_id in self.stop_ids and (ids[0] == last_id or not self.boundary.opens_next)
        new = ids[1:] if sampled_stop else ids
        if not new:  # e.g. DeepSeek's empty system message, which has no header
            raise StructureError(f"the chat template writes nothing for {messages!r:.160}", "messages that the model sees", cause="request:template")
        return new

    def text(self, output_ids: Sequence[int]) -> str:
        """What the model said, without the stop token."""
        ids = list(output_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._decode(ids)

    def text_of(self, token: int) -> str:
        """One token as text."""
        return self._decode([token])

    def split_reasoning(self, text: str) -> tuple[str | None, str]:
        """(reasoning, content) of what the model said. Reasoning that was never closed is all there is; None where the family has none."""
        if self.boundary.reasoning is None:
            return None, text
        opens, closes = self.boundary.reasoning
        before, closed, after = text.partition(closes)
        if closed:
            return before.strip().removeprefix(opens).strip(), after.lstrip("\n")
        if self._prompt_opens_reasoning or text.startswith(opens):
            return text.strip().removeprefix(opens).strip(), ""
        return None, text

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True, tools: Tools | None = None) -> str:
        return self._tokenizer.apply_chat_template([_for_template(m) for m in messages], tools=list(tools) if tools else None, tokenize=False,
                                                   add_generation_prompt=generation_prompt)

    def encode(self, text: str) -> list[int]:
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)

    def tail(self, messages: Sequence[Message], reply: Message | None = None, tools: Tools | None = None) -> str:
        """The text that follows a reply when `messages` are appended to it: the stop token of the template and everything after it."""
        if messages[0]["role"] != "tool":
            return self._after_content([PROBE_USER, _answer(), *messages], tools)
        # Results are rendered behind calls, because templates count them or name them by the calls in front.
        stand_in = [PROBE_USER, {**_answer(), "tool_calls": _calls(messages, reply)}]
        stops = self.boundary.stops
        text, before = self.render([*stand_in, *messages], tools=tools), self.render(stand_in, generation_prompt=False, tools=tools)
        if text.startswith(before):
            return text[len(before) if self.boundary.opens_next else max(before.rfind(s) for s in stops):]
        end = text.find(PROBE_REPLY)  # the last message of a conversation is written in another way, e.g. with empty reasoning
        starts = [at for s in stops if (at := text.find(s, end)) >= 0] if end >= 0 else []
        if not starts:
            raise ConfigError(f"the chat template does not end a reply with calls by {' or '.join(stops)}: {text[-200:]!r}", "one of them", "use another template")
        return text[min(starts):]

    def _after_content(self, messages: Sequence[Message], tools: Tools | None) -> str:
        text = self.render(messages, tools=tools)
        end = text.find(PROBE_REPLY)
        if end < 0:
            raise ConfigError(f"the chat template does not render a reply's content: {text[:200]!r}", "the content of assistant messages as it is",
                              "use another template; this one cannot be continued exactly")
        return text[end + len(PROBE_REPLY):]

    def _marks(self) -> str:
        seen = ""
        for probe in MARK_PROBES:
            try:
                seen += self.render(probe)
            except TemplateError:  # a template without this kind of message does not show its mark
                continue
        return seen

    def _decode(self, ids: list[int]) -> str:
        if self._fast is not None:
            return self._fast.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _single(self, token: str) -> int | None:
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None


def _answer() -> Message:
    return {"role": "assistant", "content": PROBE_REPLY}


def _calls(messages: Sequence[Message], reply: Message | None) -> list[dict[str, Any]]:
    """The reply's calls without their arguments, which may be long and are not rendered again; made up where it has none that parse."""
    calls = (reply or {}).get("tool_calls")
    if calls:
        return [{**c, "function": {"name": c["function"]["name"], "arguments": {}}} for c in calls]
    results = [m for m in messages if m["role"] == "tool"]
    return [{"id": m.get("tool_call_id", f"functions.probe:{i}"), "type": "function", "function": {"name": m.get("name", "probe"), "arguments": {}}}
            for i, m in enumerate(results)]


def _for_template(message: Message) -> Message:
    """As templates want it: content is a string, arguments of calls are a mapping (OpenAI's format has them as JSON text)."""
    calls = message.get("tool_calls")
    if not calls:
        return message if message.get("content") is not None else {**message, "content": ""}
    return {**message, "content": message.get("content") or "", "tool_calls": [{**c, "function": {**c["function"], "arguments": as_mapping(
        c["function"].get("arguments"))}} for c in calls]}


def as_mapping(arguments: Any) -> Any:
    """Arguments of a call as a mapping; {} for none, and what is no JSON object, or one nested too deeply to read, unchanged."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
