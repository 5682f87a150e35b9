"""What passes between a run and a pool: two journals for each epoch of the pool, and what they say together.

    RUN/pools/0001/e0002/out.log             written by the pool's leader: what its ranks say
    RUN/pools/0001/e0002/in.e000003.log      written by the run's rollout leader of epoch 3: what they are to do

They are messages that are kept, and no more: every trajectory is a part in the buffer, every weight version a folder. Each side knows that the other lives
by its journal growing, on a clock of its own: clocks of two hosts are never compared.

    in    {"kind": "beat"}
          {"kind": "assign", "number": "3.17", "rank": 1001, "message": {...}}     `message` is what a rank of the run's own job would get
          {"kind": "over", "number": "3.17"}                                       it was not answered in time, and is not this pool's any more
          {"kind": "order", "rank": 1001, "message": {...}}                        the same for all other messages
    out   {"kind": "beat"}
          {"kind": "up", "rank": 1001, "version": 4, "url": ..., "moved": [[group, sample, rank], ...]}
          {"kind": "down", "rank": 1001}
          {"kind": "held", "rank": 1001, "samples": [[group, sample, turns], ...]}
          {"kind": "finished", "numbers": ["3.17"], "cause": null, "part": ["p0001.e000002.node7.4711.0000.seg", 0]}     `part`: where it is, if it did not fail

An assignment has a number of its own, so that a leader that was started anew knows from the two journals, in whatever order they were written, what the pool
still runs, and goes on with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.rundir import JournalReader

POLL_S = 0.25  # how often either side looks for new records
BEAT_S = 2.0


@dataclass(frozen=True)
class Assigned:
    """A sample that was given to a rank of the pool."""

    group: int
    sample: int
    task: str
    rank: int


@dataclass
class PoolState:
    """What one epoch of a pool runs and serves: a fold over both journals, the run's first."""

    engines: dict[int, dict[str, Any]] = field(default_factory=dict)  # rank -> last `up` of its living engine
    running: dict[str, Assigned] = field(default_factory=dict)  # by number of the assignment
    done: list[tuple[Assigned, dict[str, Any]]] = field(default_factory=list)  # finished, their parts on disk, and what said so; in order
    held: list[dict[str, Any]] = field(default_factory=list)  # `held` records, until the run's leader has looked at them

    def apply(self, record: dict[str, Any]) -> list[Assigned]:
        """Returns the samples that this record says have ended."""
        match record["kind"]:
            case "assign":
                m = record["message"]
                self.running[record["number"]] = Assigned(m["group"], m["sample"], m["task"], record["rank"])
            case "over":
                self.running.pop(record["number"], None)
            case "up":
                self.engines[record["rank"]] = record
            case "down":
                self.engines.pop(record["rank"], None)
            case "held":
                self.held.append(record)
            case "finished":
                ended = [self.running.pop(n) for n in record["numbers"] if n in self.running]
                self.done += [(a, record) for a in ended] if record["cause"] is None else []
                return ended
        return []


OUT = "out.log"


def in_name(leader: int) -> str:
    """`leader`: epoch of the run's rollout role."""
    return f"in.e{leader:06d}.log"


def read_state(folder: Path) -> tuple[PoolState, JournalReader]:
    """What the journals of one epoch of a pool say so far, and what follows the pool's own from there."""
    state, out = PoolState(), JournalReader(folder / OUT)
    for record in (*Inbox(folder).poll(), *out.poll()):
        state.apply(record)
    return state, out


class Inbox:
    """Follows what the run's leaders write to one epoch of a pool: each to its end, then the next alone, whatever an older one, which is fenced, may add."""

    def __init__(self, folder: Path):
        self._folder, self._newest = folder, ""
        self._readers: dict[str, JournalReader] = {}

    def poll(self) -> list[dict[str, Any]]:
        """New records, oldest first."""
        names = sorted(p.name for p in self._folder.glob("in.e*.log"))
        out = []
        for name in (n for n in names if n >= self._newest):
            out += self._readers.setdefault(name, JournalReader(self._folder / name)).poll()
        self._newest = names[-1] if names else ""
        return out
