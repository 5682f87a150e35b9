"""A rollout rank as it is, but for the command with which it starts its engine: SGLang's stand-in, which starts in a second."""

import miles.engine.process
from miles.comm import run_rank
from miles.rollout.__main__ import main

miles.engine.process.SERVER = "tests.engine.stub"

if __name__ == "__main__":
    run_rank(main)
