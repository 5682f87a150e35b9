"""`BufferView`: follow every journal of a run and keep the folded state current."""

from __future__ import annotations

from miles.buffer.state import BufferState
from miles.core import Role
from miles.rundir import JournalReader, RunDir

_ORDER = {Role.ROLLOUT.value: 0, Role.TRAINER.value: 1}


class BufferView:
    """Reads journals `<role>.e<epoch>.log` in (role, epoch) order. `poll` lists one small directory (an entry per epoch) and reads
    what was added; a wake-up message tells when it is worth calling."""

    def __init__(self, run: RunDir):
        self._dir = run.buffer_dir / "journal"
        self._readers: dict[str, JournalReader] = {}
        self.state = BufferState()

    def poll(self) -> int:
        """Apply new records; returns how many there were."""
        count = 0
        for path in sorted(self._dir.glob("*.log"), key=_epoch_order):
            reader = self._readers.setdefault(path.name, JournalReader(path))
            for record in reader.poll():
                self.state.apply(record)
                count += 1
        return count


def journal_name(role: Role, epoch: int) -> str:
    return f"{Role(role).value}.e{epoch:06d}.log"


def _epoch_order(path):
    role, epoch, _ = path.name.split(".")
    return _ORDER[role], int(epoch[1:])
