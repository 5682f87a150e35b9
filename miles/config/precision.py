"""Precision contracts, as a table: the number formats of weights, which trainer may feed which rollout, and which tensors stay in bf16.

Pure data and decisions: no torch, no file. The quantizers that hold to it are in `miles.weights.precision`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from miles.core import ConfigError

Precision = Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4", "int4"]


@dataclass(frozen=True)
class Format:
    """One format of a weight. `block` is [rows, columns] that share a scale (None: no scale), `levels` how many scales apply to an element."""

    name: Precision
    bits: int
    element: str
    block: tuple[int, int] | None = None
    scale: str = ""
    scale_bits: int = 0
    levels: int = 0
    parts: tuple[str, ...] = ("weight",)  # what stands in a checkpoint in place of `weight`, as SGLang loads it

    @property
    def bytes_per_element(self) -> float:
        """With its share of the block's scale; a second scale of the whole tensor counts as nothing."""
        return self.bits / 8 + (self.scale_bits / 8 / (self.block[0] * self.block[1]) if self.block else 0)


FORMATS: dict[str, Format] = {f.name: f for f in (
    Format("fp32", 32, "IEEE binary32"),
    Format("bf16", 16, "bfloat16"),
    Format("fp8", 8, "e4m3", (128, 128), "fp32", 32, 1, ("weight", "weight_scale_inv")),
    Format("mxfp8", 8, "e4m3", (1, 32), "UE8M0", 8, 1, ("weight", "weight_scale_inv")),
    Format("nvfp4", 4, "e2m1", (1, 16), "e4m3, and fp32 for the tensor", 8, 2, ("weight", "weight_scale", "weight_scale_2")),
    Format("int4", 4, "integer -7..7", (1, 32), "bf16", 16, 1, ("weight_packed", "weight_scale", "weight_shape")),
)}

LEGAL = {
    ("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"), ("bf16", "mxfp8"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("bf16", "int4"),
}
"""(trainer, rollout)."""

TRAINED = ("fp32", "bf16")
"""Formats in which the trainer has a forward and a backward; the pairs of the others are contracts that it cannot keep yet."""


def refusal(trainer: str, rollout: str) -> str | None:
    """Why this pair is refused; None for a legal one."""
    if (trainer, rollout) in LEGAL:
        return None
    t, r = FORMATS[trainer], FORMATS[rollout]
    if trainer == "fp32":
        return f"{rollout} rounds what an fp32 trainer computes with, on the rollout side only; fp32 is the reference and goes with itself"
    if t.bits > 8 and r.bits > 8:
        return "the engine would widen weights that the trainer has rounded, and compute in a format in which the trainer never did"
    if r.bits > 8:
        return f"the engine would compute with weights that the trainer's forward never sees: the trainer rounds its own to {trainer}"
    if (trainer, rollout) == ("bf16", "nvfp4"):
        return "4-bit floats with the trainer in bf16 differ by more than importance ratios correct; nvfp4 rollouts need a trainer that rounds alike"
    if trainer == "int4":
        return "int4 is a format of stored weights; no forward and backward in it exist"
    return f"weights rounded to {trainer} and then to {rollout} are rounded twice, on two grids: the engine's are not the trainer's"


# -- what stays in high precision ----------------------------------------------------------------------------------------------
_COMMON = (r"model\.embed_tokens\.", r"lm_head\.", r"norm\.")
_ROUTED = (*_COMMON, r"\.mlp\.gate\.")
_DRAFTING = (*_ROUTED, r"\.eh_proj\.")
_LATENT = (*_DRAFTING, r"\.indexer\.weights_proj\.")
HIGH_PRECISION: dict[str, tuple[str, ...]] = {
    "llama": _COMMON, "qwen3": _COMMON, "qwen3_moe": _ROUTED, "glm4_moe": _DRAFTING, "deepseek_v3": _LATENT, "kimi_k2": _LATENT, "glm_moe_dsa": _LATENT,
}
"""Per family: regular expressions found (re.search) in Hugging Face names of tensors that are never quantized, on neither side."""

_OPTIONAL = {r"lm_head\.", r"\.mlp\.gate\.", r"\.indexer\.weights_proj\.", r"\.eh_proj\."}  # tied heads, dense variants, models without these parts


def high_precision(family: str, given: Iterable[str] = ()) -> tuple[str, ...]:
    """The patterns of a run: the family's own, and the `given` ones besides. Raises ConfigError: an unknown family, or not a regular expression."""
    if family not in HIGH_PRECISION:
        raise ConfigError(f"model_type {family!r} has no list of tensors that stay in high precision", f"one of {', '.join(HIGH_PRECISION)}",
                          "add it to miles/config/precision.py, or use a rollout precision of bf16")
    for pattern in given:
        try:
            re.compile(pattern)
        except re.error as e:
            raise ConfigError(f"model.high_precision: {pattern!r} is no regular expression: {e}", "a Python regular expression", "correct it") from e
    return (*HIGH_PRECISION[family], *given)


def is_quantized(name: str, shape: tuple[int, ...], patterns: Iterable[str]) -> bool:
    """Whether a tensor is quantized: matrices called `*.weight` that no pattern names."""
    return name.endswith(".weight") and len(shape) == 2 and not any(re.search(p, name) for p in patterns)


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that match no name (a slip of the pen, mostly). Those of a family for parts that not all its models have are no slip."""
    names = list(names)
    return [p for p in patterns if p not in _OPTIONAL and not any(re.search(p, n) for n in names)]


def folder_problems(source: Mapping[str, tuple[int, ...]], rollout: Collection[str], format: str, patterns: Iterable[str]) -> list[str]:
    """What the engines' folder (`rollout`: its tensors' names) lacks of, or has beside, what the trainer will send: `source` (name -> shape) in `format`."""
    patterns, suffixes, out = tuple(patterns), FORMATS[format].parts, []
    for pattern in unmatched(patterns, source):
        out.append(f"the high-precision pattern {pattern!r} matches no tensor of the model")
    for name, shape in source.items():
        stem = name.removesuffix("weight")
        quantized = is_quantized(name, shape, patterns)
        missing = [n for n in ([stem + s for s in suffixes] if quantized else [name]) if n not in rollout]
        if missing:
            out.append(f"{name} is sent {f'as {format}' if quantized else 'in high precision'}; the engines' folder has no {', '.join(missing)}")
        if not quantized and name.endswith(".weight"):
            out += [f"{name} is sent in high precision; the engines' folder has {stem + s}" for s in suffixes if s != "weight" and stem + s in rollout]
    return out
