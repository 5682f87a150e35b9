"""A pool: rollout ranks of another job that work for a run through its directory alone.

    RUN/pools/0001/pool.json              what the pool was attached with
    RUN/pools/0001/e0002/                 its second epoch: the journals between pool and run (miles.rollout.pool)
    RUN/pools/0001/acks/ ranks/ logs/     as those of the run and of an attempt; beside them supervisor.log and the output of ranks and engines

Each start of a pool's ranks is an epoch of that pool, and raising it ends the one before. The pool's supervisor does so when it starts its ranks and when they
have ended; so does the run's rollout leader with a pool that has fallen silent. As either may, an epoch is a folder, made by exclusive creation: two never
get the same, and none goes back.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from miles.config import MilesConfig
from miles.core import ConfigError, Role
from miles.rundir.publish import explain_os_errors, publish_bytes
from miles.rundir.rundir import RunDir

POOL_RANKS = 1000
"""Rollout rank r of pool p has the number POOL_RANKS * p + r in the whole run: in segments, acknowledgements, sessions and logs."""


class PoolFacts(msgspec.Struct, frozen=True):
    """pool.json."""

    nodes: int
    in_flight: int  # trajectories at once in this pool
    time_limit: str  # Slurm's format

    def config_of(self, run: MilesConfig) -> MilesConfig:
        """The run's config with the pool's size, on GPUs of its own. Not validated anew: a pool may hold less than a group."""
        rollout = run.cluster.rollout.model_copy(update={"nodes": self.nodes})
        cluster = run.cluster.model_copy(update={"rollout": rollout, "time_limit": self.time_limit, "placement": "disjoint"})
        return run.model_copy(update={"cluster": cluster, "rollout": run.rollout.model_copy(update={"in_flight": self.in_flight})})


class PoolDir(RunDir):
    """The run as the ranks of a pool see it: the same directory, with the pool's own epoch in the place of the rollout role's, its own folder for what
    one attempt or one rank writes, and its own size in the config."""

    def __init__(self, path: str | Path, pool: int):
        super().__init__(path)
        self.pool, self.first_rank = pool, POOL_RANKS * pool
        try:
            self.facts = msgspec.json.decode((self.folder / "pool.json").read_bytes(), type=PoolFacts)
        except FileNotFoundError:
            raise ConfigError(f"{self.path} has no pool {pool}", f"one of {self.pools()}", "attach one: miles-submit attach RUN --nodes N") from None
        self.config = self.facts.config_of(self.config)

    @classmethod
    def create(cls, run: RunDir, facts: PoolFacts) -> PoolDir:
        """Allocate the next pool of a run. Exclusive: two never get the same number."""
        run.pools_dir.mkdir(exist_ok=True)
        number = run.next_pool()
        while True:
            folder = run.pool_dir(number)
            try:
                with explain_os_errors(folder):
                    folder.mkdir()
            except FileExistsError:
                number += 1
                continue
            for sub in ("acks", "ranks", "logs"):
                (folder / sub).mkdir()
            publish_bytes(folder / "pool.json", msgspec.json.encode(facts))
            return cls(run.path, number)

    @property
    def folder(self) -> Path:
        return self.pool_dir(self.pool)

    @property
    def acks_dir(self) -> Path:
        return self.folder / "acks"

    def attempt_dir(self, attempt: int) -> Path:
        """A pool outlives attempts of the run, and has one folder for all its epochs."""
        return self.folder

    def slots(self, rank: int) -> int:
        """Trajectories at once on the engine of the pool's `rank` (counted within the pool): an even share."""
        ranks = self.config.cluster.rollout.ranks
        return self.facts.in_flight // ranks + (rank < self.facts.in_flight % ranks)

    def current_epoch(self, role: Role | str) -> int:
        return self.pool_epoch(self.pool) if Role(role) is Role.ROLLOUT else super().current_epoch(role)

    def new_epoch(self, role: Role | str = Role.ROLLOUT) -> int:
        """Raise the pool's epoch, which ends the one before: what its ranks publish from then on is not looked at."""
        assert Role(role) is Role.ROLLOUT, "a pool has no trainer"
        epoch = self.current_epoch(role) + 1
        while True:
            try:
                with explain_os_errors(self.folder):
                    self.pool_epoch_dir(self.pool, epoch).mkdir()
            except FileExistsError:
                epoch += 1
                continue
            return epoch


def usual_in_flight(config: MilesConfig, nodes: int) -> int:
    """Trajectories at once in a pool of `nodes` nodes, each rank with as many as one of the run's own."""
    own = config.cluster.rollout
    return math.ceil(config.rollout.in_flight / own.ranks) * nodes * own.ranks_per_node
