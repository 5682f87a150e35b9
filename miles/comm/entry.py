"""How a rank ends: its errors as text, its exit code as the contract with the supervisor, and no MPI_Finalize.

Finalize waits for peers; a rank whose peer was killed would hang in it, so every rank leaves by `os._exit` after flushing. Exit
codes: 0 done, 75 stopped with a checkpoint, 2 configuration, 3 environment (neither is restarted), anything else: restart me. Among these 76: another rank was gone,
so that whoever looks for the cause looks there.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from miles.comm.pulse import show_life
from miles.core import LOST_PEER, MilesError

_GONE = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
"""How torch.distributed says that another rank has ended, gloo and NCCL: only in the text of a RuntimeError."""


def run_rank(main: Callable[[], int]) -> None:
    """Run a rank's main and leave the process. Never returns."""
    if "MILES_PULSE" in os.environ:  # it has a parent that watches
        show_life(int(os.environ["MILES_PULSE"]), float(os.environ["MILES_FROZEN_S"]))
    # Its parent ignores SIGINT, which programs inherit: the shells of the model are stopped by it (miles.env.shell). A handler is not inherited.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = main()
    except MilesError as e:
        traceback.print_exc()
        print(f"\n{type(e).__name__}: {e}", file=sys.stderr)
        code = e.exit_code
    except BaseException as e:
        traceback.print_exc()
        code = LOST_PEER if isinstance(e, RuntimeError) and any(words in str(e) for words in _GONE) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
