"""What the trainer has to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from miles.weights.mapping.architecture import Architecture
from miles.weights.mapping.placement import Key, Place
from miles.weights.mapping.tables import hf_names, parameters
from miles.weights.mapping.transfer import Placement, SafetensorsFolder
from miles.weights.p2p.plan import Tensor


@dataclass(frozen=True)
class Source:
    """`shards` are this rank's own parameters, read again for each version; the rest is the same on every rank."""

    arch: Architecture
    places: Sequence[Place]
    tensors: Mapping[str, Tensor]  # Hugging Face name -> shape, and the trainer's dtype
    shards: Mapping[Key, torch.Tensor]


def source_of(model: list[torch.nn.Module], arch: Architecture, folder: str | Path) -> Source:
    """The source that a rank's model chunks are. folder: of the Hugging Face model, for its shapes. Collective; needs megatron's parallel state."""
    place, shapes, tensors = Placement(arch, model), SafetensorsFolder(folder), {}
    for rule, layer, expert in parameters(arch):
        (dtype,) = place.dtypes([(rule.megatron, layer, expert)])
        for name in hf_names(rule, layer, expert):
            tensors[name] = Tensor(tuple(shapes.slice_of(name).get_shape()), str(dtype).removeprefix("torch."))
    return Source(arch, place.places, tensors, place.local)
