"""A Hugging Face folder in the rollout's format, from one in high precision: what engines start from (`model.rollout_path`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from miles.config.precision import high_precision, is_quantized, unmatched
from miles.core import ConfigError
from miles.rundir import publish_dir, temp_path
from miles.weights.precision.export import Export


def quantize_folder(source: Path, target: Path, format: str, further: Iterable[str] = ()) -> tuple[int, int]:
    """Write `target`, which must not exist, file by file; it appears when it is whole. Returns how many tensors were quantized and how many were kept.

    Raises ConfigError: `source` is no model folder or quantized already, a pattern that matches nothing, a format without a description SGLang reads.
    """
    config = _config(source)
    patterns = high_precision(config.get("model_type", ""), further)
    tensors = _shapes(source)
    if slips := unmatched(patterns, tensors):
        raise ConfigError(f"high-precision patterns that match no tensor of {source}: {', '.join(slips)}", "patterns that do", "correct or remove them")
    if target.exists():
        raise ConfigError(f"{target} exists", "a new folder", "choose another name, or remove it")
    kept = [n for n, shape in tensors.items() if n.endswith(".weight") and len(shape) == 2 and not is_quantized(n, shape, patterns)]
    described = json.dumps(config | {"quantization_config": description(format, kept)}, indent=2)
    tmp = temp_path(target)
    try:
        tmp.mkdir(parents=True)
        where = {}
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, framework="pt") as f:
                out = dict(Export(format, patterns)((name, f.get_tensor(name)) for name in f.keys()))  # noqa: SIM118 (no mapping)
            save_file({n: t.contiguous() for n, t in out.items()}, tmp / file.name, metadata={"format": "pt"})
            where |= dict.fromkeys(out, file.name)
        (tmp / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=1))
        for file in source.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and not (tmp / file.name).exists():
                shutil.copyfile(file, tmp / file.name)
        (tmp / "config.json").write_text(described)
        publish_dir(tmp, target)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    quantized = sum(is_quantized(n, shape, patterns) for n, shape in tensors.items())
    return quantized, len(tensors) - quantized


def description(format: str, kept: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json as SGLang 0.5.23 reads it (layers/quantization/fp8.py, Fp8Config.from_config). kept: matrices in high precision."""
    if format not in ("fp8", "mxfp8"):
        raise ConfigError(f"no folder in {format} can be written", "fp8 or mxfp8", "use a folder that the model's publisher made")
    return {"quant_method": format, "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128] if format == "fp8" else [1, 32],
            "modules_to_not_convert": sorted(n.removesuffix(".weight") for n in kept)}


def _shapes(source: Path) -> dict[str, tuple[int, ...]]:
    out = {}
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            out |= {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118 (no mapping)
    if not out:
        raise ConfigError(f"no *.safetensors in {source}", "an ordinary Hugging Face model folder", "name the folder of the model in high precision")
    return out


def _config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not path.is_file():
        raise ConfigError(f"no {path}", "an ordinary Hugging Face model folder", "name the folder of the model in high precision")
    config = json.loads(path.read_text())
    if "quantization_config" in config:
        raise ConfigError(f"{path} has a quantization_config: the model is quantized already", "weights in high precision", "start from those")
    return config
