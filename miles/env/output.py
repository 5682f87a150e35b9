"""The output of a command as text that is safe to show: bounded, printable, beginning and end kept."""

from __future__ import annotations

import codecs
import re

FLOOD_BYTES = 1 << 20  # a command that has written this much is stopped: nobody will read it
_ESCAPE = re.compile(  # ECMA-48: CSI sequences (colours, cursor), OSC strings (titles), two-character escapes
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# An interactive bash without a terminal says this whenever a child dies of a signal; it is about the shell's set-up, not about the command.
_NO_TERMINAL = re.compile(r"bash: \[\d+: \d+ \(\d+\)\] tcsetattr: Inappropriate ioctl for device(?:\n|\Z)")
_BEGUN = re.compile(r"(?:b|ba|bas|bash|bash:|bash: |bash: \[[^\n]{0,80})\Z")


class Output:
    """Collects bytes as they come; memory is bounded by the limit, not by what is written."""

    def __init__(self, limit: int):
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._head_chars, self._tail_chars = limit - limit // 2, limit // 2
        self._head, self._tail, self._chars = "", "", 0
        self._held = ""  # what may become a remark of the shell's
        self.bytes = 0

    def add(self, data: bytes, final: bool = False) -> None:
        self.bytes += len(data)
        text = self._held + self._decode(data, final)
        begun = None if final else _BEGUN.search(text)
        text, self._held = (text, "") if begun is None else (text[:begun.start()], begun[0])
        text = _NO_TERMINAL.sub("", text)  # before it is counted and cut
        self._chars += len(text)
        room = self._head_chars - len(self._head)
        self._head += text[:room]
        if text[room:]:
            tail = self._tail + text[room:]
            self._tail = tail[len(tail) - self._tail_chars:] if len(tail) > self._tail_chars else tail

    @property
    def flooded(self) -> bool:
        return self.bytes > FLOOD_BYTES

    def text(self) -> tuple[str, bool]:
        """(printable text, whether something was left out)."""
        self.add(b"", final=True)
        left_out = self._chars - len(self._head) - len(self._tail)
        if not left_out:
            return printable(self._head + self._tail), False
        head = printable(self._head)
        return f"{head}{'' if head.endswith(chr(10)) else chr(10)}[{left_out} characters left out]\n{printable(self._tail)}", True


def printable(text: str) -> str:
    """Without terminal control: escape sequences are removed, carriage returns end a line, other control characters become U+FFFD."""
    text = _ESCAPE.sub("", text)
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
