"""A stream of Hugging Face tensors in high precision -> the same in the engine's format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from miles.config import MilesConfig
from miles.config.precision import high_precision, is_quantized
from miles.core import StructureError
from miles.weights.patch import Tensors
from miles.weights.precision import fp8_block, int4, mxfp8, nvfp4

QUANTIZERS: dict[str, ModuleType] = {"fp8": fp8_block, "mxfp8": mxfp8, "nvfp4": nvfp4, "int4": int4}


@dataclass(frozen=True)
class Export:
    """What goes to the engines: `format` for matrices that no pattern of `keep` names, everything else as it comes."""

    format: str
    keep: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: MilesConfig, family: str) -> Export:
        """That of a run. Raises ConfigError: a family without a list of what is not quantized, when something is."""
        m = config.model
        return cls(m.rollout_precision, high_precision(family, m.high_precision) if m.rollout_precision in QUANTIZERS else ())

    def __call__(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a weight come right after each other. Raises StructureError: a weight that the format cannot hold, named."""
        for name, tensor in tensors:
            if self.format not in QUANTIZERS or not is_quantized(name, tuple(tensor.shape), self.keep):
                yield name, tensor
                continue
            try:
                parts = QUANTIZERS[self.format].quantize(tensor)
            except StructureError as e:
                raise StructureError(f"{name}: {e.found}", e.expected, e.do, cause=e.cause) from e
            stem = name.removesuffix("weight")
            yield from ((stem + suffix, part) for suffix, part in parts.items())
