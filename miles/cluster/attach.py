"""What `miles-submit attach` and `status` know of pools: what a new one may be, and where those of a run stand."""

from __future__ import annotations

import contextlib
import json
import re

from miles.cluster import slurm
from miles.cluster.progress import is_our_process
from miles.config import MilesConfig
from miles.config.schema import ClusterConfig
from miles.core import ConfigError, EnvironmentFault
from miles.rollout.pool import OUT, PoolState, read_state
from miles.rundir import POOL_RANKS, PoolFacts, RunDir
from miles.rundir.pooldir import usual_in_flight

_TIME = ClusterConfig.model_fields["time_limit"].metadata[0].pattern


def pool_facts(config: MilesConfig, nodes: int, in_flight: int | None, time_limit: str | None, *, finished: bool = False) -> PoolFacts:
    """The pool that was asked for, its size taken from the run's own ranks where it was not said. Pure.

    Raises ConfigError: the run is finished, its weights do not travel by files, or the size cannot be.
    """
    own = config.cluster.rollout
    ranks = nodes * own.ranks_per_node
    if finished:
        raise ConfigError("the run is finished", "a run that still trains, or will", "start a new one: miles-submit submit CONFIG")
    if config.weights.transport != "disk":
        raise ConfigError(f"weights.transport = {config.weights.transport!r} of this run: its versions go to the engines of its own job alone",
                          "'disk', whose versions are files that an engine of another job can read", "attach pools to a run with weights.transport = 'disk'")
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes}", "at least 1", "say how many nodes the pool has")
    if max(ranks, own.ranks) > POOL_RANKS:
        raise ConfigError(f"{max(ranks, own.ranks)} rollout ranks in one job", f"at most {POOL_RANKS}, for their numbers to be told apart",
                          "attach several smaller pools")
    most = usual_in_flight(config, nodes) if in_flight is None else in_flight
    if most < ranks:
        raise ConfigError(f"--in-flight {most} for {ranks} engines", f"at least {ranks}: a trajectory for each", "raise --in-flight or lower --nodes")
    limit = config.cluster.time_limit if time_limit is None else time_limit
    if not re.search(_TIME, limit):
        raise ConfigError(f"--time-limit {limit}", "[days-]hours:minutes:seconds", "write e.g. --time-limit 04:00:00")
    return PoolFacts(nodes, most, limit)


def pool_rows(run: RunDir) -> list[dict]:
    """Each pool of a run: number, job, state, size, and what its newest epoch serves and runs. Read from files and squeue."""
    return [_row(run, number) for number in run.pools()]


def _row(run: RunDir, number: int) -> dict:
    folder = run.pool_dir(number)
    facts: dict = {}
    for name in ("pool.json", "job.json", "start.json", "exit.json"):
        with contextlib.suppress(FileNotFoundError):
            facts |= json.loads((folder / name).read_text())
    epoch = run.pool_epoch(number)
    current = run.pool_epoch_dir(number, epoch)
    state = read_state(current)[0] if (current / OUT).is_file() else PoolState()  # an epoch that was raised and not begun ends the one before
    over = facts.get("outcome", "requeue") != "requeue"
    return {"pool": number, "job_id": facts.get("job_id"), "state": facts["outcome"] if over else _alive(facts), "text": facts.get("text", ""),
            "nodes": facts["nodes"], "node_list": facts.get("node_list"), "in_flight": facts["in_flight"], "epoch": epoch, "engines": len(state.engines),
            "running": len(state.running)}


def _alive(facts: dict) -> str:
    """A pool that has left no outcome, or was requeued."""
    if facts.get("job_id") is not None:
        with contextlib.suppress(EnvironmentFault):
            job = slurm.squeue(facts["job_id"]).get(facts["job_id"])
            return job.state.lower() if job else "lost"
        return "unknown"
    return "running" if "pid" in facts and is_our_process(facts) else "lost"
