"""One role's MPI world. Every MPI library spins while it blocks, which on shared cores starves the engines beside it, so nothing here
blocks inside MPI: requests are tested between short sleeps. Messages are msgpack; nothing is pickled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from miles.comm.mailbox import Mailbox
from miles.core import EnvironmentFault

POLL_S = 0.002
_TAG = 7


class World:
    """COMM_WORLD of the trainer or rollout step, checked for its size."""

    def __init__(self, expected: int):
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        if self.size != expected:
            raise EnvironmentFault(
                f"the MPI world has {self.size} rank(s)", f"{expected}, from cluster.*.nodes x ranks_per_node",
                "a world of size 1 under srun means that the site's `mpi` value does not match the MPI library: see `srun --mpi=list`",
            )
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise EnvironmentFault("the MPI library lets only one thread of a process call it", "MPI_THREAD_MULTIPLE: versions are published beside training",
                                   "build or load an MPI library with thread support, and leave mpi4py's default (mpi4py.rc.thread_level = 'multiple')")
        self._mail = Mailbox(self.comm, _TAG)

    @property
    def leader(self) -> bool:
        return self.rank == 0

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes to every rank. Collective. Waits without spinning, as long as it takes: rank 0 may be waiting for groups."""
        size = np.array([len(data) if data is not None else 0], dtype=np.int64)
        _wait(self.comm.Ibcast(size, root=0))
        buffer = np.frombuffer(data, dtype=np.uint8).copy() if data is not None else np.empty(int(size[0]), dtype=np.uint8)
        _wait(self.comm.Ibcast(buffer, root=0))
        return buffer.tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks, on every rank. Collective; waits without spinning."""
        sizes = np.empty(self.size, dtype=np.int64)
        _wait(self.comm.Iallgather(np.array([len(data)], dtype=np.int64), sizes))
        ends = np.cumsum(sizes)
        everything = np.empty(int(ends[-1]), dtype=np.uint8)
        _wait(self.comm.Iallgatherv(np.frombuffer(data, dtype=np.uint8), [everything, sizes, ends - sizes, MPI.BYTE]))
        return [everything[end - n:end].tobytes() for n, end in zip(sizes, ends, strict=True)]

    def post(self, dest: int, message: dict[str, Any]) -> None:
        """Send without waiting. Order between two ranks is kept."""
        self._mail.post([dest], message)

    def post_all(self, message: dict[str, Any]) -> None:
        self._mail.post(range(self.size), message)

    def poll(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Messages that have arrived: (source rank, message)."""
        return self._mail.poll()


def _wait(request: MPI.Request) -> None:
    delay = 0.0  # the first tries are free: most collectives are already complete
    while not request.Test():
        time.sleep(delay)
        delay = min(POLL_S, delay + POLL_S / 8)
