"""What commands in a sandbox may use, and what came of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stopped = Literal["", "time", "output", "memory", "cpu"]


@dataclass(frozen=True)
class CommandLimits:
    """What the commands of one sandbox may use. `docs/concepts.md` says how each is kept."""

    wall_s: float = 10.0  # seconds of one command
    output_chars: int = 2000  # characters kept of one command's output: half from its beginning, half from its end
    memory_mb: int = 512  # address space of each process, and resident memory of all of them together, MiB
    processes: int = 64  # of the sandbox, threads included
    file_mb: int = 64  # largest file, MiB
    disk_mb: int = 256  # everything under /app together, MiB; at most 128 files and folders for each MiB
    cpu_s: float = 600.0  # CPU seconds of the whole sandbox, all processes together


@dataclass(frozen=True)
class CommandResult:
    """What came of one command."""

    exit_code: int | None  # None when it was stopped
    output: str  # stdout and stderr as they came, made printable; cut in the middle, with a mark, to about `output_chars` characters
    cut: bool  # something was left out
    stopped: Stopped  # which limit ended it
    seconds: float
    fresh_shell: bool = False  # the persistent shell ended during or before this command: the next one starts in a new shell
