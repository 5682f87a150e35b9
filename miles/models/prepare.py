"""Make the model folder of a run config: one recipe each, published whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from miles.config import MilesConfig
from miles.core import ConfigError

Say = Callable[[str], None]
RECIPE_FILE = "miles_recipe.json"  # in the model folder: how it was made and what was measured


def prepare(config: MilesConfig, say: Say = print) -> Path:
    """The folder `model.path`, made by `model.recipe` when it is absent. Says its progress line by line.

    Safe to call again and at the same time: the folder appears by one rename. Raises ConfigError when there is nothing to make it
    from (recipe `none`), or the path holds something else.
    """
    path, recipe = Path(config.model.path), config.model.recipe
    if (path / "config.json").is_file():
        _check_origin(path, recipe)
        return path
    if path.exists():
        raise ConfigError(f"model.path {path} exists but is no Hugging Face folder (no config.json)", "a complete folder, or nothing",
                          "remove it, or point model.path elsewhere")
    if recipe == "none":
        raise ConfigError(f"no model at {path}", "a Hugging Face folder with config.json, safetensors and a tokenizer",
                          "put the model there, correct model.path, or set model.recipe")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    started = time.monotonic()
    say(f"making {path} by the recipe {recipe}")
    try:
        import transformers  # late, like the recipes

        transformers.utils.logging.disable_progress_bar()  # `say` reports
        facts = _recipe(recipe)(config, unfinished, say)
        facts = {"recipe": recipe, **facts, "seconds": round(time.monotonic() - started, 1)}
        (unfinished / RECIPE_FILE).write_text(json.dumps(facts, indent=2) + "\n")
        unfinished.chmod(0o755)  # temporary folders and safetensors are private; other nodes' users of the run may differ
        for file in unfinished.iterdir():
            file.chmod(0o644)
        try:
            os.rename(unfinished, path)
        except OSError:  # someone else was faster; theirs is as good
            if not (path / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # gone already after the rename
    say(f"made {path} in {time.monotonic() - started:.0f} s")
    return path


def _recipe(name: str) -> Callable[[MilesConfig, Path, Say], dict]:
    if name in ("tiny_moe", "tiny_glm4_moe"):  # imported late: torch and transformers take seconds, and an existing folder needs neither
        from miles.models.tiny_moe import make
    else:
        from miles.models.smollm2 import make
    return make


def _check_origin(path: Path, recipe: str) -> None:
    """A folder made by another recipe is not what the config asks for. Folders without a record come from elsewhere and are taken as they are."""
    if recipe == "none" or not (path / RECIPE_FILE).is_file():
        return
    made_by = json.loads((path / RECIPE_FILE).read_text())["recipe"]
    if made_by != recipe:
        raise ConfigError(f"{path} was made by the recipe {made_by}, the config says {recipe}", f"a folder made by {recipe}",
                          "remove the folder, or give each recipe its own model.path")
