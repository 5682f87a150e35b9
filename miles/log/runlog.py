"""`RunLog`: rows of wide tables, appended by a background thread, flushed in blocks.

File format: HDF5, earliest library version, no SWMR, gzip. Each table is one compound dataset `/tables/NAME` whose first row fixes the
columns (float -> f8, int -> i8, bool -> u1, str -> S64; `time`, unix seconds f8, comes first). After kill -9 the file opens with all
rows up to the last flush; live readers use `h5py.File(path, "r", locking=False)`. `h5dump` reads it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from miles.core.at_work import at_work
from miles.rundir.publish import explain_os_errors

FLUSH_S = 1.0
_STOP = object()


class RunLog:
    """One process's log. `row` never waits for the disk; `close` does.

    A failing disk is not silent: the writer thread's error (EnvironmentFault when the disk is full) is raised by the next `row`.
    """

    def __init__(self, path: Path, **attrs: Any):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, args=(path, attrs), name="runlog", daemon=True)
        self._thread.start()

    def row(self, table: str, **values: float | int | bool | str) -> None:
        """Append one row. The first row of a table fixes its columns; later rows must have the same names."""
        if self._error:
            raise self._error
        self._queue.put((table, {"time": time.time(), **values}))

    @contextlib.contextmanager
    def span(self, name: str, **attrs: Any):
        """Time a block; one row of table `spans` (time = start, name, seconds, attrs as JSON)."""
        start = time.time()
        try:
            yield
        finally:
            self.row("spans", start=start, name=name, seconds=time.time() - start, attrs=json.dumps(attrs)[:64] if attrs else "")

    def close(self) -> None:
        self._queue.put(_STOP)
        self._thread.join()
        if self._error:
            raise self._error

    # -- writer thread -------------------------------------------------------------------------------------------------------
    def _write(self, path: Path, attrs: dict[str, Any]) -> None:
        try:
            with explain_os_errors(path), h5py.File(path, "w", libver="earliest", locking=False) as f:
                f.attrs.update({"started": time.time(), **attrs})
                f.create_group("tables")
                f.flush()
                done = False
                while not done:
                    rows, done = self._collect()
                    with at_work(f"writing the log {path}"):
                        for table, block in rows.items():
                            _append(f["tables"], table, block)
                        if rows:
                            f.flush()
        except BaseException as e:  # handed to the next caller of row() or close()
            self._error = e

    def _collect(self) -> tuple[dict[str, list[dict]], bool]:
        """Wait for a first row, then gather for FLUSH_S so that a block is written at once."""
        rows: dict[str, list[dict]] = {}
        deadline = None
        while True:
            try:
                item = self._queue.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return rows, False
            if item is _STOP:
                return rows, True
            rows.setdefault(item[0], []).append(item[1])
            deadline = deadline or time.monotonic() + FLUSH_S


def _append(tables: h5py.Group, name: str, rows: list[dict[str, Any]]) -> None:
    if name not in tables:
        dtype = np.dtype([(k, _column_type(v)) for k, v in rows[0].items()])
        tables.create_dataset(name, shape=(0,), maxshape=(None,), dtype=dtype, chunks=(256,), compression="gzip", compression_opts=1)
    data = tables[name]
    block = np.zeros(len(rows), dtype=data.dtype)
    for i, row in enumerate(rows):
        if row.keys() != set(data.dtype.names):
            raise ValueError(f"log table {name}: row has columns {sorted(row)}, the table has {sorted(data.dtype.names)}")
        for key, value in row.items():
            block[key][i] = value.encode() if isinstance(value, str) else value
    data.resize(len(data) + len(rows), axis=0)
    data[-len(rows):] = block


def _column_type(value: Any) -> str:
    if isinstance(value, str):
        return "S64"
    if isinstance(value, (bool, np.bool_)):
        return "u1"
    if isinstance(value, (int, np.integer)):
        return "i8"
    return "f8"
