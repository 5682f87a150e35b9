"""Which tensors a version of a run must have: those that the trainer exports (miles.weights.mapping.tables), under the names that engines load."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from miles.config import MilesConfig
from miles.config.precision import FORMATS
from miles.weights.mapping.architecture import Adapters, read_architecture
from miles.weights.mapping.tables import hf_names, parameters


def required_tensors(config: MilesConfig, known: Collection[str]) -> frozenset[str]:
    """With trainer.lora the adapters. Otherwise names of `known`, the tensors of the engines' folder: a weight by all the parts that it has there in the
    rollout's format, the draft layer only where it is trained, and nothing that the trainer never has (a tied output layer, buffers). Reads config.json of
    model.path. Raises ConfigError like `read_architecture`."""
    lora = config.trainer.lora
    arch = read_architecture(config.model.path, draft=config.trainer.mtp is not None)
    if lora is not None:
        arch = replace(arch, adapters=Adapters(lora.rank, lora.alpha, lora.targets))
        return frozenset(name for rule, *of in parameters(arch) if rule.factor for name in hf_names(rule, *of))
    parts, out = FORMATS[config.model.rollout_precision].parts, set()
    for name in (name for rule, *of in parameters(arch) for name in hf_names(rule, *of)):
        out.add(name)
        if name.endswith(".weight"):
            out.update(name.removesuffix("weight") + part for part in parts)
    return frozenset(out & set(known))
