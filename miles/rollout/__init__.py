"""The rollout loop: data order, schedule, workers beside their engines, groups sealed into the buffer.

    scheduler.py   every decision, pure
    leader.py      rank 0: carries the decisions out (journal, seal, messages)
    pool.py        the journals between a run and a pool; pools.py: the run's side; pool_leader.py: rank 0 of a pool
    worker.py      every rank: engine, weights, sessions; runs the trajectories it is given
    weights.py     every rank: brings the engine to each new version
    __main__.py    `python -m miles.rollout RUN`

Must not know how weights travel beyond "bring the engine to the newest version".
"""
