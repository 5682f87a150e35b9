"""Sealed groups, read by several threads: a shared file system answers late, and decompressing leaves the interpreter free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from miles.buffer.frames import decode_leaf, read_frame
from miles.buffer.storage import Sealed, parts_dir, read_sealed
from miles.core import Group, Trajectory

if TYPE_CHECKING:
    from miles.buffer.routes import Ranges

THREADS = 4
K, V = TypeVar("K"), TypeVar("V")


class GroupReader:
    """Reads trajectories of sealed groups, and opens each file once. Used as a context manager; its methods may be called from any thread.

    >>> with GroupReader(run.buffer_dir) as reader:
    ...     found = reader.trajectories([(7, 0), (7, 1)])
    """

    def __init__(self, buffer_dir: Path):
        self._dir = buffer_dir
        self._sealed = _Once(lambda group: read_sealed(buffer_dir, group))
        self._segments = _Once(lambda name: os.open(parts_dir(buffer_dir) / name, os.O_RDONLY))
        self._threads = ThreadPoolExecutor(THREADS, "buffer-read")

    def __enter__(self) -> GroupReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()
        for fd in self._segments.made():
            os.close(fd)

    def sealed(self, group_id: int) -> Sealed:
        """Raises FileNotFoundError; StructureError (cause `digest`): torn or damaged."""
        return self._sealed(group_id)

    def slice(self, group_id: int, index: int, layers: slice | Sequence[int] | None = None,
              rows: Callable[[int], Ranges] | None = None) -> tuple[Trajectory, np.ndarray | None]:
        """The `index`-th trajectory of a sealed group (index counts stored trajectories, not sample numbers) without its routes, verified, and of its routes
        those of the MoE layers `layers` (0 .. L-1) at the rows `rows(T - 1)`, all by default; only these are read and verified.

        Raises FileNotFoundError; StructureError (cause `digest`) when bytes do not match.
        """
        sealed = self.sealed(group_id)
        wanted = sealed.summaries[index]
        place = next(p for p in sealed.places if p.sample == wanted["sample"])
        fd = self._segments(place.segment)
        return decode_leaf(fd, place, read_frame(fd, parts_dir(self._dir), place, group_id).leaves[wanted["leaf"]], layers, rows)

    def slices(self, wanted: Iterable[tuple[int, int]], layers: slice | Sequence[int] | None = None,
               rows: Callable[[int], Ranges] | None = None) -> list[Future[tuple[Trajectory, np.ndarray | None]]]:
        """`slice` of each (group, index), in this order, done in threads."""
        return [self._threads.submit(self.slice, group, index, layers, rows) for group, index in wanted]

    def trajectory(self, group_id: int, index: int) -> Trajectory:
        """The `index`-th trajectory of a sealed group, whole. Raises like `slice`."""
        trajectory, routes = self.slice(group_id, index)
        return replace(trajectory, routes=routes)

    def trajectories(self, wanted: Iterable[tuple[int, int]]) -> list[Future[Trajectory]]:
        """`trajectory` of each (group, index), in this order, done in threads."""
        return [self._threads.submit(self.trajectory, group, index) for group, index in wanted]


def read_group(buffer_dir: Path, group_id: int) -> Group:
    """A whole sealed group. Raises like `GroupReader.trajectory`."""
    with GroupReader(buffer_dir) as reader:
        found = reader.trajectories((group_id, n) for n in range(len(reader.sealed(group_id).summaries)))
        items = tuple(t.result() for t in found)
    return Group(group_id, items[0].task_id, items)


class _Once(Generic[K, V]):
    """What `make` returns for a key, made once also when threads ask at the same time. What it raises is not kept."""

    def __init__(self, make: Callable[[K], V]):
        self._make, self._found, self._lock = make, {}, threading.Lock()

    def __call__(self, key: K) -> V:
        with self._lock:
            if key not in self._found:
                self._found[key] = self._make(key)
            return self._found[key]

    def made(self) -> list[V]:
        return list(self._found.values())
