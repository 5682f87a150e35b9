"""What is told to SGLang: command line and environment, as pure functions of the configuration."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles.config import MilesConfig
from miles.core import ConfigError

Platform = Literal["cpu", "cuda"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class ModelShape:
    """What the engine's requests and replies must fit, read from a Hugging Face config.json."""

    architecture: str
    vocab_size: int
    layers: int
    moe_layers: tuple[int, ...]  # indices of the layers that route, in order; empty for a dense model
    experts: int
    top_k: int

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelShape:
        """Raises ConfigError when the folder has no readable config.json of a known form."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError(f"no {path}", "an ordinary Hugging Face model folder", "set model.path, or make the model first (miles-submit prepare)")
        c = json.loads(path.read_text())
        c = c.get("text_config", c) | {"architectures": c["architectures"]}
        layers = c["num_hidden_layers"]
        experts = c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts") or 0
        moe = []
        if experts:
            step, dense = c.get("decoder_sparse_step", 1), set(c.get("mlp_only_layers") or ())
            moe = [i for i in range(c.get("first_k_dense_replace", 0), layers) if i not in dense and (i + 1) % step == 0]
        return cls(c["architectures"][0], c["vocab_size"], layers, tuple(moe), experts, c.get("num_experts_per_tok", 0) if experts else 0)


def server_argv(
    config: MilesConfig, *, platform: Platform, shape: ModelShape, host: str, port: int, rank: int, weight_version: int,
    model_path: str | None = None,
) -> list[str]:
    """Arguments of `sglang.launch_server` for the engine of rollout rank `rank`. The API key is not among them: a process list shows these.

    `model_path` replaces `model.rollout_path` or `model.path` (an engine that restarts may load newer weights). Raises ConfigError when the platform cannot
    serve the configuration.
    """
    e, m = config.engine, config.model
    args = ["--model-path", model_path or m.rollout_path or m.path, "--host", host, "--port", str(port)]
    args += ["--context-length", str(m.max_context), "--weight-version", str(weight_version)]
    # Every engine draws its own random numbers; equal seeds would give equal samples for equal prompts on two engines.
    args += ["--random-seed", str(config.run.seed * 1000 + rank)]
    if shape.moe_layers:
        args += ["--enable-return-routed-experts"]
    if e.max_total_tokens:
        args += ["--max-total-tokens", str(e.max_total_tokens)]
    if e.max_running:
        args += ["--max-running-requests", str(e.max_running)]
    if config.weights.pause == "in_place" or platform == "cpu":
        # With overlapped scheduling a sampled token is still on its way when an in-place pause begins, and the engine records it under the
        # weights that come after the pause (seen with 0.5.23, tests/engine/test_engine_real.py). A retraction waits for it.
        # On a CPU nothing overlaps and the second thread only costs.
        args += ["--disable-overlap-schedule"]
    if config.cluster.placement == "shared":
        args += ["--enable-memory-saver"]
    args += _cpu_args(config) if platform == "cpu" else _cuda_args(config)
    return [*args, *e.extra_args]


def _cpu_args(config: MilesConfig) -> list[str]:
    e, m = config.engine, config.model
    if m.rollout_precision not in DTYPES:
        raise ConfigError(f"model.rollout_precision = {m.rollout_precision} on a CPU engine", "fp32 or bf16", "set model.rollout_precision = 'fp32'")
    if e.max_total_tokens is None:
        raise ConfigError("engine.max_total_tokens is not set", "a number of tokens: on a CPU the engine cannot choose the size of its KV cache",
                          "set engine.max_total_tokens, at least rollout.in_flight x rollout.max_session_tokens / engines for no evictions")
    if e.tp * e.dp_attention * e.ep != 1 or e.speculative:
        raise ConfigError("engine.tp, dp_attention, ep or speculative on a CPU engine", "one process without speculation", "set them to 1 / remove them")
    # sleep-on-idle: the scheduler polls otherwise and takes a whole core from its neighbours.
    return ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", DTYPES[m.rollout_precision], "--sleep-on-idle"]


def _cuda_args(config: MilesConfig) -> list[str]:
    e, m = config.engine, config.model
    args = ["--tp-size", str(e.tp), "--ep-size", str(e.ep), "--mem-fraction-static", str(e.memory_fraction)]
    if e.dp_attention > 1:
        args += ["--enable-dp-attention", "--dp-size", str(e.dp_attention)]
    if e.kv_cache != "auto":
        args += ["--kv-cache-dtype", e.kv_cache]
    # A quantized folder says in its config.json how; `--quantization` would round an ordinary one anew, on a grid that the trainer does not know.
    args += ["--dtype", DTYPES.get(m.rollout_precision, "bfloat16")]
    if s := e.speculative:
        args += ["--speculative-algorithm", s.algorithm, "--speculative-num-steps", str(s.num_steps), "--speculative-eagle-topk", str(s.topk),
                 "--speculative-num-draft-tokens", str(s.num_draft_tokens)]
    return args


def server_env(platform: Platform, shape: ModelShape, sglang_models: Path | None = None) -> dict[str, str]:
    """Environment of the server on top of this process's own. On a GPU nothing is changed but network look-ups.

    `sglang_models` is SGLang's folder of model files (CPU only): all but the one that defines the architecture are left out, since SGLang
    imports every one of them at start (2 s of CPU).
    """
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if platform == "cuda":
        return env
    env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # dynamo: 1 s of imports, compiles with g++
    if sglang_models is not None:
        defines = re.compile(rf"^(class {shape.architecture}\b|EntryClass\s*=.*\b{shape.architecture}\b)", re.MULTILINE)
        files = sorted(sglang_models.glob("*.py"))
        if any(defines.search(f.read_text()) for f in files):
            env["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(f.stem for f in files if f.stem != "__init__" and not defines.search(f.read_text()))
    return env
