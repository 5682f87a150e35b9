"""Functions that a configuration names: `package.module.function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any

from miles.core.errors import ConfigError


def load_function(option: str, name: str, named: Collection[str], what: str) -> Callable[..., Any]:
    """The function at the dotted path `name`. `named`: what `option` may say instead; `what`: the function, in words. Raises ConfigError: there is none."""
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"{option} = {name!r}: {e}", f"{', '.join(named)}, or package.module.function", f"correct {option}, or the Python path") from e
    if not callable(found):
        raise ConfigError(f"{option} = {name!r} is a {type(found).__name__}", what, f"correct {option}")
    return found
