"""Where tensors lie in a safetensors file that is made in memory. Pure. Format: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def file_layout(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[bytes, dict[str, int], int]:
    """Of tensors by name, each (dtype as torch names it, shape): what the file begins with, where each tensor begins in the file, and the bytes of the file."""
    header, offsets, at = {}, {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -getattr(torch, item[1][0]).itemsize):  # so that each starts at a multiple of its elements' size
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        offsets[name], at = at, at + size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + offset for name, offset in offsets.items()}, start + at
