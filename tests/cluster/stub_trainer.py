"""A trainer of the right shape for tests of the supervisor: real MPI, no model. Counts to run.steps, ten counts a second."""

import os
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

from miles.comm.pulse import show_life
from miles.rundir import RunDir, publish_bytes

show_life(int(os.environ["MILES_PULSE"]), float(os.environ["MILES_FROZEN_S"]))
run = RunDir(sys.argv[1])
world = MPI.COMM_WORLD
if world.size != run.config.cluster.trainer.ranks:
    sys.exit(3)


def leave(code: int) -> None:
    """As the real roles do: no MPI_Finalize, and the leader has something left to write."""
    world.Barrier()
    if world.rank == 0:
        time.sleep(1.5)
    sys.stdout.flush()
    os._exit(code)


notices = []
signal.signal(signal.SIGUSR2, lambda *_: notices.append(1))
counter = run.path / "stub_step"
step = world.bcast(int(counter.read_text()) if world.rank == 0 and counter.exists() else 0)
print(f"trainer {world.rank} of {world.size} epoch {os.environ['MILES_EPOCH']} attempt {os.environ['MILES_ATTEMPT']} from {step}", flush=True)
exit_file = Path(run.path, "stub_exit")  # tests: make the trainer end with this code
while step < run.config.run.steps:
    time.sleep(0.1)
    code = world.bcast(75 if notices else int(exit_file.read_text()) if exit_file.exists() else 0)
    if code:
        leave(code)
    step += 1
    if world.rank == 0:
        publish_bytes(counter, str(step).encode())
if world.rank == 0:
    run.finish("stub")
leave(0)
