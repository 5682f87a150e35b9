"""All ranks of one world connected to all ranks of the other, for bulk data between them.

    trainer ranks   open a port, write it to  link/peers.<rollout epoch>.<trainer epoch>,  accept
    rollout ranks   rank 0 sees the file and tells the others which; all connect

Both calls are collective over their worlds and give up by themselves after `HANDSHAKE_S`, so a peer that dies between the file and the connect costs that
long and nothing else. A communicator serves one pair of epochs; a restart on either side makes a new one.

Transfers are two-sided. What was tried with MPICH 5.0.2, two worlds connected over ports, a rank of the receiving one killed -9 in the middle: one-sided
windows over the merged communicator work while everybody lives; but over shared memory a Put into the dead process aborts the *sending* process inside the
library, error handler or not, and over TCP the Put only hangs, and so does the next flush, which cannot be polled. Isend and Irecv over the
intercommunicator just stay incomplete on both; the sending world goes on, and accepts and serves the successor.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np
from mpi4py import MPI

from miles.comm.handshake import HANDSHAKE_S, Handshake, published_port
from miles.comm.mailbox import Mailbox
from miles.comm.world import POLL_S, World
from miles.core import EnvironmentFault, Role
from miles.rundir import RunDir

_MAIL, _BULK, _BULK_TAGS = 12, 64, 16384


class Peers:
    """The other world. `mail` for small messages; `send` and `receive` for bulk data, told apart by the serial number of their transfer."""

    def __init__(self, comm: MPI.Intercomm, pair: str):
        self._comm, self.size = comm, comm.remote_size
        self.pair = pair  # "<rollout epoch>.<trainer epoch>"
        self.mail = Mailbox(comm, _MAIL)

    def send(self, data: np.ndarray, rank: int, serial: int) -> MPI.Request:
        return self._comm.Isend(data, rank, _BULK + serial % _BULK_TAGS)

    def receive(self, into: np.ndarray, rank: int, serial: int) -> MPI.Request:
        return self._comm.Irecv(into, rank, _BULK + serial % _BULK_TAGS)


class Abandoned:
    """Requests that will not complete, each with its memory, which MPI may still touch."""

    def __init__(self):
        self._held: list[tuple[MPI.Request, np.ndarray]] = []

    def add(self, request: MPI.Request, memory: np.ndarray, *, cancel: bool = False) -> None:
        """cancel: a receive; those that nothing has matched end at once."""
        with contextlib.suppress(MPI.Exception):
            if cancel:
                request.Cancel()
            self._held = [(r, m) for r, m in self._held if not r.Test()]
        self._held.append((request, memory))


class PeerPort:
    """One rank's end of the handshake. Made by all ranks of a world at the same time (collective)."""

    def __init__(self, run: RunDir, world: World, role: Role, epoch: int):
        self._run, self._role, self._epoch = run, role, epoch
        self._dir = run.path / "link"
        self._dir.mkdir(exist_ok=True)
        self._comm = world.comm.Dup()  # the handshake is collective in a thread, beside collectives of the world
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._leader = world.leader
        self._handshake: Handshake | None = None
        self._pair = ""
        self._told, self._telling = np.zeros(1, np.int64), None  # rollout: trainer epoch of the newest handshake

    def accept(self, rollout_epoch: int) -> Peers:
        """Trainer: collective, once for a rollout epoch. Raises EnvironmentFault when its ranks do not come."""
        pair = f"{rollout_epoch}.{self._epoch}"
        port = published_port(self._dir / f"peers.{pair}") if self._leader else ""
        self._begin(pair, lambda info: self._comm.Accept(port, info, 0))
        while (found := self._ended()) is None:
            time.sleep(POLL_S)
        if port:
            MPI.Close_port(port)
        return found

    def connect(self) -> Peers | None:
        """Rollout: call now and then; the peers once they are there. Never waits. Raises EnvironmentFault when a handshake failed; later calls look for the
        trainer's successor."""
        if self._handshake is not None:
            return self._ended()
        if self._telling is None and (not self._leader or self._called()):
            self._telling = self._comm.Ibcast(self._told, 0)  # so that no rank takes part in a handshake that another leaves out
        if self._telling is not None and self._telling.Test():
            self._telling = None
            pair = f"{self._epoch}.{self._told[0]}"
            port = (self._dir / f"peers.{pair}").read_text() if self._leader else ""
            self._begin(pair, lambda info: self._comm.Connect(port, info, 0))
        return None

    def _called(self) -> bool:
        """Whether a trainer calls that has not called before."""
        trainer = self._run.current_epoch(Role.TRAINER)
        if trainer == self._told[0] or not (self._dir / f"peers.{self._epoch}.{trainer}").exists():
            return False
        self._told[0] = trainer
        return True

    def _begin(self, pair: str, call) -> None:
        self._pair, self._handshake = pair, Handshake(call, f"between the ranks of trainer and rollout (epochs {pair})")

    def _ended(self) -> Peers | None:
        if (found := self._handshake.ended()) is None:
            return None
        self._handshake = None
        if isinstance(found, str):
            raise EnvironmentFault(f"the ranks of trainer and rollout are not connected: {found}", f"all of them within {HANDSHAKE_S:.0f} s",
                                   "weights go another way meanwhile; check the MPI library's network settings")
        return Peers(found, self._pair)
