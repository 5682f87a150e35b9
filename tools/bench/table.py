"""What a benchmark found, as a table or as JSON, and its exit status."""

import json
import os

SIGN = {"least": ">=", "most": "<=", "within": "+-"}
WIDTHS = {"value": 12, "baseline": 12, "ratio": 8, "limit": 12, "target": 10}


def figure(name: str, unit: str, value: float | None, baseline: float | None = None, limit: float | None = None, *, least: float | None = None,
           most: float | None = None, within: float | None = None, of_ratio: bool = False, **facts) -> dict:
    """A measured value beside its baseline of the same run, their ratio, and the limit: what this machine allows. At most one target:
    `least` or `most` of the value (`of_ratio`: of value / baseline), or `within` that of 1 for the ratio. None is a field that does not apply; a value
    of None could not be measured, and misses its target. `facts`: what else the JSON and a line under the row say of it."""
    ratio = value / baseline if value is not None and baseline else None
    targets = {"least": least, "most": most, "within": within}
    kind, target = next(((k, t) for k, t in targets.items() if t is not None), (None, None))
    of = None if kind is None else "ratio" if of_ratio or kind == "within" else "value"
    return {"figure": name, "unit": unit, "value": value, "baseline": baseline, "ratio": ratio, "limit": limit, "target": target, "target_is": kind,
            "target_of": of, "ok": kind is None or _met(kind, target, ratio if of == "ratio" else value), "facts": facts}


def _met(kind: str, target: float, found: float | None) -> bool:
    if found is None:
        return False
    return bool(found >= target if kind == "least" else found <= target if kind == "most" else abs(found - 1) <= target)



def tell(bench: str, figures: list[dict], as_json: bool, **facts) -> int:
    """Print `figures` and the `facts` of the run. Returns the exit status: 1 where a target is missed."""
    facts = {"cpus": os.cpu_count(), **facts}
    if as_json:
        print(json.dumps({"bench": bench, **facts, "figures": figures}, allow_nan=False))
    else:
        print(f"{bench}: {_line(facts)}", f"{'figure':54}" + "".join(f" {name:>{width}}" for name, width in WIDTHS.items()), sep="\n")
        for f in figures:
            print(_row(f), *([f"    {_line(f['facts'])}"] if f["facts"] else []), sep="\n")
    return 0 if all(f["ok"] for f in figures) else 1


def _row(f: dict) -> str:
    cells = {name: "" if f[name] is None else _text(f[name]) for name in WIDTHS}
    if f["target_is"]:
        cells["target"] = f"{SIGN[f['target_is']]} {cells['target']}"
    name = f["figure"] + (f" [{f['unit']}]" if f["unit"] else "")
    return (f"{name:54}" + "".join(f" {cells[n]:>{width}}" for n, width in WIDTHS.items()) + (" (ratio)" if f["target_of"] == "ratio" else "")
            + ("" if f["ok"] else " MISSED")).rstrip()


def _line(facts: dict) -> str:
    return ", ".join(f"{name} {' '.join(map(_text, value)) if isinstance(value, list) else _text(value)}" for name, value in facts.items())


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
