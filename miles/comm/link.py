"""The wake-up link between the trainer leader and the rollout leader, over MPI ports.

The two roles are separate job steps with separate MPI worlds, so that one can die and be restarted under the living other. The leaders
connect their worlds with Open_port / Accept / Connect (MPI-4.1 chapter 11.9); the port travels in a file:

    rollout leader  writes  link/hello.<rollout epoch>.<trainer epoch>    "I am ready to connect to this trainer"
    trainer leader  sees it, opens a port, writes  link/port.<same>, accepts
    rollout leader  reads the port, connects

One link per pair of epochs; a restart on either side makes a new pair and a new link. Accept and Connect end by themselves: a peer that dies
between its hello and its connect costs its successor that long without a link, and nothing else. Two that live and have missed each other have
no link until one is restarted.

Messages carry no content that is not also a file: they say "look now" (a group is ready, a version is published, groups were consumed).
Without a link both sides still look every second or two. A wake-up costs no file: those of the handshake are looked at a few times a second while it is due,
and the peer's epoch once a second afterwards, so that a peer that was started again is found as soon.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from miles.comm.handshake import Handshake, published_port
from miles.core import Role
from miles.rundir import RunDir, publish_bytes

_TAG, _MAX_PENDING = 11, 64
LOOK_S = 1.0
"""How often the epoch of a peer is read with which all is done that can be: leaders tick every few milliseconds, and each read is one of a shared file system."""
SHAKE_S = 0.2
"""How often the files of a handshake that is due are looked at."""


class Link:
    """One leader's end. `tick` keeps it connected, `wake` pokes the peer, `woken` says whether the peer has poked us."""

    def __init__(self, run: RunDir, role: Role, epoch: int):
        self._run, self._role, self._epoch = run, role, epoch
        self._dir = run.path / "link"
        self._dir.mkdir(exist_ok=True)
        self._comm: MPI.Intercomm | None = None
        self._pair = ""  # pair of epochs that _comm or _handshake belongs to
        self._handshake: Handshake | None = None
        self._pending: list[MPI.Request] = []
        self._waking = threading.Lock()
        self._look_at = 0.0  # monotonic time of the next look at the files

    @property
    def connected(self) -> bool:
        return self._comm is not None

    def tick(self) -> None:
        """Connect to the peer's current epoch if that is not yet done. Never blocks: the handshake runs in a thread."""
        if self._handshake is not None:
            if (found := self._handshake.ended()) is None:
                return
            self._handshake = None
            self._linked(found)
        if time.monotonic() < self._look_at:
            return
        peer = self._run.current_epoch(Role.ROLLOUT if self._role is Role.TRAINER else Role.TRAINER)
        pair = f"{peer}.{self._epoch}" if self._role is Role.TRAINER else f"{self._epoch}.{peer}"
        if peer and pair != self._pair:
            self._shake(pair, self._dir / f"hello.{pair}", self._dir / f"port.{pair}")
        self._look_at = time.monotonic() + (LOOK_S if pair == self._pair else SHAKE_S)

    def wake(self) -> None:
        """Tell the peer to look at the files now. Lost when there is no peer. Of any thread."""
        comm = self._comm
        if comm is None:
            return
        with self._waking, contextlib.suppress(MPI.Exception):  # a dead peer: its successor will connect and look at the files anyway
            self._pending.append(comm.Isend(np.zeros(1, np.uint8), 0, _TAG))
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

    def _shake(self, pair: str, hello: Path, port: Path) -> None:
        """Begin the handshake if the peer has done its part."""
        if self._role is Role.TRAINER:
            if hello.exists():
                self._begin(pair, lambda info: self._accept(port, info))
        elif not hello.exists():
            publish_bytes(hello, b"")
        elif port.exists():
            self._begin(pair, lambda info: MPI.COMM_SELF.Connect(port.read_text(), info))

    def _begin(self, pair: str, call) -> None:
        self._comm, self._pair, self._handshake = None, pair, Handshake(call, f"between the leaders of trainer and rollout (epochs {pair})")

    def _accept(self, at: Path, info: MPI.Info) -> MPI.Intercomm:
        port = published_port(at)
        comm = MPI.COMM_SELF.Accept(port, info)
        MPI.Close_port(port)
        return comm

    def _linked(self, found: MPI.Intercomm | str) -> None:
        if not isinstance(found, str):
            self._comm = found
            return
        print(f"no link to the peer (epochs {self._pair}): {found}; the files are looked at every second or two instead", flush=True)
        if self._role is Role.TRAINER:
            (self._dir / f"port.{self._pair}").unlink(missing_ok=True)  # who comes now finds nobody there
