"""The Slurm commands Miles uses, and the environment they may see."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from miles.core import EnvironmentFault

_LEAKS = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "PMI2_", "HYDRA_", "MPI_LOCAL")
ACTIVE = frozenset({"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "PREEMPTED", "SIGNALING", "RESIZING", "REQUEUE_HOLD"})


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without what a surrounding Slurm job or MPI step left in it: a leaked SLURM_CPU_BIND binds a nested job to the wrong cores,
    a leaked PMI_FD makes a new MPI world join the old one. SLURM_CONF stays: it names the cluster."""
    return {k: v for k, v in env.items() if k == "SLURM_CONF" or not k.startswith(_LEAKS)}


@dataclass(frozen=True)
class JobState:
    """A job as squeue shows it; a het job is one job whose components are listed by offset."""

    job_id: str
    state: str  # of the leading component
    reason: str
    nodes: tuple[str, ...]  # node list of each component
    components: tuple[str, ...]  # state of each component

    @property
    def active(self) -> bool:
        return any(s in ACTIVE for s in self.components)


def parse_squeue(text: str) -> dict[str, JobState]:
    """Lines `JOBID[+OFFSET]|STATE|NODES|REASON` by job id. Sorted by offset, because squeue sorts by state."""
    rows: dict[str, dict[int, list[str]]] = {}
    for line in text.splitlines():
        job_id, state, nodes, reason = line.split("|", 3)
        base, _, offset = job_id.partition("+")
        rows.setdefault(base, {})[int(offset or 0)] = [state, nodes, reason]
    out = {}
    for base, parts in rows.items():
        ordered = [parts[k] for k in sorted(parts)]
        out[base] = JobState(base, ordered[0][0], ordered[0][2], tuple(p[1] for p in ordered), tuple(p[0] for p in ordered))
    return out


SQUEUE = ("squeue", "--noheader", "--states=all", "--format=%i|%T|%N|%r")


def squeue(*job_ids: str) -> dict[str, JobState]:
    """States of jobs (all that Slurm still knows when none is named): running, pending, ended less than MinJobAge ago. No sacct needed."""
    done = command([*SQUEUE, *([f"--jobs={','.join(job_ids)}"] if job_ids else [])], check=False)
    if done.returncode:
        if "Invalid job id" in done.stderr:  # forgotten: it ended more than MinJobAge ago
            return {}
        raise _fault("squeue", done)
    return parse_squeue(done.stdout)


def requeue(job_id: str) -> None:
    """Put the whole het job back into the queue (its leading id only: a component is refused). It waits out the lifetime of
    its old credential, 120 s unless the site set cred_expire, then starts as before with SLURM_RESTART_COUNT raised."""
    command(["scontrol", "requeue", job_id])


def cancel(job_id: str) -> None:
    command(["scancel", job_id])


def signal_step(step: str, signal: str) -> None:
    """Signal every task of a step, e.g. `42.1`. A step that has just ended is no error."""
    command(["scancel", f"--signal={signal}", step], check=False)


def version() -> tuple[int, int]:
    """(year, month) of the Slurm clients, e.g. (22, 5). Raises EnvironmentFault when there is none."""
    found = re.search(r"(\d+)\.(\d+)", command(["sbatch", "--version"]).stdout)
    if not found:
        raise EnvironmentFault("`sbatch --version` names no version", "slurm 22.05 or newer", "check that sbatch is Slurm's")
    return int(found[1]), int(found[2])


def command(argv: list[str], *, check: bool = True, timeout: float = 60.0) -> subprocess.CompletedProcess:
    if shutil.which(argv[0]) is None:
        raise EnvironmentFault(f"no program {argv[0]} on this machine", "a Slurm login node or the development cluster",
                               "run `slurm/devcluster start` and export its SLURM_CONF, or use `miles-submit local`")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env=scrubbed(os.environ))
    except subprocess.TimeoutExpired as e:
        raise EnvironmentFault(f"`{' '.join(argv)}` gave no answer within {timeout:.0f} s", "a responsive slurmctld", "check `scontrol ping`") from e
    if check and done.returncode:
        raise _fault(" ".join(argv), done)
    return done


def _fault(what: str, done: subprocess.CompletedProcess) -> EnvironmentFault:
    said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]  # the last line is the cause, those before it the way there
    return EnvironmentFault(f"`{what}` ended with code {done.returncode}: {said[-1]}", "a reachable Slurm cluster",
                            "check SLURM_CONF and `scontrol ping`; for the development cluster: slurm/devcluster status")
