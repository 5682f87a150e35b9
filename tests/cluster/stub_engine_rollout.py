"""A rollout rank as it is, but for the command with which it starts its engine, SGLang's stand-in, which starts in a second, and how long
a sample and the health of an engine may take, which is shorter."""

import miles.engine.process
import miles.rollout.leader
import miles.session.affinity
from miles.comm import run_rank
from miles.rollout.__main__ import main

miles.engine.process.SERVER = "tests.engine.stub"
miles.rollout.leader.SLACK_S = 10.0
miles.session.affinity.HEALTH_S = 5.0

if __name__ == "__main__":
    run_rank(main)
