"""Small msgpack messages over a communicator. Nothing is pickled, nothing waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI


class Mailbox:
    """Messages under one tag. Order between two ranks is kept. Of one thread."""

    def __init__(self, comm: MPI.Comm, tag: int):
        self._comm, self._tag = comm, tag
        self._pending: list[tuple[MPI.Request, np.ndarray]] = []

    def post(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        """Send without waiting."""
        data = np.frombuffer(msgspec.msgpack.encode(message), dtype=np.uint8)
        self._pending += [(self._comm.Isend(data, rank, self._tag), data) for rank in ranks]
        self._let_go()

    def poll(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Messages that have arrived: (source rank, message)."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
            data = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
            self._comm.Recv(data, status.Get_source(), self._tag)
            yield status.Get_source(), msgspec.msgpack.decode(data)
        self._let_go()

    def _let_go(self) -> None:
        self._pending = [(r, d) for r, d in self._pending if not r.Test()]
