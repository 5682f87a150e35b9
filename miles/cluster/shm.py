"""Shared-memory segments that killed MPI ranks and engines left behind on this node.

MPICH names its segment in /dev/shm after the Slurm job and step. A rank that dies of SIGKILL does not remove it, and after a requeue the same
job and step ids come again: MPI_Init then finds the dead segment and fails ("invalid bandwidth", "Invalid parameter"). Segments of our own
user that no living process maps are garbage; they also hold memory, so they are removed before a rank starts. SGLang (0.5.23) leaves one segment behind
for every server, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIXES = ("mpich_shm_", "sglang_loads_")
YOUNGEST_S = 5.0  # between creating a segment and mapping it lie milliseconds


def remove_dead_segments(folder: Path = FOLDER) -> list[str]:
    """Remove segments of this user that are older than a few seconds and mapped by nobody. Returns their names."""
    mine = {}
    for path in (p for prefix in PREFIXES for p in folder.glob(f"{prefix}*")):
        with contextlib.suppress(FileNotFoundError):  # another rank of this node sweeps too
            stat = path.stat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > YOUNGEST_S:
                mine[path.name] = path
    if not mine:
        return []
    living = _mapped(mine)
    dead = sorted(mine.keys() - living)
    for name in dead:
        mine[name].unlink(missing_ok=True)
    return dead


def _mapped(names) -> set[str]:
    """Which of these files some process has mapped or open."""
    found = set()
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended, or is not ours and so maps none of ours
            maps = (proc / "maps").read_text()
            if any(prefix in maps for prefix in PREFIXES):
                found |= {n for n in names if n in maps}
            for fd in (proc / "fd").iterdir():
                found |= {os.path.basename(os.readlink(fd))} & names.keys()
    return found
