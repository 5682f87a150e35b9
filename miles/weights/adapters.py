"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) and the weights that they make.

Trainer and engine compute with the same bytes: the trainer's forward with the merged weight, and the engine with what a rollout rank merges from the same
frozen weight and the adapters that travelled. So merging is one function, of which each element is made by operations that IEEE 754 leaves no choice in, in a
fixed order: it gives the same bits on any device, for any shard and whatever is in work at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save

from miles.weights.patch import State

_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements in work at a time: on a CPU they stay in its cache."""


@torch.no_grad()
def merge(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """out = base + scale * (b @ a), rounded to its dtype. base, out [n, m] float32 or bfloat16, contiguous; a [r, m] and b [n, r] of the same dtype, all on one
    device.

    In float64: products of two such numbers are exact there, so it is the same whether they are added with one rounding or two; they are added in the order of r.
    Where the sum is 0, as with a new adapter, the result is `base`, bit for bit (-0.0 too). Rounding to bfloat16 goes over float32.
    """
    n, m = base.shape
    left, right = b.t().double().contiguous(), a.double()
    rows = max(1, _BLOCK[base.device.type] // max(m, 1))
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        whole = base[part]
        delta = torch.zeros(whole.shape, dtype=torch.float64, device=base.device)
        for column, row in zip(left, right, strict=True):
            delta.addr_(column[part], row)
        delta.mul_(scale)
        out[part] = torch.where(delta == 0, whole, (whole.double() + delta).float().to(out.dtype))


def new_a(name: str, seed: int, rank: int, width: int) -> torch.Tensor:
    """float32 [rank, width]: the A that an adapter starts from, uniform in [-1, 1] / sqrt(width) as PEFT's; B starts from 0, so the merged weight is the frozen one.
    It follows from the adapter's name and the seed alone."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
    return torch.empty(rank, width).uniform_(-1, 1, generator=generator).mul_(width**-0.5)


def fits(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether these are factors for a weight."""
    return a.dtype == b.dtype == weight.dtype and a.dim() == b.dim() == 2 and weight.shape == (len(b), a.shape[1]) and len(a) == b.shape[1]


def by_weight(weights: Iterable[tuple[str, ...]], adapters: State) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight -> its A and B (None: it is missing), by their Hugging Face names. weights: names of the parts that the trainer has as one weight, which share an A
    (miles.weights.mapping.tables.factors_of)."""
    found = {}
    for names in weights:
        stems = [name.removesuffix("weight") for name in names]
        if (a := adapters.get(f"{stems[0]}lora_A.weight")) is not None:
            found |= {name: (a, adapters.get(f"{stem}lora_B.weight")) for name, stem in zip(names, stems, strict=True)}
    return found


PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")


def write_peft(folder: Path, weights: Iterable[tuple[str, ...]], adapters: State, *, base: str, rank: int, alpha: float) -> None:
    """Write the two files of an adapter as PEFT reads it (https://huggingface.co/docs/peft/developer_guides/checkpoint). `weights` as of `by_weight`; base: the
    model that it goes with. Each weight has an A of its own there."""
    tensors, modules = {}, []
    for name, (a, b) in by_weight(weights, adapters).items():
        module = name.removesuffix(".weight")
        modules.append(module)
        tensors |= {f"base_model.model.{module}.lora_A.weight": a.clone(), f"base_model.model.{module}.lora_B.weight": b}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha, "target_modules": modules,
              "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True}
    (folder / PEFT_FILES[0]).write_text(json.dumps(config, indent=2) + "\n")
    (folder / PEFT_FILES[1]).write_bytes(save(tensors, metadata={"format": "pt"}))
