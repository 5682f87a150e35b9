"""Boundary rules: how a chat template joins a sampled reply to what follows it. Data, one row per family of templates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miles.core import ConfigError

THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Boundary:
    """What ends a reply, whether that token belongs to the reply or to the next message, and what a reply of the family is made of.

        chatml   ...content <|im_end|> \\n <|im_start|>user ...     the stop token closes the reply
        glm      ...content <|user|> \\n ...                        the stop token is the one that opens the next message

    The stop token was sampled, so it is already in the session's tokens and must not come a second time.
    """

    name: str
    stops: tuple[str, ...]  # each a single token of the vocabulary; the first is the usual one
    opens_next: bool = False
    marks: tuple[str, ...] = ()  # texts that the rendered `MARK_PROBES` of this family all contain; what `auto` tells families apart by
    reasoning: tuple[str, str] | None = None  # what opens and closes reasoning
    # The template leaves reasoning out of earlier replies when it renders a whole conversation. A session keeps it, as it was sampled: the rule is
    # that what follows a reply does not depend on it, and `miles.session.verify` holds the template to that.
    drops_reasoning: bool = False
    parsers: tuple[str, ...] = ("hermes",)  # SGLang's names of the parsers for this family's tool calls; the first that reads all of a reply's
    call_mark: str = "<tool_call>"  # stands in a reply once for each call, or once for several
    numbered_calls: bool = False  # call ids are functions.NAME:INDEX, counted over the conversation, and the template shows them to the model


RULES = {
    rule.name: rule
    for rule in (  # `auto` takes the first whose stop token and marks fit, so the general ones come last
        Boundary("kimi-k2", ("<|im_end|>",), marks=("<|im_middle|>",), reasoning=THINK, drops_reasoning=True, parsers=("kimi_k2",),
                 call_mark="<|tool_call_begin|>", numbered_calls=True),
        Boundary("deepseek-v3.2", ("<｜end▁of▁sentence｜>",), marks=("<｜User｜>", "</think>"), reasoning=THINK, drops_reasoning=True,
                 parsers=("deepseekv32",), call_mark="<｜DSML｜invoke"),
        Boundary("llama-3", ("<|eot_id|>", "<|eom_id|>"), marks=("<|start_header_id|>",), parsers=("llama3",),
                 call_mark='"parameters"'),
        Boundary("glm", ("<|user|>", "<|observation|>", "<|endoftext|>"), opens_next=True, reasoning=THINK, drops_reasoning=True,
                 parsers=("glm47", "glm45")),  # GLM-4.5, 4.7, 5
        Boundary("qwen3-thinking", ("<|im_end|>",), marks=("<|im_start|>", "</think>"), reasoning=THINK, drops_reasoning=True, parsers=("qwen25",)),
        Boundary("qwen3", ("<|im_end|>",), marks=("<|im_start|>user\n<tool_response>",), parsers=("qwen25",)),  # also Qwen2.5
        Boundary("smollm2", ("<|im_end|>",), marks=("SmolLM",)),
        Boundary("chatml", ("<|im_end|>",)),
    )
}


MARK_PROBES: tuple[list[dict], ...] = (
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [
        {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {}}}]},
     {"role": "tool", "content": "d", "tool_call_id": "functions.f:0"}],
)
"""Conversations that show a family's marks: its default system message, its reasoning, its tool results."""


def find_rule(name: str, after_reply: str, marks_of: Callable[[], str] = str) -> Boundary:
    """The rule `name`, or with "auto" the first one that fits: its stop token is what the template puts after a reply, and its marks are there.

    `after_reply`: the text from the end of a reply on. `marks_of`: gives the rendered `MARK_PROBES`. Raises ConfigError when none fits.
    """
    candidates = list(RULES.values()) if name == "auto" else [RULES[name]]
    fitting = [r for r in candidates if after_reply.startswith(r.stops)]
    if not fitting:
        raise ConfigError(
            f"the chat template puts {after_reply[:40]!r} after a reply", " or ".join(f"{s!r} ({r.name})" for r in candidates for s in r.stops),
            "set model.boundary to the rule of this family, or add one to miles/session/boundary.py",
        )
    if name != "auto" or len(fitting) == 1:
        return fitting[0]
    seen = marks_of()
    return next((r for r in fitting if all(m in seen for m in r.marks)), fitting[-1])
