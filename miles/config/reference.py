"""The configuration reference as Markdown, generated from the schema: `reference() -> str`."""

from __future__ import annotations

import json
from inspect import cleandoc
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miles.config.schema import MilesConfig, SiteConfig

_HEAD = """# Configuration reference

Written by `tools/gen_config_docs` from `miles/config/schema.py`: change the descriptions there.

A run config is a TOML file; a section below is a TOML table, e.g. `[trainer.layout]`. Unknown keys are refused with the nearest valid name.
Any option can be given on the command line: `--set rollout.in_flight=64`. Rules that span sections are in `miles/config/rules.py`; what
must fit the GPUs is in `miles/config/memory.py`; `miles-submit check CONFIG` applies both.
"""


def reference() -> str:
    out = [_HEAD]
    for schema, title in ((MilesConfig, ""), (SiteConfig, "Site profile")):
        if title:
            out.append(
                f"\n# {title}\n\n{cleandoc(schema.__doc__)}\nA run names it with `cluster.site`. Its keys stand at the top of the file.\n"
            )
            out.append(_table(schema))
        for name, info in schema.model_fields.items():
            if section := _section(info.annotation):
                out += _sections(section, name)
    return "\n".join(out).replace("\n\n\n", "\n\n")


def _sections(schema: type[BaseModel], path: str) -> list[str]:
    out = [f"\n## [{path}]\n\n{cleandoc(schema.__doc__)}\n", _table(schema)]
    for name, info in schema.model_fields.items():
        if section := _section(info.annotation):
            out += _sections(section, f"{path}.{name}")
    return out


def _table(schema: type[BaseModel]) -> str:
    rows = [
        (name, _type(info), _default(info), info.description) for name, info in schema.model_fields.items() if not _section(info.annotation)
    ]
    return "\n".join(
        ["| key | type | default | meaning |", "|---|---|---|---|", *(f"| `{n}` | {t} | {d} | {m} |" for n, t, d, m in rows), ""]
    )


def _section(annotation: Any) -> type[BaseModel] | None:
    """The schema of a nested section, also behind `| None`."""
    for t in (annotation, *get_args(annotation)):
        if isinstance(t, type) and issubclass(t, BaseModel):
            return t
    return None


def _type(info: FieldInfo) -> str:
    return _name(info.annotation) + "".join(f", {sign} {bound}" for sign, bound in _bounds(info))


def _name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return f"list of {_name(args[0])}"
    if origin is dict:
        return f"table of {_name(args[1])}"
    if args and all(isinstance(a, str) for a in args):
        return " \\| ".join(f"`{a}`" for a in args)
    if args:
        return _name(next(a for a in args if a is not NoneType))
    return {str: "text", int: "whole number", float: "number", bool: "true \\| false"}[annotation]


def _bounds(info: FieldInfo) -> list[tuple[str, Any]]:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return [(sign, getattr(m, key)) for m in info.metadata for key, sign in signs.items() if getattr(m, key, None) is not None]


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "**required**"
    if value is None:
        return "absent"
    return f"`{json.dumps(value, ensure_ascii=False)}`"
