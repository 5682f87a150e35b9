"""The sbatch script of a run, and that of a pool. Pure: (config, path of the config, site profile) -> text.

The script is short on purpose: it makes or finds the run directory and becomes the supervisor. The same text is what a user
reads in jobs/, what `sbatch` gets by hand and what `miles-submit submit` submits.
"""

from __future__ import annotations

from pathlib import Path

from miles.config import MilesConfig, SiteConfig
from miles.config.schema import ComponentConfig
from miles.core import ConfigError


def render_job(config: MilesConfig, config_path: str | Path, site: SiteConfig) -> str:
    """The script. Raises ConfigError when `config_path` cannot be written into a shell script as it is."""
    c = config.cluster
    path = _shell_safe("config path", config_path)
    prefix = f"\n#   every rank runs under: {' '.join(site.srun_prefix)}" if site.srun_prefix else ""
    return f"""#!/bin/bash
# {config.run.name}: {"asynchronous" if config.run.mode == "async" else "synchronous"} reinforcement learning, one heterogeneous Slurm job.
#   component 0: trainer, {_size(c.trainer)}
#   component 1: rollout, {_size(c.rollout)}, one SGLang engine per rank{prefix}
# Written by `miles-submit render {path}`: change the config, not this file.
# Submit from the project folder:  sbatch THIS_FILE [--set section.key=value ...] [--run RUN_TO_GO_ON_WITH]

# A requeued job appends: the log of the attempt before it is what one wants to read.
#SBATCH --job-name={config.run.name}
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
{_component(config, site, c.trainer)}
# Options are not inherited: without its own --signal, a preempted component 1 would get TERM where component 0 gets USR2.
#SBATCH hetjob
{_component(config, site, c.rollout)}
{_setup(site)}
set -euo pipefail
trap '' USR2  # the notice may come before the supervisor is there to take it
cd "$SLURM_SUBMIT_DIR"

# The first start makes a run directory and notes it under the job id; a requeued job goes on with the same one.
run=$({site.python} -m miles.cluster.start {path} "$@")

# exec: USR2 goes to the batch script alone (B:), so the supervisor has to be the batch script. It hands the notice on to the ranks.
exec {site.python} -m miles.cluster.supervise "$run" --launcher slurm
"""


def render_pool(run: Path, number: int, config: MilesConfig, site: SiteConfig) -> str:
    """The script of a pool's job: one plain job, whose batch script becomes the pool's supervisor. `config`: the pool's (PoolFacts.config_of). Raises ConfigError
    like `render_job`."""
    path = _shell_safe("run path", run)
    prefix = f"\n#   every rank runs under: {' '.join(site.srun_prefix)}" if site.srun_prefix else ""
    return f"""#!/bin/bash
# Pool {number} of {path}: further rollout ranks for a run that is under way.
#   {_size(config.cluster.rollout)}, one SGLang engine per rank; at most {config.rollout.in_flight} trajectories at once{prefix}
# Written by `miles-submit attach`. The pool may be preempted or cancelled at any time; requeued, it joins the run again.

#SBATCH --job-name={config.run.name}-pool{number}
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
{_component(config, site, config.cluster.rollout)}
{_setup(site)}
set -euo pipefail
trap '' USR2  # the notice may come before the supervisor is there to take it
cd "$SLURM_SUBMIT_DIR"

# exec: USR2 goes to the batch script alone (B:), so the supervisor has to be the batch script.
exec {site.python} -m miles.cluster.pool {path} {number} --launcher slurm
"""


def _setup(site: SiteConfig) -> str:
    return "\n".join(["", "# Site set-up, before -u: module scripts read unset variables.", *site.setup, ""]) if site.setup else ""


def _shell_safe(what: str, path: str | Path) -> str:
    if any(ch in str(path) for ch in " \t\n'\"$`\\"):
        raise ConfigError(f"{what} {str(path)!r} has characters that a shell would read", "a path without spaces and quotes", "rename it")
    return str(path)


def _component(config: MilesConfig, site: SiteConfig, c: ComponentConfig) -> str:
    options = {
        "account": site.account, "partition": site.partition, "qos": site.qos, "constraint": site.constraint, "reservation": site.reservation,
        "nodes": c.nodes, "ntasks-per-node": c.ranks_per_node, "cpus-per-task": c.cpus_per_rank, "gpus-per-node": c.gpus_per_node or None,
        "mem": f"{int(c.memory_gb * 1e9 / 2**20)}M" if c.memory_gb else None,
        "time": config.cluster.time_limit, "signal": f"B:USR2@{config.cluster.signal_before_s}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return "\n".join([*lines, "#SBATCH --requeue", *(f"#SBATCH {extra}" for extra in site.sbatch)])


def _size(c: ComponentConfig) -> str:
    gpus = f", {c.gpus_per_node} GPU{'s' * (c.gpus_per_node > 1)} a node" if c.gpus_per_node else ""
    return f"{c.nodes} node{'s' * (c.nodes > 1)} x {c.ranks_per_node} MPI rank{'s' * (c.ranks_per_node > 1)}{gpus}"
