"""Errors that teach: each says what was found, what was expected and what to do.

The exit codes are part of the command-line contract: 2 for a configuration that cannot work, 3 for an environment
(machine, cluster, disk, port, engine) that does not deliver, 1 for everything else.
"""

import os
from typing import Any

LOST_PEER = os.EX_PROTOCOL
"""Exit code of a rank whose collective failed because another rank was gone (sysexits.h: 76). It is never the cause of a step's end while another rank's end is known."""


class MilesError(Exception):
    """Base of every error Miles raises on purpose."""

    exit_code = 1

    def __init__(self, found: str, expected: str = "", do: str = ""):
        self.found, self.expected, self.do = found, expected, do
        super().__init__(found, expected, do)

    def __str__(self) -> str:
        lines = [self.found]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.do:
            lines.append(f"  what to do: {self.do}")
        return "\n".join(lines)


class ConfigError(MilesError):
    """The configuration cannot work, whatever the machine (exit code 2)."""

    exit_code = 2


class EnvironmentFault(MilesError):
    """The machine, cluster, file system or engine does not deliver what the run needs (exit code 3)."""

    exit_code = 3


class StaleEpochError(MilesError):
    """A process of an older attempt tried to publish; the run has moved on (exit code 1)."""


class StructureError(MilesError):
    """Recorded tokens, masks, log-probabilities, versions or routes do not fit together: the trajectory is dropped."""

    def __init__(self, found: str, expected: str = "", do: str = "", *, cause: str = "structure"):
        super().__init__(found, expected, do)
        self.cause = cause  # short key under which the drop is counted
        self.evidence: dict[str, Any] = {}  # JSON: what was refused (a request, a reply), from who has it; kept with the dropped trajectory
