"""`MergedModel`: a reader's host copy of the weights where low-rank adapters alone travel (trainer.lora).

    the model folder, whose weights are frozen  +  the adapters of a version  ->  what the trainer computes with, bit for bit  ->  what the engine loads

A manifest says what its adapters go with: `extra["adapters"]` has the digest of the trainer's frozen weights, which those of the folder must have, the dtype in
which the trainer has them, and the scale of the adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash

from miles.core import StructureError
from miles.weights.adapters import by_weight, fits, merge
from miles.weights.digest import blocks, digest, join
from miles.weights.file_layout import file_layout
from miles.weights.mapping import Rule, hf_names, read_architecture
from miles.weights.mapping.tables import parameters
from miles.weights.mapping.transfer import FLOAT32, SafetensorsFolder
from miles.weights.node import Memory
from miles.weights.parallel import threads
from miles.weights.patch import State
from miles.weights.store import combined_digest


class MergedModel:
    """In one piece of memory, laid out as a safetensors file. The frozen weights are read from the folder again for each version, so there is no second copy of
    them: they are in the page cache, once for all ranks of a node, as long as there is room."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self.memory: Memory | None = None  # in it lies the safetensors file of the state
        self._how: dict[str, Any] = {}  # of the frozen weights in `_state`
        self._frozen: dict[str, str] = {}  # their digests
        self._state: State = {}

    def make(self, how: dict[str, Any], adapters: State) -> State:
        """The weights of a version, of which `adapters` have been verified and `how` is said in the manifest: all Hugging Face tensors of the model. They are good until
        the next call. Raises StructureError: the folder has other weights than the trainer, or the adapters do not fit it."""
        if self._how != how:
            self._how = {}
            self._read(how)
            self._how = how
        pairs = self._pairs(adapters)
        source = SafetensorsFolder(self._folder)  # its slices may be read by several threads, each of which has what it reads

        def one(name: str) -> None:
            a, b = pairs[name]
            out = self._state[name]
            base = source.slice_of(name)[:].to(out.dtype)
            if join([xxhash.xxh3_128_digest(block) for block in blocks(base)]) != self._frozen[name]:  # `digest` would wait for the threads that this is one of
                raise StructureError(f"{name} of {self._folder} is not what it was when this rank read it first", "a model folder that stays as it is during a run",
                                     "restore it; ranks that start again compare all of it with the trainer's", cause="weights:base")
            merge(base, a, b, how["scale"], out)

        for _ in threads().map(one, pairs):
            pass
        return self._state

    def forget(self) -> None:
        """Let go of the memory."""
        self._how, self._state = {}, {}
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def _read(self, how: Mapping[str, Any]) -> None:
        """The frozen weights, into memory that is made for them."""
        source = SafetensorsFolder(self._folder)
        dtypes = {name: "float32" if rule.megatron.endswith(FLOAT32) else how["dtype"] for (rule, _, _), names in self._parameters.items() for name in names}
        described = {name: (dtype, source.slice_of(name).get_shape()) for name, dtype in dtypes.items()}
        if not self._state:
            begin, offsets, size = file_layout(described)
            self.memory = Memory.new(size)
            data = self.memory.map()
            data[:len(begin)] = begin
            self._state = {name: torch.frombuffer(data, dtype=getattr(torch, dtype), offset=offsets[name], count=torch.Size(shape).numel()).view(shape)
                           for name, (dtype, shape) in described.items()}
        for name, tensor in self._state.items():
            tensor.copy_(source.slice_of(name)[:])
        self._frozen = {name: digest(tensor) for name, tensor in self._state.items()}
        found = combined_digest(self._frozen)
        if found != how["base"]:
            raise StructureError(f"the weights of {self._folder} have the digest {found}", f"{how['base']}, that of the weights that the trainer's adapters go with",
                                 "have the same model folder, model.path, on all nodes", cause="weights:base")

    def _pairs(self, adapters: State) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Adapted weight -> its factors."""
        pairs = by_weight(self._parameters.values(), adapters)
        wrong = [name for name, (a, b) in pairs.items() if b is None or not fits(self._state[name], a, b)]
        used = {id(factor) for pair in pairs.values() for factor in pair}
        if wrong := sorted([*wrong, *(name for name, factor in adapters.items() if id(factor) not in used)]):
            raise StructureError(f"adapters that fit no weight of {self._folder}: {wrong[:5]}", "A [rank, in] and B [out, rank] for each weight [out, in] that has them",
                                 "the version is skipped: check what the trainer exports", cause="weights:adapters")
        return pairs

    @cached_property
    def _parameters(self) -> dict[tuple[Rule, int | None, int | None], tuple[str, ...]]:
        """The Hugging Face parts of each weight that the trainer has."""
        return {of: hf_names(*of) for of in parameters(read_architecture(self._folder))}
