"""Command lines that start the MPI ranks of one step: `srun` inside a job, `mpiexec` on one machine. Pure."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from miles.config import MilesConfig, SiteConfig
from miles.config.schema import ComponentConfig
from miles.core import Role
from miles.rundir import RunDir

HET_GROUP = {Role.TRAINER: 0, Role.ROLLOUT: 1}


def component(config: MilesConfig, role: Role) -> ComponentConfig:
    return config.cluster.trainer if role is Role.TRAINER else config.cluster.rollout


def rank_environment(run: RunDir, site: SiteConfig, launcher: str, role: Role, attempt: int, epoch: int) -> dict[str, str]:
    """What every rank finds in its environment besides what it inherits."""
    return {**site.env, "MILES_ATTEMPT": str(attempt), "MILES_EPOCH": str(epoch), "MILES_ROLE": role.value, "MILES_LAUNCHER": launcher,
            "MILES_TOKEN_FILE": str(run.token_file), "MILES_POOL": str(run.pool), "MILES_FIRST_RANK": str(run.first_rank),
            "MILES_FOLDER": str(run.attempt_dir(attempt)), "MILES_FROZEN_S": str(run.config.cluster.frozen_s)}


def slurm_argv(run: RunDir, site: SiteConfig, role: Role, module: str) -> list[str]:
    """srun of one het component, or with shared GPUs of one of two steps that overlap on the whole allocation, or of a pool's job. Sizes are spelled out: the
    batch script's SLURM_* describe component 0 or both steps together, and since 22.05 srun does not inherit --cpus-per-task."""
    c = component(run.config, role)
    where = [] if run.pool else ["--overlap"] if run.config.cluster.placement == "shared" else [f"--het-group={HET_GROUP[role]}"]
    argv = ["srun", *where, f"--mpi={site.mpi}", "--kill-on-bad-exit=1", "--export=ALL", f"--job-name={role.value}",
            f"--nodes={c.nodes}", f"--ntasks={c.ranks}", f"--ntasks-per-node={c.ranks_per_node}", f"--cpus-per-task={c.cpus_per_rank}"]
    if c.gpus_per_node:
        argv.append(f"--gpus-per-node={c.gpus_per_node}")
    return [*argv, *site.srun_prefix, interpreter(site), "-m", "miles.cluster.rank", str(run.path), module]


def local_argv(config: MilesConfig, role: Role, run: Path, module: str) -> list[str]:
    """mpiexec of this environment. `fork` and `user`: never ask a batch system, even when started inside a Slurm job."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    return [str(mpiexec), "-launcher", "fork", "-rmk", "user", "-n", str(component(config, role).ranks),
            sys.executable, "-m", "miles.cluster.rank", str(run), module]


def interpreter(site: SiteConfig) -> str:
    """The site's Python as an absolute path, symlinks kept: a virtual environment is found through the link."""
    return os.path.abspath(site.python)
