"""Small msgpack messages over a communicator. Nothing is pickled, nothing waits.

An MPI library keeps what a receiver has not taken in a pool that all receivers share (64 cells in MPICH's shared memory): were messages to a frozen rank simply sent,
nobody would be heard any more a minute later. So at most `MOST_PENDING` of them are under way to one rank, by synchronous sends, which end when they are
taken; the others wait here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

MOST_PENDING = 4


class Mailbox:
    """Messages under one tag. Order between two ranks is kept. Of one thread, which calls `poll` again and again."""

    def __init__(self, comm: MPI.Comm, tag: int):
        self._comm, self._tag = comm, tag
        self._pending: dict[int, list[tuple[MPI.Request, np.ndarray]]] = defaultdict(list)
        self._waiting: dict[int, deque[np.ndarray]] = defaultdict(deque)

    def post(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        """Send without waiting."""
        data = np.frombuffer(msgspec.msgpack.encode(message), dtype=np.uint8)
        for rank in ranks:
            self._waiting[rank].append(data)
        self._send()

    def poll(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Messages that have arrived: (source rank, message)."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
            data = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
            self._comm.Recv(data, status.Get_source(), self._tag)
            yield status.Get_source(), msgspec.msgpack.decode(data)
        self._send()

    def _send(self) -> None:
        for rank, waiting in self._waiting.items():
            self._pending[rank] = [(r, d) for r, d in self._pending[rank] if not r.Test()]
            while waiting and len(self._pending[rank]) < MOST_PENDING:
                data = waiting.popleft()
                self._pending[rank].append((self._comm.Issend(data, rank, self._tag), data))
