"""Which rows of the logs count, and the small arithmetic that every figure uses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from miles.report.read import RunData, Table


def lineage_rows(data: RunData) -> Table:
    """Rows of `steps` on the lineage of the final weights, one a step, ordered by step: those that the epoch logged which the journal
    says trained the step. Empty dict when there are none."""
    return _of_lineage(data, "steps", "step")


def truth_rows(data: RunData) -> Table:
    """Likewise of `truth`: one for each step and staleness."""
    return _of_lineage(data, "truth", "step", "staleness")


def _of_lineage(data: RunData, name: str, *key: str) -> Table:
    """Rows of a table of the lineage's steps and epochs, ordered by the columns `key`, of which `step` is the first; of equals the last."""
    table = data.tables.get(name)
    if not table:
        return {}
    wanted = {(step, epoch) for step, (epoch, _) in data.lineage.steps.items()}
    chosen: dict[tuple[int, ...], int] = {}
    for i, (*numbers, epoch) in enumerate(zip(*(table[k].astype(int).tolist() for k in key), table["file_epoch"].tolist(), strict=True)):
        if (numbers[0], epoch) in wanted:
            chosen[tuple(numbers)] = i
    order = [chosen[k] for k in sorted(chosen)]
    return {name: column[order] for name, column in table.items()} if order else {}


def finished_trajectories(data: RunData) -> Table:
    """Rows of `trajectories` with status ok. A sample that was finished twice (its rank died before the record was safe) counts once,
    the last."""
    table = data.tables.get("trajectories")
    if not table:
        return {}
    last = {
        (g, s): i
        for i, (g, s, status) in enumerate(zip(table["group_id"].tolist(), table["sample"].tolist(), table["status"].tolist(), strict=True))
        if status == "ok"
    }
    order = sorted(last.values())
    return {name: column[order] for name, column in table.items()} if order else {}


def mismatches(data: RunData) -> dict[str, dict[str, int]]:
    """Requests of finished samples that did not go on from the turn before, by what became of them (`branched`, `refused`) and by cause."""
    table, out = data.tables.get("mismatches"), {}
    for kind, cause, count in zip(*(table[k].tolist() for k in ("kind", "cause", "count")), strict=True) if table else ():
        out.setdefault(kind, Counter())[cause] += int(count)
    return {kind: dict(sorted(out[kind].items())) for kind in sorted(out)}


def queue_rows(data: RunData) -> Table:
    """Rows of `queue` (one a second, by the rollout leader) from the first trajectory on: before it, engines start."""
    table = data.tables.get("queue")
    if not table or not (table["in_flight"] > 0).any():
        return {}
    start = int(np.argmax(table["in_flight"] > 0))
    return {name: column[start:] for name, column in table.items()}


def spread(values: np.ndarray | None) -> dict[str, Any]:
    """mean, std, min, median, p90, max and count of the finite values."""
    v = np.asarray([] if values is None else values, dtype=float)
    v = v[np.isfinite(v)]
    if not len(v):
        return {"count": 0}
    return {
        "count": len(v),
        "mean": v.mean(),
        "std": v.std(),
        "min": v.min(),
        "median": np.median(v),
        "p90": np.percentile(v, 90),
        "max": v.max(),
    }


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> float | None:
    """Mean over the entries whose weight is above 0; None when there are none."""
    use = (weights > 0) & np.isfinite(values)
    return float(np.average(values[use], weights=weights[use])) if use.any() else None


def clean(value: Any) -> Any:
    """Plain JSON values: numpy to Python, NaN and infinities to None."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, np.generic):
        return clean(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
