"""`BufferView`: follow every journal of a run and keep the folded state current."""

from __future__ import annotations

from pathlib import Path

from miles.buffer.state import BufferState
from miles.core import Role
from miles.rundir import JournalReader, RunDir

_ORDER = {Role.ROLLOUT.value: 0, Role.TRAINER.value: 1}


class BufferView:
    """Reads journals `<role>.e<epoch>.log` in (role, epoch) order. `poll` lists one small directory (an entry per epoch) and reads
    what was added; a wake-up message tells when it is worth calling.

    A record of an older epoch that appears after those of a newer one (its writer was past its check when it was fenced) has its place before them:
    then all journals are folded anew, into the same `state`, so that every reader comes to the same state whenever it looked.
    """

    def __init__(self, run: RunDir):
        self._dir = run.buffer_dir / "journal"
        self._readers: dict[str, JournalReader] = {}
        self._newest: dict[int, int] = {}  # role -> newest epoch of which records were applied
        self.state = BufferState()

    def poll(self) -> int:
        """Apply new records; returns how many there were."""
        added, late = [], False
        paths = sorted(self._dir.glob("*.log"), key=_epoch_order)
        for path in paths:
            records = self._readers.setdefault(path.name, JournalReader(path)).poll()
            role, epoch = _epoch_order(path)
            late |= bool(records) and epoch < self._newest.get(role, epoch)
            added += records
            if records:
                self._newest[role] = max(epoch, self._newest.get(role, epoch))
        if late:
            self.state.clear()
            self._readers = {path.name: JournalReader(path) for path in paths}
        for record in added if not late else (r for path in paths for r in self._readers[path.name].poll()):
            self.state.apply(record)
        return len(added)


def journal_name(role: Role, epoch: int) -> str:
    return f"{Role(role).value}.e{epoch:06d}.log"


def _epoch_order(path: Path) -> tuple[int, int]:
    role, epoch, _ = path.name.split(".")
    return _ORDER[role], int(epoch[1:])
