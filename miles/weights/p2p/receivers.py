"""What a receiver holds of a model: whole tensors, or the share of one process of an engine. Pure.

A rollout rank holds whole tensors, whatever the layout of its engine: all processes of an engine are on the rank's node and load one file, each its share of
it, so a node receives every element once. An `engine_share` is for receivers that stand for one process each.
"""

from __future__ import annotations

from collections.abc import Mapping

from miles.weights.mapping.architecture import Architecture
from miles.weights.mapping.tables import Rule, hf_names, parameters, shard_slices
from miles.weights.p2p.plan import Box, Held, Tensor, box_of

VOCABULARY_ROWS = 64  # SGLang pads the vocabulary to a multiple of this before it splits it (layers/vocab_parallel_embedding.py, 0.5.23)


def whole(tensors: Mapping[str, Tensor]) -> Held:
    """Everything."""
    return {name: tensor.whole for name, tensor in tensors.items()}


def engine_share(arch: Architecture, tensors: Mapping[str, Tensor], *, rank: int, tp: int, ep: int = 1, dp_attention: int = 1) -> Held:
    """What process `rank` of an engine of `tp` processes holds, as SGLang shards models: heads over the tp // dp_attention processes of an attention replica,
    key and value heads repeated where there are fewer; dense layers over all; experts over `ep` groups, and each over the processes of its group;
    rows of the vocabulary over all, counted with their padding."""
    share: dict[str, Box] = {}
    for rule, layer, expert in parameters(arch):
        names = hf_names(rule, layer, expert)
        if rule.axis is None or rule.megatron.endswith("eh_proj.weight"):  # which every process has whole, as it comes before what is split
            share |= {n: tensors[n].whole for n in names}
        elif rule.kind == "vocab":
            (name,) = names
            rows = -(-arch.vocab // VOCABULARY_ROWS) * VOCABULARY_ROWS // tp
            box = tensors[name].whole.common(Box(rank * rows, (rank + 1) * rows, 0, tensors[name].whole.right))
            if box.size:
                share[name] = box
        elif rule.per_expert:
            width = tp // ep
            if expert // (arch.experts // ep) == rank // width:
                share |= _parts(rule, names, tensors, width, rank % width)
        elif "self_attention" in rule.megatron:
            size = tp // dp_attention
            share |= _attention(rule, names, tensors, size, rank % size, arch)
        else:
            share |= _parts(rule, names, tensors, tp, rank)
    return share


def _parts(rule: Rule, names: tuple[str, ...], tensors: Mapping[str, Tensor], size: int, rank: int) -> Held:
    shapes = [tensors[n].shape for n in names]
    return {n: box_of(index, shape) for n, index, shape in zip(names, shard_slices(rule, shapes, size, rank), shapes, strict=True)}


def _attention(rule: Rule, names: tuple[str, ...], tensors: Mapping[str, Tensor], size: int, rank: int, arch: Architecture) -> Held:
    share = dict(_parts(rule, names[:1], tensors, size, rank))
    heads = min(size, arch.groups)  # so many processes, or groups of processes, have key and value heads of their own
    return share | _parts(rule, names[1:], tensors, heads, rank * heads // size)
