"""The wake-up link between the trainer leader and the rollout leader, over MPI ports.

The two roles are separate job steps with separate MPI worlds, so that one can die and be restarted under the living other. The leaders
connect their worlds with Open_port / Accept / Connect (MPI-4.1 chapter 11.9); the port travels in a file:

    rollout leader  writes  link/hello.<rollout epoch>.<trainer epoch>    "I am ready to connect to this trainer"
    trainer leader  sees it, opens a port, writes  link/port.<same>, accepts
    rollout leader  reads the port, connects

One link per pair of epochs; a restart on either side makes a new pair and a new link. Messages carry no content that is not also a
file: they say "look now" (a group is ready, a version is published, groups were consumed). Without a link both sides still look
every second or two.
"""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
from mpi4py import MPI

from miles.core import MilesError, Role
from miles.rundir import RunDir, publish_bytes

_TAG, _HANDSHAKE_S, _MAX_PENDING = 11, 20.0, 64


class Link:
    """One leader's end. `tick` keeps it connected, `wake` pokes the peer, `woken` says whether the peer has poked us."""

    def __init__(self, run: RunDir, role: Role, epoch: int):
        self._run, self._role, self._epoch = run, role, epoch
        self._dir = run.path / "link"
        self._dir.mkdir(exist_ok=True)
        self._comm: MPI.Intercomm | None = None
        self._pair = ""  # pair of epochs that _comm or _thread belongs to
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._pending: list[MPI.Request] = []

    @property
    def connected(self) -> bool:
        return self._comm is not None

    def tick(self) -> None:
        """Connect to the peer's current epoch if that is not yet done. Never blocks: the handshake runs in a thread."""
        peer = self._run.current_epoch(Role.ROLLOUT if self._role is Role.TRAINER else Role.TRAINER)
        pair = f"{peer}.{self._epoch}" if self._role is Role.TRAINER else f"{self._epoch}.{peer}"
        if self._thread is not None:
            if not self._thread.is_alive():
                self._thread = None
            elif time.monotonic() - self._started > _HANDSHAKE_S:
                # the peer died between its hello and the connect; MPI cannot cancel an accept, and it spins a core
                raise MilesError(f"the MPI handshake with the peer (epochs {pair}) hangs", "a connect within 20 s",
                                 "nothing: this process ends and its step is restarted from the last checkpoint")
            return
        if peer == 0 or pair == self._pair:
            return
        if self._role is Role.TRAINER:
            if (self._dir / f"hello.{pair}").exists():
                self._begin(pair, self._accept)
        else:
            hello, port = self._dir / f"hello.{pair}", self._dir / f"port.{pair}"
            if not hello.exists():
                publish_bytes(hello, b"")
            elif port.exists():
                self._begin(pair, self._connect)

    def wake(self) -> None:
        """Tell the peer to look at the files now. Lost when there is no peer."""
        if self._comm is None:
            return
        with contextlib.suppress(MPI.Exception):  # a dead peer: its successor will connect and look at the files anyway
            self._pending.append(self._comm.Isend(np.zeros(1, np.uint8), 0, _TAG))
            self._pending = [r for r in self._pending if not r.Test()][-_MAX_PENDING:]

    def woken(self) -> bool:
        """Whether the peer has sent a wake-up since the last call."""
        if self._comm is None:
            return False
        got = False
        try:
            while self._comm.Iprobe(0, _TAG):
                self._comm.Recv(np.empty(1, np.uint8), 0, _TAG)
                got = True
        except MPI.Exception:
            self._comm = None  # peer gone; tick() finds its successor
        return got

    # -- handshake thread ----------------------------------------------------------------------------------------------------
    def _begin(self, pair: str, target) -> None:
        self._comm, self._pair, self._started = None, pair, time.monotonic()
        self._thread = threading.Thread(target=target, args=(pair,), name="link", daemon=True)
        self._thread.start()

    def _accept(self, pair: str) -> None:
        port = MPI.Open_port()
        publish_bytes(self._dir / f"port.{pair}", port.encode())
        self._use(MPI.COMM_SELF.Accept(port))
        MPI.Close_port(port)

    def _connect(self, pair: str) -> None:
        self._use(MPI.COMM_SELF.Connect((self._dir / f"port.{pair}").read_text()))

    def _use(self, comm: MPI.Intercomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
