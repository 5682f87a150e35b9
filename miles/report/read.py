"""Reads everything a run has left behind: log files of all attempts, journals, attempt records. No file is written, none is locked.

Works on a run that is going on, that has finished, or whose processes were killed: each file is believed as far as it can be read, and
what could not be read is listed, never skipped in silence.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from miles.buffer import BufferState, BufferView
from miles.config import MilesConfig
from miles.core import Role
from miles.rundir import RunDir, read_journal

_LOG_NAME = re.compile(r"(?P<role>trainer|rollout)-(?P<rank>\d+)\.e(?P<epoch>\d+)\.h5$")
LIVE_S = 5.0  # a file touched within this time may be in the middle of a flush: read it again before calling it broken

Table = dict[str, np.ndarray]
"""Columns of equal length: float64, int64, uint8 or str. Beside the logged columns: file_role, file_rank, file_epoch, file_attempt."""


@dataclass(frozen=True)
class Lineage:
    """What the final weights were trained on: for each step, the epoch that trained it and the groups it consumed.

    A restored checkpoint of step s undoes the later steps of earlier epochs: those weights are gone.
    """

    steps: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # step -> (epoch, group ids)
    versions: dict[int, int] = field(default_factory=dict)  # step -> version it was trained at
    undone: int = 0  # steps trained and then undone by a restart

    @property
    def trained_twice(self) -> list[int]:
        """Groups that more than one step of the lineage consumed. Must be empty."""
        return sorted(g for g, n in Counter(g for _, groups in self.steps.values() for g in groups).items() if n > 1)

    @property
    def trained_groups(self) -> dict[int, int]:
        """Group id -> step."""
        return {g: step for step, (_, groups) in self.steps.items() for g in groups}


@dataclass(frozen=True)
class RunData:
    """One run as read. `attempts[i]`: number, begin (attempt.json) and exit (exit.json) of one start of the job."""

    path: Path
    config: MilesConfig
    finished: bool
    attempts: tuple[dict[str, Any], ...]
    epochs: dict[str, int]
    files: tuple[dict[str, Any], ...]  # path, role, rank, epoch, attempt, started, last row
    unreadable: tuple[str, ...]
    tables: dict[str, Table]
    lineage: Lineage
    buffer: BufferState
    versions_on_disk: tuple[int, ...]


def read_run(path: str | Path) -> RunData:
    """Read a run directory (or a link to one). Raises ConfigError when it is not one."""
    run = RunDir(path)
    tables: dict[str, list[Table]] = {}
    files, unreadable = [], []
    for file in sorted([*run.path.glob("attempts/*/logs/*.h5"), *run.path.glob("pools/*/logs/*.h5")]):
        match = _LOG_NAME.search(file.name)
        if not match:
            unreadable.append(f"{file.relative_to(run.path)}: not a log name (<role>-<rank>.e<epoch>.h5)")
            continue
        attempt = int(file.parts[-3]) if file.parts[-4] == "attempts" else 0  # a pool belongs to no attempt; the numbers of its ranks tell it apart
        origin = {"role": match["role"], "rank": int(match["rank"]), "epoch": int(match["epoch"]), "attempt": attempt}
        found, attrs, errors = read_log(file)
        unreadable += [f"{file.relative_to(run.path)}: {e}" for e in errors]
        if found is None:
            continue
        last = max((float(t["time"].max()) for t in found.values() if len(t.get("time", ()))), default=None)
        files.append({"path": str(file.relative_to(run.path)), **origin, "started": attrs.get("started"), "last": last})
        for name, table in found.items():
            n = len(next(iter(table.values())))
            tables.setdefault(name, []).append({**table, **{f"file_{k}": np.full(n, v) for k, v in origin.items()}})
    view = BufferView(run)
    view.poll()
    return RunData(
        path=run.path,
        config=run.config,
        finished=run.finished,
        attempts=tuple(_attempt(run, n, unreadable) for n in run.attempts()),
        epochs={r.value: run.current_epoch(r) for r in Role},
        files=tuple(files),
        unreadable=tuple(unreadable),
        tables={name: concatenate(parts) for name, parts in tables.items()},
        lineage=read_lineage(run),
        buffer=view.state,
        versions_on_disk=tuple(sorted(int(p.name[1:]) for p in run.weights_dir.glob("v*") if p.name[1:].isdigit())),
    )


def read_log(path: Path) -> tuple[dict[str, Table] | None, dict[str, Any], list[str]]:
    """(tables or None, attributes, errors) of one log file. A table that cannot be read is an error; the others are kept."""
    for attempt in range(3):
        result = _read_log(path)
        if not result[2] or attempt == 2 or time.time() - path.stat().st_mtime > LIVE_S:
            return result
        time.sleep(0.3)
    return result


def _read_log(path: Path) -> tuple[dict[str, Table] | None, dict[str, Any], list[str]]:
    tables, errors = {}, []
    try:
        with h5py.File(path, "r", locking=False) as f:
            attrs = dict(f.attrs)
            for name, data in f.get("tables", {}).items():
                try:
                    tables[name] = _columns(data[...])
                except (OSError, RuntimeError, ValueError) as e:
                    errors.append(f"table {name} cannot be read: {e}")
    except (OSError, RuntimeError, KeyError) as e:
        size = path.stat().st_size
        return None, {}, [f"cannot be opened ({size} bytes): {e}"]
    return tables, attrs, errors


def _columns(rows: np.ndarray) -> Table:
    return {
        name: np.char.decode(rows[name], "utf-8", "replace") if rows.dtype[name].kind == "S" else rows[name] for name in rows.dtype.names
    }


def concatenate(parts: list[Table]) -> Table:
    """One table of several, ordered by time. A column that some files lack is NaN (or '') in their rows."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    out = {}
    for name in names:
        kinds = [part[name].dtype.kind for part in parts if name in part]
        empty = "" if "U" in kinds else np.nan
        out[name] = np.concatenate([part[name] if name in part else np.full(len(next(iter(part.values()))), empty) for part in parts])
    order = np.argsort(out["time"], kind="stable")
    return {name: column[order] for name, column in out.items()}


def read_lineage(run: RunDir) -> Lineage:
    """Fold the trainer's journals, oldest epoch first."""
    steps: dict[int, tuple[int, tuple[int, ...]]] = {}
    versions: dict[int, int] = {}
    undone = 0
    journals = {int(p.name.split(".")[1][1:]): p for p in (run.buffer_dir / "journal").glob(f"{Role.TRAINER.value}.e*.log")}
    for epoch in sorted(journals):
        for record in read_journal(journals[epoch]):
            if record["kind"] == "restore":
                for step in [s for s in steps if s > record["step"]]:
                    del steps[step], versions[step]
                    undone += 1
            elif record["kind"] == "trained":
                steps[record["step"]] = (epoch, tuple(record["groups"]))
                versions[record["step"]] = record["version"]
    return Lineage(steps, versions, undone)


def _attempt(run: RunDir, number: int, unreadable: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"number": number, "begin": {}, "exit": {}}
    for key, name in (("begin", "attempt.json"), ("exit", "exit.json")):
        path = run.attempt_dir(number) / name
        if not path.is_file():
            continue
        try:
            out[key] = json.loads(path.read_text())
        except ValueError as e:
            unreadable.append(f"{path.relative_to(run.path)}: not JSON: {e}")
    return out
