"""`BufferView`: follow every journal of a run and keep the folded state current."""

from __future__ import annotations

import os

from miles.buffer.state import BufferState
from miles.core import Role
from miles.rundir import JournalReader, JournalWriter, RunDir

_ORDER = {Role.ROLLOUT.value: 0, Role.TRAINER.value: 1}


class BufferView:
    """Reads journals `<role>.e<epoch>.log` in (role, epoch) order. `poll` lists one small directory (an entry per epoch) and reads
    what was added; a wake-up message tells when it is worth calling. `poll_own` reads what this process has appended itself, and opens nothing.

    A record of an older epoch that appears after those of a newer one (its writer was past its check when it was fenced) has its place before them:
    then all journals are folded anew, into the same `state`, so that every reader comes to the same state whenever it looked.
    """

    def __init__(self, run: RunDir):
        self._dir = run.buffer_dir / "journal"
        self._readers: dict[str, JournalReader] = {}
        self._newest: dict[int, int] = {}  # role -> newest epoch of which records were applied
        self._own: JournalWriter | None = None
        self.state = BufferState()

    def own(self, journal: JournalWriter) -> None:
        """`journal` is appended to by this process alone, and has not been looked at yet."""
        self._own = journal
        self._readers[journal.path.name] = journal.reader()

    def poll(self) -> int:
        """Apply new records; returns how many there were."""
        return self._apply(sorted((name for name in os.listdir(self._dir) if name.endswith(".log")), key=_epoch_order))

    def poll_own(self) -> int:
        return self._apply([self._own.path.name])

    def _apply(self, names: list[str]) -> int:
        added, late = [], False
        for name in names:
            records = self._reader(name).poll()
            role, epoch = _epoch_order(name)
            late |= bool(records) and epoch < self._newest.get(role, epoch)
            added += records
            if records:
                self._newest[role] = max(epoch, self._newest.get(role, epoch))
        if late:
            names = sorted(self._readers, key=_epoch_order)
            self._readers.clear()
            self.state.clear()
        for record in added if not late else [r for name in names for r in self._reader(name).poll()]:
            self.state.apply(record)
        return len(added)

    def _reader(self, name: str) -> JournalReader:
        if name not in self._readers:
            self._readers[name] = self._own.reader() if self._own is not None and name == self._own.path.name else JournalReader(self._dir / name)
        return self._readers[name]


def journal_name(role: Role, epoch: int) -> str:
    return f"{Role(role).value}.e{epoch:06d}.log"


def _epoch_order(name: str) -> tuple[int, int]:
    role, epoch, _ = name.split(".")
    return _ORDER[role], int(epoch[1:])
