"""A reply while it is sampled: which parts of its message are already certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from miles.core import StructureError
from miles.session.tokenize import ChatTokenizer


class ReplyStream:
    """Turns tokens into deltas of `reasoning_content` and `content` whose sum is the final message, exactly.

    Only what no later token can change is sent: nothing of a mark (end of reasoning, tool call, stop text) that may have begun, no white space at the
    end, no half of a character. Where tools are offered content is held back from the first mark of a call on; for a family whose calls have no
    mark of their own, altogether.
    """

    def __init__(self, chat: ChatTokenizer, stop: Sequence[str], tools: bool, on_delta: Callable[[dict[str, str]], None]):
        self._chat, self._tools, self._on_delta = chat, tools, on_delta
        rule = chat.boundary
        self._call_mark = rule.call_mark if rule.call_mark.startswith("<") else ""
        self._reasoning = rule.reasoning or ()
        self._ends = [*stop, *([self._call_mark] if tools and self._call_mark else [])]  # from here on only the whole reply decides
        self._sent = {"reasoning_content": "", "content": ""}
        self.restart()

    def restart(self) -> None:
        """The reply is sampled anew. Only while nothing was sent."""
        self._text, self._over = "", False  # what the first `_read` tokens say, which no later one changes; whether an end is in it
        self._base = self._read = self._searched = 0  # tokens before `_base` are not decoded again; characters in which no end was found

    @property
    def started(self) -> bool:
        """Whether anything was sent."""
        return any(self._sent.values())

    def feed(self, output_ids: Sequence[int]) -> None:
        """All tokens sampled so far."""
        if self._over:
            return
        text = self._decoded(output_ids)
        held = max((_overlap(text, mark) for mark in (*self._ends, *self._reasoning)), default=0)
        certain = text[: len(text) - held].rstrip("\ufffd").rstrip()
        self._over = any(certain.find(mark, max(0, self._searched - len(mark))) >= 0 for mark in self._ends)
        if self._over:
            return
        self._searched = len(certain)
        reasoning, content = self._chat.split_reasoning(certain)
        undecided = self._reasoning and reasoning is None  # it may still be closed, and then all before was reasoning
        parsed = self._tools and (not self._call_mark or content[:1].isspace())  # a parser decides what of it is content
        self._send({"reasoning_content": reasoning or "", "content": "" if undecided or parsed else content})

    def _decoded(self, output_ids: Sequence[int]) -> str:
        """Their text. Decoded are those since the last but one whole character that ended a call: a tokenizer may write a token in another way when it is
        the first, and half a character in another way when the rest of it comes."""
        before = self._chat.text(output_ids[self._base: self._read])
        new = self._chat.text(output_ids[self._base:])[len(before):]
        if not new or new.endswith("\ufffd") or output_ids[-1] in self._chat.stop_ids:
            return self._text + new
        self._text, self._base, self._read = self._text + new, self._read, len(output_ids)
        return self._text

    def finish(self, message: dict) -> None:
        """The rest, when the whole reply is known. Raises StructureError where it is not what was sent."""
        whole = {k: message.get(k) or "" for k in self._sent}
        for key, sent in self._sent.items():
            if not whole[key].startswith(sent):
                raise StructureError(f"the reply's {key} is {whole[key]!r:.160}, but {sent!r:.160} was streamed", "a beginning of it",
                                     "keep the reply; ask without `stream`", cause="stream:differs")
        self._send(whole)

    def _send(self, said: dict[str, str]) -> None:
        for key, text in said.items():
            new = text[len(self._sent[key]):]
            if new:
                self._sent[key] = text
                self._on_delta({key: new})


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
