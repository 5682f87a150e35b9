"""Accept or Connect of two MPI worlds (MPI-4.1 chapter 11.9) in a thread, so that the caller goes on meanwhile.

Either ends by itself after `HANDSHAKE_S` (MPICH's info key "timeout"): MPI cannot cancel it, and it spins a core while it waits.

One for each pair of worlds: of two that live and have missed each other, MPICH 5.0.2 takes what is left of the first handshake for the second, whose
Accept fails ("Invalid port") and whose Connect has ended in a segmentation fault. A port that nobody came to is not closed, as the next one opened would
have its tag, and a peer that comes too late would meet that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from mpi4py import MPI

from miles.core import MilesError
from miles.rundir import publish_bytes

HANDSHAKE_S = 20.0


class Handshake:
    """One try. `call` gets the info object to hand to Accept or Connect; its MPI.Exception, or OSError at the port's file, is the failure."""

    def __init__(self, call: Callable[[MPI.Info], MPI.Intercomm], what: str):
        self._call, self._what = call, what
        self._result: MPI.Intercomm | str = ""
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="handshake", daemon=True)
        self._thread.start()

    def ended(self) -> MPI.Intercomm | str | None:
        """The communicator, or why there is none; None while it goes on. Raises MilesError when it neither ends nor gives up."""
        if not self._thread.is_alive():
            return self._result
        if time.monotonic() - self._started > 2 * HANDSHAKE_S:
            raise MilesError(f"the MPI handshake {self._what} hangs", f"an end within {HANDSHAKE_S:.0f} s",
                             "nothing: this process ends and its step is restarted from the last checkpoint")
        return None

    def _run(self) -> None:
        info = MPI.Info.Create()
        info.Set("timeout", f"{HANDSHAKE_S:.0f}")
        try:
            self._result = self._call(info)
            self._result.Set_errhandler(MPI.ERRORS_RETURN)
        except (MPI.Exception, OSError) as e:
            self._result = str(e).splitlines()[0]


def published_port(at: Path) -> str:
    port = MPI.Open_port()
    publish_bytes(at, port.encode())
    return port
