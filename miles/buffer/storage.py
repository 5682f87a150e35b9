"""Where trajectories lie on disk.

    parts/e000002.node7.4711.0000.seg      segments: finished samples, each with all its leaves (miles.buffer.segments, miles.buffer.frames)
    groups/<2 hex>/g00000012.json          sealed group: where its samples lie, and the summaries of their trajectories by (sample, leaf)

A sealed group is one line with a checksum, made by exclusive creation: the record in the journal is what makes it believed, so a torn one, left by a
leader killed while it wrote, is known by its checksum and made again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from miles.buffer.frames import Header, Place, damaged, encode_frame, summary
from miles.buffer.segments import SegmentReader, SegmentWriter, Source, Written, find_frame
from miles.core import StructureError, Trajectory
from miles.rundir.journal import decode, encode
from miles.rundir.publish import create_bytes, explain_os_errors, fsync_dir

UNREADABLE = (StructureError, OSError)  # what a missing, torn or damaged file raises


class Sealed(msgspec.Struct, frozen=True):
    """A sealed group. `summaries`: of each trajectory, as of `read_summaries`."""

    group: int
    places: list[Place]
    summaries: list[dict]


class Part(msgspec.Struct, frozen=True):
    """A finished sample: where it lies, and the summaries of its leaves."""

    place: Place
    summaries: list[dict]


def parts_dir(buffer_dir: Path) -> Path:
    return buffer_dir / "parts"


def group_path(buffer_dir: Path, group_id: int) -> Path:
    """Sealed file of a group; 256 hashed folders keep directories small."""
    name = f"g{group_id:08d}"
    return buffer_dir / "groups" / xxhash.xxh32_hexdigest(name.encode())[:2] / f"{name}.json"


FIRST = Source(pool=0, epoch=0)
_writer: tuple[tuple, SegmentWriter] | None = None  # of this process: it makes samples of one run and epoch


def write_part_file(buffer_dir: Path, leaves: Sequence[Trajectory], source: Source = FIRST, fence=lambda: None) -> Written:
    """Append one sample, all its leaves at once, to a segment of this process. Of a sample written twice the last counts.

    `fence` raises when the epoch is over. Raises StructureError (cause `leaves`): these are not the leaves of one sample.
    """
    global _writer
    frame = encode_frame(leaves)
    key = (os.getpid(), buffer_dir, source)
    if _writer is None or _writer[0] != key:
        if _writer is not None and _writer[0][0] == key[0]:
            _writer[1].close()
        _writer = (key, SegmentWriter(parts_dir(buffer_dir), source, fence))
    return _writer[1].append(frame)


class Parts:
    """The finished samples of a run, by group. `poll` looks for new ones."""

    def __init__(self, buffer_dir: Path, source: Source | None = None):
        """`source`: take what all others have left up to now, and from then on the samples of this one alone, and of those that are followed: what an
        older process, which the fence has not reached yet, still appends is not seen."""
        self._folder = parts_dir(buffer_dir)
        self._reader, self._sources = SegmentReader(self._folder), source and {source}
        self._told: dict[int, dict[int, Written]] = {}  # group -> sample -> where its writer says that it is
        self.groups: dict[int, dict[int, Part]] = {}
        self._take(None)

    def poll(self) -> None:
        self._take(self._sources)

    def follow(self, source: Source) -> None:
        """Take this one's samples too, those that it has written before as well."""
        self._sources.add(source)
        self.poll()

    def leave(self, source: Source) -> None:
        """Take what is there of this one's samples, and none that it writes from now on."""
        self.poll()
        self._sources.discard(source)

    def of(self, group_id: int, samples: Sequence[int]) -> dict[int, Part]:
        """Those of `samples` that are there."""
        found = self.groups.get(group_id, {})
        return {s: found[s] for s in sorted(samples) if s in found}

    def told(self, group_id: int, sample: int, written: Written) -> None:
        """The writer of a finished sample says where it is: there it is looked for, when no listing has shown it."""
        self._told.setdefault(group_id, {})[sample] = written

    def look_up(self, group_id: int, samples: Sequence[int]) -> None:
        """Those of `samples` that are not there yet, where their writers say that they are."""
        for sample in (set(samples) - self.groups.get(group_id, {}).keys()) & self._told.get(group_id, {}).keys():
            with contextlib.suppress(OSError):  # it is gone, and counted as that
                if (found := find_frame(self._folder, self._told[group_id][sample])) and (found[0].group, found[0].sample) == (group_id, sample):
                    self._add(*found)

    def forget(self, group_id: int) -> None:
        self.groups.pop(group_id, None)
        self._told.pop(group_id, None)

    def _take(self, sources: set[Source] | None) -> None:
        for header, place in self._reader.poll(sources):
            self._add(header, place)

    def _add(self, header: Header, place: Place) -> None:
        self.groups.setdefault(header.group, {})[header.sample] = Part(place, [summary(leaf) for leaf in header.leaves])


def seal(buffer_dir: Path, group_id: int, parts: Mapping[int, Part]) -> Sealed:
    """Make the sealed file of a group and return what it holds: what is there already, when a process of an older epoch got there first."""
    samples = sorted(parts)
    sealed = Sealed(group_id, [parts[s].place for s in samples], [i for s in samples for i in parts[s].summaries])
    final, data = group_path(buffer_dir, group_id), encode(msgspec.to_builtins(sealed))
    try:
        create_bytes(final, data)
    except FileNotFoundError:  # the first of its folder
        with explain_os_errors(final):
            final.parent.mkdir(exist_ok=True)
            fsync_dir(final.parent.parent)
        return seal(buffer_dir, group_id, parts)
    except FileExistsError:
        try:
            return read_sealed(buffer_dir, group_id)
        except StructureError:
            final.unlink()  # torn, and believed by no record
            return seal(buffer_dir, group_id, parts)
    return sealed


def read_sealed(buffer_dir: Path, group_id: int) -> Sealed:
    """Raises FileNotFoundError; StructureError (cause `digest`): torn or damaged."""
    path = group_path(buffer_dir, group_id)
    record = decode(path.read_bytes())
    if record is None or record["group"] != group_id:
        raise damaged(str(path))
    return msgspec.convert(record, Sealed)


def read_summaries(buffer_dir: Path, group_id: int) -> list[dict]:
    """Scalars of each trajectory plus `oldest_version`, `routes_shape` ([L, K] or None) and `length`, without reading arrays: what
    planning a step needs."""
    return read_sealed(buffer_dir, group_id).summaries


def stored_groups(buffer_dir: Path) -> list[int]:
    """Every sealed group on disk. Lists all folders."""
    return [int(path.stem[1:]) for path in (buffer_dir / "groups").glob("*/g*.json")]
