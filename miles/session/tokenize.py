"""Messages to token ids: the whole prompt once, afterwards only what is appended. Replies are never rendered nor tokenized again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from miles.core import ConfigError
from miles.session.boundary import Boundary, find_rule

Message = dict[str, Any]
"""An OpenAI chat message: at least `role` and `content`."""

PROBE_USER: Message = {"role": "user", "content": "probe-question"}
PROBE_REPLY = "probe-answer"
PROBE: tuple[Message, ...] = (PROBE_USER, {"role": "assistant", "content": PROBE_REPLY})


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def apply_chat_template(self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool) -> str: ...
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
        self.boundary: Boundary = find_rule(boundary, self._after_probe_reply((PROBE_USER,)))
        self.stop_ids: tuple[int, ...] = tuple(i for s in self.boundary.stops if (i := self._single(s)) is not None)
        if not self.stop_ids or self._single(self.boundary.stops[0]) is None:
            raise ConfigError(f"boundary rule {self.boundary.name}: {self.boundary.stops[0]!r} is not one token of this vocabulary",
                              "a special token", "use the tokenizer that belongs to the chat template")

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

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation that starts with these messages, up to where the model answers."""
        return self.encode(self.render(messages))

    def append(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Ids that follow a reply whose last sampled token is `last_id`, for all messages appended to it, up to where the model answers."""
        ids = self.encode(self._after_probe_reply(messages))
        # ids[0] is the stop token the template writes. The sampled one stands for it, unless this rule's stop token opens a message and
        # the model opened another kind than the one that came.
        if ids[0] == last_id or not self.boundary.opens_next:
            return ids[1:]
        return ids

    def text(self, output_ids: Sequence[int]) -> str:
        """What the model said, without the stop token."""
        ids = list(output_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        return self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _after_probe_reply(self, messages: Sequence[Message]) -> str:
        text = self.render([*PROBE, *messages])
        end = text.find(PROBE_REPLY)
        if end < 0:
            raise ConfigError(f"the chat template does not render a reply's content: {text[:200]!r}", "the content of assistant messages as it is",
                              "use another template; this one cannot be continued exactly")
        return text[end + len(PROBE_REPLY):]

    def _single(self, token: str) -> int | None:
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None
