"""How a rank ends: its errors as text, its exit code as the contract with the supervisor, and no MPI_Finalize.

Finalize waits for peers; a rank whose peer was killed would hang in it, so every rank leaves by `os._exit` after flushing. Exit
codes: 0 done, 75 stopped with a checkpoint, 2 configuration, 3 environment (neither is restarted), anything else: restart me.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from miles.comm.pulse import show_life
from miles.core import MilesError


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
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
