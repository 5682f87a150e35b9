"""`python -m miles.trainer RUN`: one MPI rank of the trainer step, started by `miles.cluster.supervise`."""

import os
import sys


def main() -> int:
    from miles.comm import World
    from miles.rundir import RunDir
    from miles.trainer.loop import Trainer

    run = RunDir(sys.argv[1])
    world = World(run.config.cluster.trainer.ranks)
    return Trainer(run, world, int(os.environ["MILES_EPOCH"]), int(os.environ["MILES_ATTEMPT"])).run()


if __name__ == "__main__":
    from miles.comm import run_rank

    run_rank(main)
