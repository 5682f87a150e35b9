"""Moving weights between a Hugging Face folder and the ranks of a megatron-core model.

Loading: every rank reads only its slices, straight from safetensors. Export: every parameter is owned by the ranks that hold its
shards in the first data-parallel replica; they send them to rank 0 point to point, in buckets of bounded size, in an order that
follows from the architecture alone. So no rank ever holds more than one bucket beside its own model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from miles.core import ConfigError, StructureError
from miles.weights.mapping.architecture import Architecture
from miles.weights.mapping.placement import Key, Place, holders
from miles.weights.mapping.tables import FACTORS, VALUE_HEAD, Rule, find_rule, hf_names, join, parameters, rules_for, shard_slices, split

BUCKET_BYTES = 64 * 2**20
FLOAT32 = "router.expert_bias"
"""Ends the megatron-core name of the one weight that is float32 whatever the trainer's precision is."""


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read lazily slice by slice."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        self._files: dict[str, safe_open] = {}
        self._where: dict[str, Path] = {}
        if index.is_file():
            self._where = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif (folder / "model.safetensors").is_file():
            path = folder / "model.safetensors"
            self._where = dict.fromkeys(self._open(path).keys(), path)
        else:
            raise ConfigError(f"no model.safetensors or model.safetensors.index.json in {folder}", "an ordinary Hugging Face model folder",
                              "check model.path, or run `miles-submit prepare`")

    def _open(self, path: Path):
        if str(path) not in self._files:
            self._files[str(path)] = safe_open(path, framework="pt")
        return self._files[str(path)]

    def slice_of(self, name: str):
        """A safetensors slice object (`.get_shape()`, indexable). Raises ConfigError on an unknown name."""
        if name not in self._where:
            raise ConfigError(f"the model folder has no tensor {name}", "every tensor that config.json implies", "check that the folder is complete")
        return self._open(self._where[name]).get_slice(name)


def load_hf(model: list[torch.nn.Module], folder: str | Path, arch: Architecture) -> None:
    """Fill the parameters of this rank's model chunks, but for a value head and adapters, from the Hugging Face folder. Needs megatron's parallel state.

    Raises ConfigError: a missing tensor. StructureError: a parameter without a rule, or of another shape than the folder's.
    """
    place = Placement(arch, model)
    source = SafetensorsFolder(folder)
    with torch.no_grad():
        for (pattern, layer, expert), parameter in place.local.items():
            rule = place.rules[pattern]
            if rule is VALUE_HEAD or rule.factor:
                continue
            size, rank = place.shard_of_this_rank(rule)
            slices = [source.slice_of(name) for name in hf_names(rule, layer, expert)]
            wanted = shard_slices(rule, [tuple(s.get_shape()) for s in slices], size, rank)
            value = join(rule, [s[index] for s, index in zip(slices, wanted, strict=True)], arch, parameter.shape[0])
            if value.shape != parameter.shape:
                raise StructureError(f"{hf_names(rule, layer, expert)} give {tuple(value.shape)} for {pattern}",
                                     f"{tuple(parameter.shape)}", "config.json and the weights of the folder disagree")
            parameter.copy_(value)


def export_hf(model: list[torch.nn.Module], arch: Architecture, bucket_bytes: int = BUCKET_BYTES, *, adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face tensor of the model as (name, CPU tensor of the trainer's dtype), on rank 0, in a fixed order. Weights that have adapters are as they are
    used. `adapters`: these alone.

    A collective generator: every rank must exhaust it; ranks other than 0 send their shares and yield nothing.
    """
    place = Placement(arch, model)
    me = dist.get_rank()
    for bucket in place.buckets(bucket_bytes, adapters):
        sources = sorted({rank for _, ranks in bucket for rank in ranks})
        received: dict[tuple[Key, int], torch.Tensor] = {}
        for source in sources:
            keys = [key for key, ranks in bucket if source in ranks]
            if me == source:
                tensors = [place.local[key].detach() for key in keys]
                if me == 0:
                    received.update({(key, 0): t.cpu() for key, t in zip(keys, tensors, strict=True)})
                else:
                    _send(tensors)
            elif me == 0:
                received.update({(key, source): t for key, t in zip(keys, _receive(source, len(keys), place.dtypes(keys)), strict=True)})
        if me == 0:
            for key, ranks in bucket:
                rule = place.rules[key[0]]
                parts = split(rule, [received.pop((key, rank)) for rank in ranks], arch)
                # copies: the caller may keep them while the next step changes the parameters
                yield from ((name, part.clone(memory_format=torch.contiguous_format)) for name, part in zip(hf_names(rule, key[1], key[2]), parts, strict=True))


def _send(tensors: list[torch.Tensor]) -> None:
    """Shapes first (int64 [n, 3]: axes, sizes), then all bytes in one message per tensor dtype run."""
    header = torch.tensor([[t.dim(), *t.shape, *([1] * (2 - t.dim()))] for t in tensors], dtype=torch.int64, device=tensors[0].device)
    dist.send(header, dst=0)
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
    dist.send(flat, dst=0)


def _receive(source: int, count: int, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    header = torch.empty((count, 3), dtype=torch.int64, device=device)
    dist.recv(header, src=source)
    shapes = [tuple(row[1 : 1 + row[0]]) for row in header.tolist()]
    sizes = [dtype.itemsize * torch.Size(shape).numel() for shape, dtype in zip(shapes, dtypes, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.recv(flat, src=source)
    pieces = flat.cpu().split(sizes)
    # clone: a piece of the flat buffer may start where its dtype is not aligned
    return [p.clone().view(dtype).reshape(shape) for p, dtype, shape in zip(pieces, dtypes, shapes, strict=True)]


@dataclass(frozen=True)
class Shard:
    """What a parameter on this rank is a part of."""

    rule: Rule
    names: tuple[str, ...]  # Hugging Face tensors
    index: int
    of: int


def shards_of(model: list[torch.nn.Module], arch: Architecture) -> dict[torch.Tensor, Shard]:
    """This rank's parameters. A collective call."""
    place, found = Placement(arch, model), {}
    for (pattern, layer, expert), parameter in place.local.items():
        rule = place.rules[pattern]
        size, rank = place.shard_of_this_rank(rule) if rule.axis is not None else (1, 0)
        found[parameter] = Shard(rule, hf_names(rule, layer, expert), rank, size)
    return found


class Placement:
    """Which parameter lives where: this rank's own parameters, and for every parameter of the model the ranks that hold its shards."""

    def __init__(self, arch: Architecture, model: list[torch.nn.Module]):
        from megatron.core import parallel_state as mpu  # late: the tables above are used without megatron-core

        self.arch = arch
        self.rules = {rule.megatron: rule for rule in rules_for(arch)}
        self.tp = (mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank())
        self.etp = (mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank())
        ep, ep_rank = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
        self.experts_per_rank = arch.experts // ep if arch.experts else 0
        inner = [_unwrap(chunk) for chunk in model]
        self.local: dict[Key, torch.Tensor] = {}
        layers: list[int] = []
        for chunk in inner:
            numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
            drafts = [arch.layers + i for i in range(len(chunk.mtp.layers))] if hasattr(chunk, "mtp") else []
            layers += numbers + drafts
            for name, tensor in _named_weights(chunk):
                rule, layer, expert = find_rule(arch, name)
                if name == VALUE_HEAD.megatron and isinstance(chunk.output_layer, torch.nn.Linear):  # as build_model makes it
                    rule = self.rules[name] = VALUE_HEAD
                self.rules.setdefault(rule.megatron, rule)
                layer = None if layer is None else (drafts if rule.where == "draft" else numbers)[layer]
                expert = None if expert is None else expert + ep_rank * self.experts_per_rank
                self.local[rule.megatron, layer, expert] = tensor
        mine = Place(mpu.get_pipeline_model_parallel_rank(), min(layers), max(layers), self.tp[1],
                     mpu.get_data_parallel_rank(with_context_parallel=True), self.etp[1], ep_rank, mpu.get_expert_data_parallel_rank())
        everyone = [torch.empty(len(mine), dtype=torch.int64, device=next(iter(self.local.values())).device) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.tensor(mine, dtype=torch.int64, device=everyone[0].device))
        self.places = [Place(*row.tolist()) for row in everyone]

    def shard_of_this_rank(self, rule) -> tuple[int, int]:
        return self.etp if rule.per_expert else self.tp

    def dtypes(self, keys: list[Key]) -> list[torch.dtype]:
        """dtype of each parameter; all ranks use one dtype for weights, and float32 for the selection bias of the router."""
        weight = self.local[next(k for k in self.local if k[0].endswith("input_layernorm.weight"))].dtype
        return [torch.float32 if key[0].endswith(FLOAT32) else weight for key in keys]

    def owners(self, rule, layer: int | None, expert: int | None) -> list[int]:
        """Ranks of the first replica that hold the parameter, in the order of its shards (one rank where it is not sharded)."""
        return [replicas[0] for replicas in holders(rule, layer, expert, self.places, self.experts_per_rank)]

    def buckets(self, limit: int, adapters: bool) -> Iterator[list[tuple[Key, list[int]]]]:
        """Weights (or `adapters`) with their owners, grouped so that no bucket is larger than `limit` bytes on a rank (one parameter at least)."""
        bucket, size = [], 0
        for rule, layer, expert in (p for p in parameters(self.arch) if bool(p[0].factor) == adapters):
            bytes_ = 4 * _largest(rule, self.arch)
            if bucket and size + bytes_ > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(((rule.megatron, layer, expert), self.owners(rule, layer, expert)))
            size += bytes_
        yield bucket


def _largest(rule, arch: Architecture) -> int:
    """Elements of a whole parameter, from above: only bounds the size of buckets, so that all ranks cut them alike."""
    width = max(arch.heads * arch.head_dim + 2 * arch.groups * arch.head_dim, 2 * (arch.expert_ffn if rule.per_expert else max(arch.ffn, arch.shared_ffn)))
    if rule.where == "draft":
        width = max(width, 2 * arch.hidden)  # the projection that joins embedding and hidden state
    if rule.factor:
        return arch.adapters.rank * max(arch.hidden, width)
    if rule.kind == "vocab":
        return arch.vocab * arch.hidden
    return arch.hidden if "norm" in rule.megatron else arch.hidden * width


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while hasattr(module, "module"):
        module = module.module
    return module


def local_weights(model: list[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """What `load_hf` fills, in a fixed order."""
    return (tensor.detach() for chunk in model for name, tensor in _named_weights(_unwrap(chunk)) if not FACTORS.search(name))


def _named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the one buffer that is a weight."""
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(FLOAT32))
