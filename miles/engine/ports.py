"""Free ports on one node, without two processes picking the same one."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from miles.core import EnvironmentFault
from miles.rundir import POOL_RANKS

TRIES = 200
PORTS_PER_RANK = 20


@dataclass
class PortLease:
    """A TCP port that this process has claimed on this node until `release` or its death.

    A server takes seconds until it binds its port, and until then a probe by a second process finds the port free. So the claim is an
    abstract Unix socket named after the port: exclusive, visible on the whole node, gone with the process, no file left behind.
    """

    port: int
    _claim: socket.socket = field(repr=False)

    def release(self) -> None:
        self._claim.close()


def first_port(base: int, rank: int) -> int:
    """Where rank `rank` begins to look. Ranks of pools, whose numbers are large, begin where those of the run with the same place do."""
    return base + rank % POOL_RANKS * PORTS_PER_RANK


def lease_port(first: int, host: str = "127.0.0.1") -> PortLease:
    """The first port from `first` upward that is free on `host` and that no other process of Miles has claimed.

    Raises EnvironmentFault when `TRIES` ports in a row are taken.
    """
    for port in range(first, min(first + TRIES, 65536)):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0miles-port-{port}")
        except OSError:
            claim.close()
            continue
        if port_is_free(port, host):
            return PortLease(port, claim)
        claim.close()
    raise EnvironmentFault(
        f"no free port from {first} to {min(first + TRIES, 65536) - 1} on {host}", "one free port",
        "set engine.port_base to a free range, or end the processes that hold these ports (ss -ltnp)",
    )


def port_is_free(port: int, host: str) -> bool:
    """Whether a server could bind `host:port` now. SO_REUSEADDR as servers set it, so that TIME_WAIT does not count as taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
