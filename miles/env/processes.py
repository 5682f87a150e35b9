"""The processes below one process, read from /proc, and how much of the machine they use together.

Limits of the kernel for an ordinary user are per process (rlimits); cgroups are the administrator's. So what all processes of a sandbox use
together is measured: every POLL_S while it has work to do. Between two looks a sandbox may exceed its memory by what it can touch in that time, and
never by more than processes x memory_mb.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

POLL_S = 0.2
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat."""

    pid: int
    started: int  # clock ticks since boot: with the pid, an identity
    running: bool  # wants a CPU now
    cpu_s: float  # its own CPU seconds
    reaped_s: float  # those of its children that it waited for
    rss: int  # resident bytes


def read(pid: int) -> Process | None:
    """None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            line = f.read()
    except OSError:
        return None
    fields = line[line.rindex(b")") + 2:].split()  # the name before may hold anything
    if fields[0] in b"ZX":
        return None
    user, system, child_user, child_system = (int(v) * _TICK_S for v in fields[11:15])
    return Process(pid, int(fields[19]), fields[0] == b"R", user + system, child_user + child_system, int(fields[21]) * _PAGE)


def below(pid: int) -> list[Process]:
    """All descendants of `pid`, parents first. One that forks or moves meanwhile may be missed once."""
    found, parents = [], [pid]
    while parents:
        for child in _children(parents.pop(0)):
            if (process := read(child)) is not None:
                found.append(process)
            parents.append(child)  # a zombie's threads may still have some
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as f:
                children += map(int, f.read().split())
    except OSError:  # it ended
        pass
    return children


def proportional_bytes(processes: Iterable[Process]) -> int:
    """Memory of all of them with shared pages counted once (PSS, and what is swapped out). Slow, exact."""
    total = 0
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/smaps_rollup", "rb") as f:
                total += sum(int(line.split()[1]) << 10 for line in f if line.startswith((b"Pss:", b"SwapPss:")))
        except OSError:
            pass  # it ended, and its memory with it
    return total


def memory_bytes(processes: list[Process], limit: int) -> int:
    """Memory of all of them; pages they share are told apart only when it matters."""
    resident = sum(p.rss for p in processes)
    return resident if resident <= limit else proportional_bytes(processes)


class CpuMeter:
    """CPU seconds of a tree of processes over its life, from looks at it.

    Three counts, of which the largest holds: living processes with the children they waited for (exact for ordinary programs); what every process
    was ever seen to have used (for those that nobody waits for); and a quarter of (processes that want a CPU) x (time between looks), which also
    catches processes too short to be seen twice.
    """

    def __init__(self, cpus: int | None = None):
        self._cpus = cpus or len(os.sched_getaffinity(0))
        self._last: dict[tuple[int, int], float] = {}
        self._seen_s = self._sampled_s = 0.0
        self.total_s = 0.0

    def look(self, processes: list[Process], since_s: float) -> None:
        """`since_s`: seconds since the look before, 0 at the first."""
        now = {(p.pid, p.started): p.cpu_s for p in processes}
        self._seen_s += sum(max(0.0, cpu_s - self._last.get(who, 0.0)) for who, cpu_s in now.items())
        self._last = now
        self._sampled_s += 0.25 * since_s * min(self._cpus, sum(p.running for p in processes))
        self.total_s = max(self.total_s, self._seen_s, self._sampled_s, sum(p.cpu_s + p.reaped_s for p in processes))
