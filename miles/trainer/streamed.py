"""megatron-core's distributed optimizer with its state on disk: see miles.optim.

Reduction of gradients, clipping and the gathering of parameters stay megatron's; main parameters and moments are nowhere in memory but in the buckets of
a step. In a checkpoint each rank's files lie beside megatron's, copied from a snapshot while training goes on, so that taking one needs the memory of a
block; a rank that loads, resident or streamed, reads its elements from them, whatever the layouts are (`restore`). A streamed optimizer also goes on from a
checkpoint of resident state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from miles.optim import SavedFile, SavedState, SavedTensor, StreamedAdam, file_names
from miles.weights.mapping import Architecture, Shard, shards_of
from miles.weights.mapping.tables import join, shard_slices, split


class StreamedDistributedOptimizer(DistributedOptimizer):
    """Made of a DistributedOptimizer by `stream`."""

    def _copy_main_params_to_model_params(self):
        """Nothing: the step has written each bucket into the model parameters."""

    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        self._loaded[_main(self, model_param)] = [tensors[name].view(-1) for name in ("param", "exp_avg", "exp_avg_sq")]

    def load_parameter_state_from_fully_reshardable(self, state_dict):
        self._loaded: dict[torch.Tensor, list[torch.Tensor]] = {}
        super().load_parameter_state_from_fully_reshardable(state_dict)
        self.optimizer.replace(lambda p, start, n: [t[start:start + n] for t in self._loaded[p]])
        del self._loaded


def stream(part: DistributedOptimizer, folder: Path, shards: dict[torch.Tensor, Shard], **options) -> None:
    """Move the state of one distributed optimizer, before its first step, to files in `folder`. shards: what this rank's parameters are. `options` are those of
    StreamedAdam.

    Raises EnvironmentFault: the folder is unfit for that (check_folder).
    """
    targets = {main: model for mains, models in zip(part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True)
               for main, model in zip(mains, models, strict=True)}
    mains = [p for group in part.optimizer.param_groups for p in group["params"]]
    origins = {o.main: (xxhash.xxh3_64_intdigest(f"{o.shard.names} {o.shard.index}".encode()), o.start) for o in _owned(part, shards)}
    part.optimizer = StreamedAdam(part.optimizer.param_groups, [targets.get(p, p).detach() for p in mains], folder, origins=[origins[p] for p in mains], **options)
    part.__class__ = StreamedDistributedOptimizer  # megatron's factory has no place for another class
    for p in targets:
        p.untyped_storage().resize_(0)


def is_streamed(optimizer) -> bool:
    return isinstance(optimizer.chained_optimizers[0], StreamedDistributedOptimizer)


# -- checkpoints ------------------------------------------------------------------------------------------------------------------
def begin_saving(folder: Path, name: str, optimizer, chunks: list, arch: Architecture) -> Callable[[], list[Path]]:
    """Collective. Take snapshots now; what is returned copies them into `folder`, in files of this name, beside training, and says which these are."""
    shards, rank, copies = shards_of(chunks, arch), dist.get_rank(), []
    for i, part in enumerate(optimizer.chained_optimizers):
        owned = {o.main: o for o in _owned(part, shards)}
        tensors = [SavedTensor(o.shard.names, o.shard.index, o.shard.of, o.shape, o.start, p.numel()) for p in part.optimizer.parameters for o in (owned[p],)]
        state, described = (folder / file for file in file_names(name, rank, i))
        layout = part.optimizer.store.layout
        copies.append((part.optimizer.store.snapshot(), state, described, SavedFile(layout.bucket, layout.moments, tensors)))

    def copy() -> list[Path]:
        written = []
        for snapshot, state, described, what in copies:
            snapshot.copy(state)
            described.write_bytes(msgspec.json.encode(what))
            written += [state, described]
        for path in written:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        return written

    return copy


@torch.no_grad()
def restore(folder: Path, name: str, optimizer, chunks: list, arch: Architecture) -> None:
    """Collective. Main parameters and moments of this rank, from the streamed state of this name in a checkpoint of any layout. Raises EnvironmentFault: not all there."""
    shards = shards_of(chunks, arch)
    with SavedState(folder, name) as saved:
        for part in optimizer.chained_optimizers:
            owned = {o.main: o for o in _owned(part, shards)}
            source = _Source(saved, arch)
            if isinstance(part, StreamedDistributedOptimizer):
                part.optimizer.replace(lambda p, start, n, owned=owned, source=source: source.read(owned[p], start, n))
                continue
            for o in owned.values():
                values = source.read(o, 0, o.main.numel())
                part._set_main_param_and_optimizer_states(o.model, dict(zip(("param", "exp_avg", "exp_avg_sq"), values, strict=True)))


class _Owned(NamedTuple):
    """Elements of a parameter whose state this rank has."""

    main: torch.Tensor
    model: torch.Tensor
    shard: Shard
    shape: tuple[int, ...]  # of the parameter here
    start: int  # first of them, flat


def _owned(part: DistributedOptimizer, shards: dict[torch.Tensor, Shard]) -> Iterator[_Owned]:
    for model in part.model_param_group_index_map:
        start = part._get_model_param_range_map(model)["param"].start
        yield _Owned(_main(part, model), model, shards[model], tuple(model.shape), start)


def _main(part: DistributedOptimizer, model_param: torch.Tensor) -> torch.Tensor:
    group, order = part.model_param_group_index_map[model_param]
    return part.optimizer.param_groups[group]["params"][order]


class _Source:
    """State of this layout's shards out of that of another. Holds one parameter of those that were cut in another way."""

    def __init__(self, saved: SavedState, arch: Architecture):
        self._saved, self._arch = saved, arch
        self._held: tuple[tuple[str, ...], list[torch.Tensor]] = ((), [])

    def read(self, o: _Owned, start: int, count: int) -> list[torch.Tensor]:
        """Main value and moments of elements [start, start + count) of those that this rank has."""
        of, shape = self._saved.shards(o.shard.names)
        start += o.start
        if (of, shape) == (o.shard.of, o.shape):
            return self._saved.read(o.shard.names, o.shard.index, start, count)
        if self._held[0] != o.shard.names:
            self._held = (o.shard.names, self._cut_anew(o, of, shape))
        return [t[start:start + count] for t in self._held[1]]

    def _cut_anew(self, o: _Owned, of: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
        rule, size = o.shard.rule, torch.Size(shape).numel()
        found = []
        for pieces in zip(*(self._saved.read(o.shard.names, i, 0, size) for i in range(of)), strict=True):
            parts = split(rule, [p.view(shape) for p in pieces], self._arch)
            wanted = shard_slices(rule, [tuple(p.shape) for p in parts], o.shard.of, o.shard.index)
            found.append(join(rule, [p[index] for p, index in zip(parts, wanted, strict=True)], self._arch, o.shape[0]).reshape(-1))
        return found
