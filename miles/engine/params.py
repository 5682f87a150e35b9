"""Names, shapes and dtypes of a model's parameters, from the headers of its safetensors files. Reads no tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import NamedTuple

from miles.core import ConfigError

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
           "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
_HEADER_LIMIT = 100 << 20  # bytes; safetensors' own limit


class Parameter(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # torch's name, e.g. "float32"


def read_parameters(folder: str | Path) -> dict[str, Parameter]:
    """Hugging Face name -> Parameter for all `*.safetensors` of a folder. Raises ConfigError when there is none or one is damaged.

    Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length, then JSON).
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"no *.safetensors in {folder}", "an ordinary Hugging Face model folder", "set model.path, or make the model first")
    out: dict[str, Parameter] = {}
    for file in files:
        with file.open("rb") as f:
            try:
                (length,) = struct.unpack("<Q", f.read(8))
                if length > _HEADER_LIMIT:
                    raise ValueError(f"header of {length} bytes")
                header = json.loads(f.read(length))
            except (struct.error, ValueError) as e:
                raise ConfigError(f"{file} is not a safetensors file: {e}", "a whole file", "download or make it again") from e
        out |= {n: Parameter(tuple(t["shape"]), _DTYPES[t["dtype"]]) for n, t in header.items() if n != "__metadata__"}
    return out
