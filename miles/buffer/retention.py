"""How long what is stored stays: groups by bytes, files by the groups in them."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from miles.buffer.segments import SegmentName, Source, read_segment
from miles.buffer.state import BufferState, Status
from miles.buffer.storage import groups_dir, parts_dir, sealed_in, stored_groups
from miles.rundir import RunDir

_CLOSED = (Status.TRAINED, Status.DROPPED)


class Retention:
    """Keeps the newest closed groups (trained, dropped), as many as the bytes allow, and every group that is not closed. A file of parts or of sealed groups goes when
    nobody appends to it and no group in it is kept: groups go with their last file, and files hold groups of about the same time.

    Which groups are kept after a restart follows from the journals and from the files that are there.
    """

    def __init__(self, run: RunDir, state: BufferState):
        self._run, self._state = run, state
        self._new = [g for g in stored_groups(run.buffer_dir, state) if state.groups[g].status in _CLOSED]  # closed, and not looked at yet
        self._kept = set(self._new)  # closed groups that are not given up
        self._oldest: list[tuple[int, int, int]] = []  # heap of (step, group, bytes) of those that no checkpoint needs
        self._bytes = 0  # of these
        self._dropped = -1  # groups, when segments were last looked at
        self._folders = [_Folder(parts_dir(run.buffer_dir), _groups_of_parts, lambda: state.in_segment),
                         _Folder(groups_dir(run.buffer_dir), _groups_sealed, lambda: state.in_sealed)]

    def closed(self, groups: Iterable[int]) -> None:
        """These are trained or dropped now."""
        new = set(groups) - self._kept
        self._new += new
        self._kept |= new

    def give_up(self, up_to_step: int, most_bytes: float) -> int:
        """Give up the oldest groups trained at or before `up_to_step` beyond so many bytes, dropped ones first, and remove the files of which every group is given up.
        Returns how many groups. Looks at the groups that are new since the last call."""
        later, count = [], 0
        for group_id in self._new:
            g = self._state.groups[group_id]
            if g.trained and g.step > up_to_step:
                later.append(group_id)
            else:
                heapq.heappush(self._oldest, (g.step if g.trained else 0, group_id, g.bytes))
                self._bytes += g.bytes
        self._new = later
        while self._oldest and self._bytes > most_bytes:
            _, group_id, size = heapq.heappop(self._oldest)
            self._bytes -= size
            self._kept.discard(group_id)
            count += 1
        epoch_of, dropped = cache(self._run.pool_epoch), self._state.counts()[Status.DROPPED]
        for folder in self._folders:
            folder.remove(epoch_of, self._needed, looked_at=not count and dropped == self._dropped)
        self._dropped = dropped
        return count

    def _needed(self, group_id: int) -> bool:
        """Its bytes may still be asked for, or are kept for analysis. A group that was dropped before it was sealed has nothing to keep."""
        g = self._state.groups.get(group_id)
        return g is None or g.status not in _CLOSED or group_id in self._kept


class _Folder:
    """The segments of one folder, and for which groups each is kept."""

    def __init__(self, path: Path, groups_in: Callable[[Path, SegmentName], set[int]], by_record: Callable[[], dict[str, list[int]]]):
        """`groups_in`: groups of which a segment itself says that they are in it; `by_record`: those of which the journals say so."""
        self._path, self._groups_in, self._by_record = path, groups_in, by_record
        self._seen: set[str] = set()  # every file that was listed last time
        self._newest: dict[tuple[Source, str], int] = {}  # number of a writer's newest segment
        self._growing: list[SegmentName] = []  # to which their writers may still append
        self._held: dict[SegmentName, list[int]] = {}  # of the others: groups in it, but for some that are not needed any more

    def remove(self, epoch_of: Callable[[int], int], needed: Callable[[int], bool], looked_at: bool) -> None:
        """Remove those to which nobody appends and whose groups are none of them `needed`. `looked_at`: what was needed in the last call is needed still."""
        found = set(os.listdir(self._path))
        for name in filter(None, map(SegmentName.parse, found - self._seen)):
            writer = (name.source, name.writer)
            self._newest[writer] = max(name.number, self._newest.get(writer, 0))
            self._growing.append(name)
        self._seen = found
        ended = {name for name in self._growing if name.source.epoch < epoch_of(name.source.pool) or name.number < self._newest[name.source, name.writer]}
        self._growing = [name for name in self._growing if name not in ended]
        for name in [*ended, *(() if looked_at else [name for name in self._held if not self._is_needed(name, needed)])]:
            # Once more when it seems to go: what a fenced process appended since may be of a group that is played or sealed by a leader that started after that.
            self._held[name] = list(self._groups_in(self._path, name).union(self._by_record().get(str(name), ())))
            if not self._is_needed(name, needed):
                (self._path / str(name)).unlink(missing_ok=True)
                del self._held[name]

    def _is_needed(self, name: SegmentName, needed: Callable[[int], bool]) -> bool:
        """Looks for one that is, and at no group again that is not."""
        held = self._held[name]
        while held and not needed(held[-1]):
            held.pop()
        return bool(held)


def _groups_of_parts(folder: Path, name: SegmentName) -> set[int]:
    return {header.group for header, _ in read_segment(folder, name)}


def _groups_sealed(folder: Path, name: SegmentName) -> set[int]:
    return sealed_in(folder / str(name))
