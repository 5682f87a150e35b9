"""How a benchmark tells its figures: one row each, or JSON, and the exit status."""

import json
import os


def tell(bench: str, figures: list[dict], as_json: bool, heading: str = "", **facts) -> int:
    """Print `figures` (figure, unit, value, baseline, ratio, limit, target, ok; a field that does not apply is None). With `target_of` = "ratio" the target is
    that of the ratio. `facts`: what else the JSON says of the run. Returns the exit status: 1 where a target is missed."""
    if as_json:
        print(json.dumps({"bench": bench, "cpus": os.cpu_count(), **facts, "figures": figures}))
    else:
        print(*([heading] if heading else []), f"{'figure':54} {'value':>12} {'baseline':>12} {'ratio':>8} {'limit':>12} {'target':>10}", sep="\n")
        for f in figures:
            cells = [("" if f[k] is None else f"{f[k]:,.4g}" if abs(f[k]) < 1000 else f"{f[k]:,.0f}").rjust(width)
                     for k, width in (("value", 12), ("baseline", 12), ("ratio", 8), ("limit", 12), ("target", 10))]
            print(f"{f['figure'] + (' [' + f['unit'] + ']' if f['unit'] else ''):54}", *cells, *(["(ratio)"] if f.get("target_of") == "ratio" else []),
                  *([] if f["ok"] else ["MISSED"]))
    return 0 if all(f["ok"] for f in figures) else 1
