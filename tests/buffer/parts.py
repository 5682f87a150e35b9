"""What lies on disk, and sealing it without a leader."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from miles.buffer import GroupReader
from miles.buffer.storage import Parts, Sealed, seal
from miles.core import Trajectory
from miles.rundir import RunDir


def finished_parts(buffer_dir: Path) -> dict[int, list[int]]:
    """Samples on disk: group id -> samples. Reads all segments."""
    return {group: sorted(parts) for group, parts in Parts(buffer_dir).groups.items()}


def seal_parts(buffer_dir: Path, group_id: int, samples: Sequence[int]) -> Sealed:
    """Seal these samples, from what is on disk. Raises KeyError: one is not there."""
    there = Parts(buffer_dir).groups.get(group_id, {})
    return seal(buffer_dir, group_id, {s: there[s] for s in samples})


def read_slice(run: RunDir, group: int, index: int, layers=None, rows=None) -> np.ndarray:
    """Routes of some layers at `rows(T - 1)`."""
    with GroupReader(run.buffer_dir) as reader:
        return reader.slice(group, index, layers, rows)[1]


def read_one(run: RunDir, group: int, index: int) -> Trajectory:
    with GroupReader(run.buffer_dir) as reader:
        return reader.trajectory(group, index)
