"""Whether what several trainer ranks hold alike is alike: of each parameter one holder's copy is published, and the others must be the same bit for bit.

Copies are those of data-parallel ranks, what tensor parallelism does not shard (norms, routers), and what two pipeline stages hold (the embedding, where the
output layer or a draft layer shares it). They are computed on each rank by itself, and nothing brings ranks that have drifted apart together again.

Each rank takes a mark of 64 bits of each of its copies. One reduction gives every rank the smallest and the largest mark of each, so a rank needs no other's
marks, and all come to the same outcome.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash

from miles.core import StructureError
from miles.weights.digest import bits
from miles.weights.mapping.architecture import Architecture
from miles.weights.mapping.tables import hf_names, parameters
from miles.weights.mapping.transfer import Placement
from miles.weights.parallel import threads

EVERY = 8
"""Versions from one comparison to the next: it reads all that a rank holds, and ranks that have drifted apart stay so."""
_LARGEST = torch.iinfo(torch.int64).max
_MASK = (1 << 64) - 1
_WORDS = 1 << 23  # that are in work at a time on a GPU: 64 MiB


class Replicas:
    """The parameters of a rank that other ranks hold too. Made on all ranks at the same time; they are read again at each `check`."""

    def __init__(self, model: list[torch.nn.Module], arch: Architecture):
        """Needs megatron's parallel state."""
        place = Placement(arch, model)
        slots: dict[tuple[tuple[str, ...], int], int] = {}  # (Hugging Face names, shard) -> number; the same on every rank
        for rule, layer, expert in parameters(arch):
            for shard in range(1 if rule.axis is None else place.shard_of_this_rank(rule)[0]):
                slots[hf_names(rule, layer, expert), shard] = len(slots)
        held: dict[int, torch.Tensor] = {}
        for (pattern, layer, expert), tensor in place.local.items():
            rule = place.rules[pattern]
            held[slots[hf_names(rule, layer, expert), 0 if rule.axis is None else place.shard_of_this_rank(rule)[1]]] = tensor.detach()
        self._device = next(iter(held.values())).device
        holders = torch.zeros(len(slots), dtype=torch.int64, device=self._device)
        holders[list(held)] = 1
        dist.all_reduce(holders)
        several = [slot for slot, count in enumerate(holders.tolist()) if count > 1]
        self._names = [name for name, slot in slots.items() if slot in set(several)]
        self._versions = 0
        self._held = {i: held[slot] for i, slot in enumerate(several) if slot in held}

    def check_now_and_then(self) -> None:
        """Collective, before each version: `check` before the first and every `EVERY`-th of them."""
        if self._versions % EVERY == 0:
            self.check()
        self._versions += 1

    def check(self) -> None:
        """Collective. Raises StructureError (cause "weights:replicas"), on every rank, when a copy differs from another."""
        if not self._names:
            return
        marks = torch.full((2, len(self._names)), _LARGEST, dtype=torch.int64, device=self._device)
        if self._held:
            mine = _marks(list(self._held.values()))
            marks[:, list(self._held)] = torch.stack([mine, ~mine])  # the smallest ~x is that of the largest x
        own = marks[0].clone()
        dist.all_reduce(marks, op=dist.ReduceOp.MIN)
        different = (marks[0] != ~marks[1]).nonzero().flatten().tolist()
        if not different:
            return
        everyone = [torch.empty(2, dtype=torch.int64, device=self._device) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.stack([own[different[0]], torch.tensor(different[0] in self._held, device=self._device)]))
        alike: dict[int, list[int]] = {}
        for rank, (mark, holds) in enumerate(row.tolist() for row in everyone):
            if holds:
                alike.setdefault(mark, []).append(rank)
        (names, shard) = self._names[different[0]]
        groups = " and ".join(f"trainer ranks {ranks}" for ranks in alike.values())
        raise StructureError(f"{', '.join(names)} (shard {shard}) differs between {groups}; so do {len(different) - 1} more of {len(self._names)} parameters",
                             "the same bits on every rank that holds it",
                             "this version was not published, those since the last comparison may be of either copy: the trainer goes on from its last checkpoint; if it happens again, suspect a GPU or its memory, or the optimizer",
                             cause="weights:replicas")


def _marks(tensors: list[torch.Tensor]) -> torch.Tensor:
    """int64 [n], on the tensors' device."""
    if tensors[0].device.type == "cuda":
        return torch.stack([mark_on_device(t) for t in tensors])
    return torch.tensor([_signed(h) for h in threads().map(lambda t: xxhash.xxh3_64_intdigest(bits(t).numpy()), tensors)])


def mark_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """int64 []: the sum, modulo 2^64, of the tensor's words, each times an odd number that says its place, and then mixed (the end of SplitMix64: Steele, Lea
    and Flood 2014, doi:10.1145/2714064.2660195), so that changes do not cancel. That of one word never does. In torch's operations, for weights on a GPU."""
    flat = bits(tensor)
    if tensor.nbytes % 8 == 0:
        flat = (flat if flat.data_ptr() % 8 == 0 else flat.clone()).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _WORDS):
        words = flat[start:start + _WORDS].to(torch.int64)
        x = torch.arange(2 * start + 1, 2 * (start + len(words)) + 1, 2, device=flat.device).mul_(_signed(0x9E3779B97F4A7C15)).mul_(words)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x.bitwise_xor_((x >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(_signed(factor))
        total += x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1)).sum()
    return total


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
