"""A rollout rank of the right shape for tests of the supervisor: real MPI, no engine. Ends when the run is finished."""

import os
import sys
import time

from miles.comm.pulse import show_life
from miles.rundir import PoolDir, RunDir

show_life(int(os.environ["MILES_PULSE"]), float(os.environ["MILES_FROZEN_S"]))
pool = int(os.environ["MILES_POOL"])
run = PoolDir(sys.argv[1], pool) if pool else RunDir(sys.argv[1])
if (run.path / "stub_slow").exists():  # tests: time to be killed before the ranks have met
    time.sleep(3)

from mpi4py import MPI  # noqa: E402

world = MPI.COMM_WORLD
if world.size != run.config.cluster.rollout.ranks:
    sys.exit(3)
print(f"rollout {world.rank} of {world.size} epoch {os.environ['MILES_EPOCH']}", flush=True)
while not run.finished:
    time.sleep(0.05)
