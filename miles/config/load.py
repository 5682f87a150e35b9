"""Load a TOML run config: defaults, overrides, nearest-name messages. Nothing here touches devices or the network."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from miles.config.schema import MilesConfig, SiteConfig
from miles.core import ConfigError


def load_config(path: str | Path, overrides: tuple[str, ...] = ()) -> MilesConfig:
    """Read and validate a run config. `overrides` are `section.key=value` with TOML values (`rollout.in_flight=64`).

    Raises ConfigError: file missing, not TOML, unknown key (with the nearest valid name), wrong type, or a rule across sections.
    """
    return _load(MilesConfig, path, overrides)


def load_site(path: str | Path) -> SiteConfig:
    """Read a site profile. Raises ConfigError like `load_config`."""
    return _load(SiteConfig, path, ())


def dump_config(config: BaseModel) -> str:
    """The resolved config as TOML, every default written out."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _load(schema: type[BaseModel], path: str | Path, overrides: tuple[str, ...]):
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1) if path.parent.is_dir() else []
        raise ConfigError(f"no config file {path}", f"a TOML file{f' (did you mean {path.parent / near[0]}?)' if near else ''}", "check the path")
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path} is not valid TOML: {e}", "TOML 1.0", "correct that line") from e
    for item in overrides:
        _override(data, item)
    try:
        return schema.model_validate(data)
    except ValidationError as e:
        raise ConfigError("\n".join(f"{path}: {m}" for m in _messages(schema, e)), "a config that `miles-submit check` accepts",
                          "correct the lines above; docs/config.md lists every option") from e


def _override(data: dict[str, Any], item: str) -> None:
    key, sep, raw = item.partition("=")
    if not sep:
        raise ConfigError(f"override {item!r} has no '='", "section.key=value", "write e.g. --set rollout.in_flight=64")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw  # a bare word is a string
    *parents, last = key.strip().split(".")
    node = data
    for p in parents:
        node = node.setdefault(p, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {item!r}: {p} is a value, not a section", "section.key=value", "check the key")
    node[last] = value


def _messages(schema: type[BaseModel], error: ValidationError) -> list[str]:
    out = []
    for e in error.errors():
        where = ".".join(str(p) for p in e["loc"])
        if e["type"] == "extra_forbidden":
            valid = list(_fields_at(schema, e["loc"][:-1]))
            near = difflib.get_close_matches(str(e["loc"][-1]), valid, n=1, cutoff=0.5)
            out.append(f"unknown key {where}" + (f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(valid)}"))
        elif e["type"] == "missing":
            out.append(f"missing key {where}")
        elif e["type"] == "value_error":
            out.extend(str(e["ctx"]["error"]).split("\n"))
        else:
            out.append(f"{where} = {e['input']!r}: {e['msg']}")
    return out


def _fields_at(schema: type[BaseModel], loc: tuple) -> dict:
    for part in loc:
        info = schema.model_fields.get(str(part))
        if info is None:
            return {}
        for t in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(t, type) and issubclass(t, BaseModel):
                schema = t
                break
        else:
            return {}
    return schema.model_fields


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value]
    return value
