"""What an engine's memory must hold, computed from Hugging Face tensors, so that an acknowledgement is about the weights that really serve.

SGLang's `/weights_checker {action: checksum}` gives, per parameter of its own model, the first 8 bytes of SHA-256 over the bytes in memory
(SGLang 0.5.23, utils/weight_checker.py and managers/mm_utils.py::tensor_hash; on CUDA it uses another hash and each process holds a part, so
this file serves CPU engines). Its parameters are Hugging Face's, joined along the first axis, so their bytes are Hugging Face's bytes one after
another:

    self_attn.qkv_proj     q_proj, k_proj, v_proj
    mlp.gate_up_proj       gate_proj, up_proj                    (also of shared experts)
    mlp.experts.w13_weight expert 0 gate_proj, up_proj, expert 1 ...
    mlp.experts.w2_weight  expert 0 down_proj, expert 1 ...
    embed_tokens, lm_head  rows of zeros after the vocabulary, up to a multiple of 64 (layers/vocab_parallel_embedding.py)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from miles.core import StructureError

if TYPE_CHECKING:
    import torch

VOCABULARY_ROWS = 64

_LAYER = re.compile(r"^model\.layers\.(?P<layer>\d+)\.")
_EXPERT = re.compile(r"^(?P<head>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")
_JOINED = re.compile(r"^(?P<head>.*\.)(?P<part>q_proj|k_proj|v_proj|gate_proj|up_proj)\.(?P<kind>weight|bias)$")
_EXPERT_TARGET = {"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", 0)}
_JOINED_TARGET = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2), "gate_proj": ("gate_up_proj", 0),
                  "up_proj": ("gate_up_proj", 1)}


def draft_tensors(names: Iterable[str], layers: int) -> set[str]:
    """Those of layers behind the `layers` of the model, which an engine that does not speculate leaves out."""
    return {name for name in names if (m := _LAYER.match(name)) and int(m["layer"]) >= layers}


def layers_of(names: Iterable[str]) -> int:
    """How many layers the parameters of these names have."""
    return 1 + max((int(m["layer"]) for name in names if (m := _LAYER.match(name))), default=-1)


def fusion_plan(names: Iterable[str], *, tied: bool = False) -> dict[str, list[str]]:
    """Engine parameter -> Hugging Face tensors whose bytes it is made of, in order. `tied`: lm_head shares the embedding and has no own parameter.

    Holds for the families whose attention is q/k/v and whose MLP is gate/up/down: Llama, Qwen2/3, Qwen3-MoE, GLM-4 MoE.
    """
    parts: dict[str, list[tuple[tuple[int, int], str]]] = {}
    for name in names:
        if tied and name == "lm_head.weight":
            continue
        if m := _EXPERT.match(name):
            target, order = _EXPERT_TARGET[m["part"]]
            parts.setdefault(f"{m['head']}.{target}", []).append(((int(m["expert"]), order), name))
        elif m := _JOINED.match(name):
            target, order = _JOINED_TARGET[m["part"]]
            parts.setdefault(f"{m['head']}{target}.{m['kind']}", []).append(((0, order), name))
        else:
            parts.setdefault(name, []).append(((0, 0), name))
    return {target: [name for _, name in sorted(pieces)] for target, pieces in parts.items()}


def expected_checksums(state: Mapping[str, torch.Tensor], *, dtype: str = "float32", tied: bool = False, layers: int | None = None) -> dict[str, str]:
    """Engine parameter -> 16 hex digits, what `EngineClient.checksums()` must return. `state`: every Hugging Face tensor of the model;
    `dtype`: the engine's, "float32" or "bfloat16", into which floats are converted as the engine does; `layers`: of the model, where `state` may have
    draft layers behind them, which an engine that does not speculate leaves out.
    """
    import torch

    target_dtype = getattr(torch, dtype)
    out = {}
    drafts = draft_tensors(state, layers) if layers is not None else set()
    for target, pieces in fusion_plan((name for name in state if name not in drafts), tied=tied).items():
        sha = hashlib.sha256()
        for name in pieces:
            tensor = state[name].detach().cpu()
            if tensor.is_floating_point():
                tensor = tensor.to(target_dtype)
            sha.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                padding = -len(tensor) % VOCABULARY_ROWS
                sha.update(bytes(padding * tensor[0].numel() * tensor.element_size()))
        out[target] = sha.digest()[:8].hex()
    return out


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """One SHA-256 over all parameters, the same that the engine calls `per_gpu_checksum`."""
    sha = hashlib.sha256()
    for name in sorted(checksums):
        sha.update(name.encode())
        sha.update(checksums[name].encode())
    return sha.hexdigest()


def require_equal(expected: Mapping[str, str], found: Mapping[str, str], version: int) -> None:
    """Raises StructureError (cause "weights:checksum") when the engine's memory is not the published version: it must be reloaded, not used."""
    wrong = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
    if wrong:
        raise StructureError(
            f"after applying version {version} the engine holds other bytes in {len(wrong)} of {len(expected)} parameters: {', '.join(wrong[:4])}",
            "the published tensors, bit for bit", "restart the engine and load the newest version in full", cause="weights:checksum",
        )
