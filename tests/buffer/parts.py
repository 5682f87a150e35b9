"""What lies on disk, and sealing it without a leader."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from miles.buffer import BufferState, BufferView, GroupReader, Sealed, SealedAt, read_group
from miles.buffer.storage import FIRST, Parts, groups_dir, seal, sealed_writer
from miles.core import Group, Trajectory
from miles.rundir import RunDir


def finished_parts(buffer_dir: Path) -> dict[int, list[int]]:
    """Samples on disk: group id -> samples. Reads all segments."""
    return {group: sorted(parts) for group, parts in Parts(buffer_dir).groups.items()}


def seal_parts(buffer_dir: Path, group_id: int, samples: Sequence[int], source=FIRST) -> SealedAt:
    """Seal these samples, from what is on disk, into a segment of their own. Raises KeyError: one is not there."""
    there = Parts(buffer_dir).groups.get(group_id, {})
    writer = sealed_writer(buffer_dir, source, lambda: None)
    try:
        return seal(writer, group_id, {s: there[s] for s in samples})
    finally:
        writer.close()


def state_of(run: RunDir) -> BufferState:
    """What the journals say, read anew."""
    view = BufferView(run)
    view.poll()
    return view.state


def sealed_file(run: RunDir, group: int) -> Path:
    return groups_dir(run.buffer_dir) / state_of(run).groups[group].sealed.segment


def sealed_of(run: RunDir, group: int) -> Sealed:
    with GroupReader(run.buffer_dir) as reader:
        return reader.sealed(state_of(run).groups[group].sealed)


def group_of(run: RunDir, group: int) -> Group:
    """What is stored of a group that the journals call ready."""
    return read_group(run.buffer_dir, state_of(run).groups[group].sealed)


def read_slice(run: RunDir, group: int, index: int, layers=None, rows=None) -> np.ndarray:
    """Routes of some layers at `rows(T - 1)` of the group's `index`-th trajectory."""
    with GroupReader(run.buffer_dir) as reader:
        return reader.slice(sealed_of(run, group).trajectories[index], layers, rows)[1]


def read_one(run: RunDir, group: int, index: int) -> Trajectory:
    with GroupReader(run.buffer_dir) as reader:
        return reader.trajectory(sealed_of(run, group).trajectories[index])
