"""Boundary rules: how a chat template joins a sampled reply to what follows it. Data, one row per family of templates."""

from __future__ import annotations

from dataclasses import dataclass

from miles.core import ConfigError


@dataclass(frozen=True)
class Boundary:
    """What ends a reply, and whether that token belongs to the reply or to the next message.

        chatml   ...content <|im_end|> \\n <|im_start|>user ...     the stop token closes the reply
        glm      ...content <|user|> \\n ...                        the stop token is the one that opens the next message

    The stop token was sampled, so it is already in the session's tokens and must not come a second time.
    """

    name: str
    stops: tuple[str, ...]  # each a single token of the vocabulary; the first is the usual one
    opens_next: bool


RULES = {
    rule.name: rule
    for rule in (
        Boundary("chatml", ("<|im_end|>",), opens_next=False),  # Qwen2, Qwen3, SmolLM2
        Boundary("glm", ("<|user|>", "<|observation|>", "<|endoftext|>"), opens_next=True),  # GLM-4.5, 4.7, 5
    )
}


def find_rule(name: str, after_reply: str) -> Boundary:
    """The rule `name`, or with "auto" the one whose stop token the template puts after a reply. `after_reply`: the text from there on.

    Raises ConfigError when the template puts something else there.
    """
    candidates = list(RULES.values()) if name == "auto" else [RULES[name]]
    for rule in candidates:
        if after_reply.startswith(rule.stops):
            return rule
    raise ConfigError(
        f"the chat template puts {after_reply[:40]!r} after a reply", " or ".join(f"{s!r} ({r.name})" for r in candidates for s in r.stops),
        "set model.boundary to the rule of this family, or add one to miles/session/boundary.py",
    )
