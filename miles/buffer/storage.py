"""Where trajectories lie on disk.

    parts/e000002.node7.4711.0000.seg      finished samples, each with all its leaves (miles.buffer.segments, miles.buffer.frames)
    groups/e000002.node7.4711.0000.seg     sealed groups: where their samples lie, and the summaries of their trajectories by (sample, leaf)

A sealed group is one line with a checksum, appended by the rollout leader to a file of its own. The record in the journal says where it is, and is what makes it
believed: a line without one, whole or torn, was left by a leader killed while it sealed, and the next leader seals again, into its own file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from miles.buffer.files import UNREADABLE, OpenFiles
from miles.buffer.frames import Header, Place, damaged, encode_frame, read_header, summary
from miles.buffer.segments import SegmentReader, SegmentWriter, Source, Written
from miles.buffer.state import SealedAt
from miles.core import Trajectory
from miles.rundir.journal import decode, encode

if TYPE_CHECKING:
    from miles.buffer.state import BufferState

PARTS_BYTES = 64 << 20  # of a segment: of 10 GB kept there are 160, and one that is not full for each writer
SEALED_BYTES = 16 << 20  # about 6,000 groups of 8 samples: of 100,000 groups 17


class Stored(msgspec.Struct, frozen=True):
    """Where one trajectory of a sealed group lies: which leaf of which frame."""

    group: int
    place: Place
    leaf: int


class Sealed(msgspec.Struct, frozen=True):
    """A sealed group: where its samples lie, and of each trajectory the scalars, `oldest_version`, `routes_shape` ([L, K] or None) and `length`, in the order of
    (sample, leaf): what planning a step needs, without reading arrays."""

    group: int
    places: list[Place]
    summaries: list[dict]

    @property
    def trajectories(self) -> list[Stored]:
        """In the order of the summaries."""
        places = {p.sample: p for p in self.places}
        return [Stored(self.group, places[s["sample"]], s["leaf"]) for s in self.summaries]


class _Named(msgspec.Struct, frozen=True):
    """Of a sealed group its number alone."""

    group: int


class Part(msgspec.Struct, frozen=True):
    """A finished sample: where it lies, and the summaries of its leaves."""

    place: Place
    summaries: list[dict]


def parts_dir(buffer_dir: Path) -> Path:
    return buffer_dir / "parts"


def groups_dir(buffer_dir: Path) -> Path:
    return buffer_dir / "groups"


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
        _writer = (key, SegmentWriter(parts_dir(buffer_dir), source, PARTS_BYTES, fence))
    return _writer[1].append(frame)


class Parts:
    """The finished samples of a run, by group. `poll` looks for new ones in all segments, `look_up` for those of one group where their writers say that they are."""

    def __init__(self, buffer_dir: Path, source: Source | None = None):
        """`source`: take what all others have left up to now, and from then on the samples of this one alone, and of those that are followed: what an
        older process, which the fence has not reached yet, still appends is not seen."""
        folder = parts_dir(buffer_dir)
        self._reader, self._files, self._sources = SegmentReader(folder), OpenFiles(folder), source and {source}
        self._told: dict[int, dict[int, Written]] = {}  # group -> sample -> where its writer says that it is
        self._forgotten: set[int] = set()  # groups of which nothing is kept any more
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
        """Those of `samples` that are there. All segments are looked through where some are not found without."""
        if not self._look_up(group_id, samples):
            self.poll()
        found = self.groups.get(group_id, {})
        return {s: found[s] for s in sorted(samples) if s in found}

    def told(self, group_id: int, sample: int, written: Written) -> None:
        """The writer of a finished sample says where it is. No listing has to show it then, as that of an NFS client does a new segment only late."""
        if group_id not in self._forgotten:
            self._told.setdefault(group_id, {})[sample] = written

    def all_of(self, group_id: int) -> dict[int, Part]:
        """The samples of a group that are there, also those of which nobody has said so."""
        self.poll()
        self._look_up(group_id, ())
        return self.groups.get(group_id, {})

    def expect(self, group_id: int) -> None:
        """A group that begins."""
        self._forgotten.discard(group_id)

    def forget(self, group_id: int) -> None:
        self.groups.pop(group_id, None)
        self._told.pop(group_id, None)
        self._forgotten.add(group_id)

    def close(self) -> None:
        self._files.close()

    def _look_up(self, group_id: int, samples: Sequence[int]) -> bool:
        """Read those of `samples` whose writers said where they are. Whether all are known then."""
        for sample, written in self._told.get(group_id, {}).items():
            with suppress(*UNREADABLE):  # it is gone, and counted as that
                header, place = self._files.read(written.segment, lambda fd, at=written: _frame_at(fd, at))
                if (header.group, header.sample) == (group_id, sample):
                    self._add(header, place)
        return self.groups.get(group_id, {}).keys() >= set(samples)

    def _take(self, sources: set[Source] | None) -> None:
        for header, place in self._reader.poll(sources):
            if header.group not in self._forgotten:
                self._add(header, place)

    def _add(self, header: Header, place: Place) -> None:
        self.groups.setdefault(header.group, {})[header.sample] = Part(place, [summary(leaf) for leaf in header.leaves])


def _frame_at(fd: int, written: Written) -> tuple[Header, Place]:
    found = read_header(fd, written.segment, written.offset, os.fstat(fd).st_size)
    if found is None:
        raise damaged(f"{written.segment}, byte {written.offset}")
    return found


def sealed_writer(buffer_dir: Path, source: Source, fence: Callable[[], None]) -> SegmentWriter:
    """What sealed groups are appended by: one for each leader."""
    return SegmentWriter(groups_dir(buffer_dir), source, SEALED_BYTES, fence)


def seal(writer: SegmentWriter, group_id: int, parts: Mapping[int, Part]) -> SealedAt:
    """Make a sealed group durable. Nobody believes it before the journal says where it is."""
    samples = sorted(parts)
    sealed = Sealed(group_id, [parts[s].place for s in samples], [i for s in samples for i in parts[s].summaries])
    line = encode(sealed)
    return SealedAt(group_id, *writer.append([line]), len(line))


def read_sealed(fd: int, at: SealedAt) -> Sealed:
    """The sealed group, of its open file. Raises StructureError (cause `digest`): torn or damaged."""
    line = os.pread(fd, at.size, at.offset)
    sealed = decode(line, Sealed) if len(line) == at.size else None
    if sealed is None or sealed.group != at.group:
        raise damaged(f"{at.segment}, byte {at.offset}")
    return sealed


def sealed_in(path: Path) -> set[int]:
    """The groups of which a whole record lies in this segment, whether or not a journal names it."""
    return {found.group for line in path.read_bytes().split(b"\n") if (found := decode(line, _Named)) is not None}


def stored_groups(buffer_dir: Path, state: BufferState) -> list[int]:
    """Groups that are or were ready and of which every file is there. Lists two folders."""
    sealed, parts = (set(os.listdir(folder)) for folder in (groups_dir(buffer_dir), parts_dir(buffer_dir)))
    lost = {g for segment, groups in state.in_segment.items() if segment not in parts for g in groups}
    return sorted(g for segment, groups in state.in_sealed.items() if segment in sealed for g in set(groups) - lost if state.groups[g].sealed.segment == segment)
