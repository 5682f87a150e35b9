"""`python -m miles.rollout RUN`: one MPI rank of the rollout step, started by `miles.cluster.supervise`; or, with MILES_POOL, of a pool, started by
`miles.cluster.pool`.

Every rank runs a Worker; rank 0 runs the Leader too, in a pool the PoolLeader. The pump below moves their messages; it polls MPI and never blocks in it.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path


async def rollout(run, world, epoch: int, attempt: int, notices: list[int]) -> int:
    from miles.config import load_site
    from miles.core import Role
    from miles.engine.handover import handover_folder
    from miles.env import load_tasks, sweep
    from miles.log import RunLog
    from miles.rollout.leader import Leader
    from miles.rollout.pool_leader import PoolLeader
    from miles.rollout.worker import Worker
    from miles.session import settle_collector
    from miles.weights.choose import ways
    from miles.weights.p2p.receive import Receiver
    from miles.weights.store import WeightStore

    sweep(Path(load_site(run.config.cluster.site).scratch))  # what killed ranks of this node left behind
    rank = run.first_rank + world.rank
    log = RunLog(run.log_path(attempt, Role.ROLLOUT, rank, epoch), role="rollout", rank=rank, attempt=attempt, epoch=epoch)
    tasks = {t.name: t for t in load_tasks(run.config.tasks.path)}
    receiver = Receiver(run, world, epoch, handover_folder) if "p2p" in ways(run.config) else None
    worker = Worker(run, rank, epoch, attempt, tasks, log, lambda message: world.post(0, message), receiver)
    leader = None
    if world.leader:
        limits = {name: t.verifier_timeout_s for name, t in tasks.items()}
        leader = PoolLeader(run, epoch, world) if run.pool else Leader(run, epoch, world, log, limits, WeightStore(run).newest)
    settle_collector()
    life = asyncio.create_task(worker.run())
    while not life.done():
        for source, message in world.poll():
            if message["kind"] == "assign":
                worker.assign(message["group"], message["sample"], message["task"], message["held_by"])
            elif message["kind"] == "release":
                worker.release(message["samples"])
            elif message["kind"] == "engines":
                worker.engines(message["table"])
            elif message["kind"] == "look":
                worker.look(message["over"])
                if run.finished:
                    worker.stop()
            elif message["kind"] == "stop":
                worker.stop()
            elif leader is not None:
                leader.receive(source, message)
        if receiver is not None:
            receiver.tick()
        if leader is not None:
            if notices:
                notices.clear()
                leader.end_turn()
            await leader.tick()
        await asyncio.sleep(0.005)
    if receiver is not None:
        receiver.close()
    await life  # raises what ended it
    if leader is not None:
        leader.close()
    log.close()
    return 0


def main() -> int:
    import uvloop

    from miles.comm import World
    from miles.rundir import PoolDir, RunDir

    pool = int(os.environ["MILES_POOL"])
    run = PoolDir(sys.argv[1], pool) if pool else RunDir(sys.argv[1])
    # The trainer checkpoints; this side has nothing that is not on disk already. On shared GPUs it is in the way of that checkpoint.
    notices: list[int] = []
    shared = run.config.cluster.placement == "shared" and not pool
    signal.signal(signal.SIGUSR2, (lambda *_: notices.append(1)) if shared else signal.SIG_IGN)
    world = World(run.config.cluster.rollout.ranks)
    return uvloop.run(rollout(run, world, int(os.environ["MILES_EPOCH"]), int(os.environ["MILES_ATTEMPT"]), notices))


if __name__ == "__main__":
    from miles.comm import run_rank

    run_rank(main)
