"""Sealed groups, read by several threads: a shared file system answers late, and decompressing leaves the interpreter free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from miles.buffer.files import OpenFiles
from miles.buffer.frames import decode_leaf, read_frame
from miles.buffer.state import SealedAt
from miles.buffer.storage import Sealed, Stored, groups_dir, parts_dir, read_sealed
from miles.core import Group, Trajectory

if TYPE_CHECKING:
    from miles.buffer.routes import Ranges

THREADS = 4


class GroupReader:
    """Reads sealed groups and trajectories of them. Files stay open (`miles.buffer.files`); its methods may be called from any thread. Used as a context manager, or closed.

    >>> with GroupReader(run.buffer_dir) as reader:
    ...     found = [reader.trajectory(stored) for stored in reader.sealed(state.groups[7].sealed).trajectories]
    """

    def __init__(self, buffer_dir: Path):
        self._sealed, self._parts = OpenFiles(groups_dir(buffer_dir)), OpenFiles(parts_dir(buffer_dir))
        self._threads = ThreadPoolExecutor(THREADS, "buffer-read")

    def __enter__(self) -> GroupReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown()
        self._sealed.close()
        self._parts.close()

    def sealed(self, at: SealedAt) -> Sealed:
        """Raises FileNotFoundError; StructureError (cause `digest`): torn or damaged."""
        return self._sealed.read(at.segment, lambda fd: read_sealed(fd, at))

    def slice(self, stored: Stored, layers: slice | Sequence[int] | None = None, rows: Callable[[int], Ranges] | None = None) -> tuple[Trajectory, np.ndarray | None]:
        """A trajectory (without its routes, unless all are read), verified, and of its routes those of the MoE layers `layers` (0 .. L-1) at the rows `rows(T - 1)`, all by default; only
        these are read and verified.

        Raises FileNotFoundError; StructureError (cause `digest`) when bytes do not match.
        """
        place = stored.place

        def read(fd: int) -> tuple[Trajectory, np.ndarray | None]:
            return decode_leaf(fd, place, read_frame(fd, place, stored.group).leaves[stored.leaf], layers, rows)

        return self._parts.read(place.segment, read)

    def slices(self, wanted: Iterable[Stored], layers: slice | Sequence[int] | None = None,
               rows: Callable[[int], Ranges] | None = None) -> list[Future[tuple[Trajectory, np.ndarray | None]]]:
        """`slice` of each, in this order, done in threads."""
        return [self._threads.submit(self.slice, stored, layers, rows) for stored in wanted]

    def trajectory(self, stored: Stored) -> Trajectory:
        """A trajectory, whole. Raises like `slice`."""
        return self.slice(stored)[0]

    def group(self, at: SealedAt) -> Group:
        """A whole sealed group. Raises like `slice`."""
        items = tuple(t.result() for t in [self._threads.submit(self.trajectory, stored) for stored in self.sealed(at).trajectories])
        return Group(at.group, items[0].task_id, items)


def read_group(buffer_dir: Path, at: SealedAt) -> Group:
    """A whole sealed group: `read_group(run.buffer_dir, view.state.groups[7].sealed)` with a `BufferView` that was polled. Raises like `GroupReader.slice`."""
    with GroupReader(buffer_dir) as reader:
        return reader.group(at)
