"""A draft (multi-token prediction) layer for a model folder that transformers wrote: it knows the layer in config.json and has no module for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_draft_layer(folder: Path) -> int:
    """Write a draft layer behind the last layer of a GLM-4 MoE; it starts as a copy of that layer, fed the sum of hidden state and embedding. Returns its parameters."""
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    last, prefix = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    draft = {prefix + name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    draft |= {f"{prefix}{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm")}
    draft |= {f"{prefix}eh_proj.weight": torch.eye(hidden).repeat(1, 2), f"{prefix}shared_head.norm.weight": tensors["model.norm.weight"].clone()}
    save_file({**tensors, **draft}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=2) + "\n")
    return sum(t.numel() for t in draft.values())
