"""Submission through submitit: an executor for heterogeneous jobs and a watcher that needs no accounting.

submitit has no het jobs, and its jobs unpickle a function on every task. A Miles job is a script that a user can read and submit
by hand; so this executor submits exactly that text (no pickle), and what submitit adds is the job object: state, wait, cancel, and one shared
watcher for many jobs. Written for submitit 1.5.4.
"""

from __future__ import annotations

import os
from pathlib import Path

from submitit.core.utils import FailedJobError
from submitit.slurm import slurm as submitit_slurm

from miles.cluster import slurm
from miles.cluster.render import render_job, render_pool
from miles.cluster.start import note_job
from miles.config import load_site
from miles.core import EnvironmentFault, MilesError
from miles.rundir import PoolDir, RunDir, remove_tree


class SqueueWatcher(submitit_slurm.SlurmInfoWatcher):
    """States from squeue. Without sacct, submitit's own watcher stays at UNKNOWN for ever."""

    def _make_command(self) -> list[str] | None:
        ids = sorted(self._registered - self._finished)
        return [*slurm.SQUEUE, f"--jobs={','.join(ids)}"] if ids else None

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        states = slurm.parse_squeue(string if isinstance(string, str) else string.decode())
        out = {i: {"JobID": i, "State": _whole(s), "NodeList": ",".join(s.nodes), "Reason": s.reason} for i, s in states.items()}
        for job_id in self._registered - self._finished - out.keys():
            if job_id in self._info_dict:  # seen before and now forgotten: it ended more than MinJobAge ago
                out[job_id] = {**self._info_dict[job_id], "State": "FORGOTTEN"}
        return out


def _whole(job: slurm.JobState) -> str:
    """One word for a het job: that of a component that is still active, else the leader's."""
    return next((s for s in job.components if s in slurm.ACTIVE), job.state)


class HetJob(submitit_slurm.SlurmJob):
    watcher = SqueueWatcher(delay_s=5)

    def done(self, force_check: bool = False) -> bool:
        """Whether no component is queued or running. There is no result pickle to look for."""
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")


class HetJobExecutor(submitit_slurm.SlurmExecutor):
    """Submits a ready het-job script. `folder` gets the submitted text and the job's output, by job id."""

    job_class = HetJob

    def __init__(self, folder: str | Path):
        slurm.version()  # a clear message where submitit would raise RuntimeError
        super().__init__(folder)
        self._script, self._arguments = "", []

    def submit_script(self, script: str, arguments: list[str]) -> HetJob:
        self._script, self._arguments = script, arguments
        return self._submit_command("")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        leaked = os.environ.keys() - slurm.scrubbed(os.environ).keys()
        unset = [word for name in sorted(leaked) for word in ("-u", name)]
        return ["env", *unset, "sbatch", f"--output={Path(self.folder).absolute()}/%j.out", str(submission_file_path), *self._arguments]


def submit(run: RunDir, config_path: str | Path) -> HetJob:
    """Queue a job for an existing run directory. Raises EnvironmentFault when Slurm does not answer or refuses.

    The job gets `--run`: the same directory now, after a requeue, and on resume.
    """
    job = _queue(run, render_job(run.config, config_path, load_site(run.config.cluster.site)), ["--run", str(run.path)])
    note_job(run.path, job.job_id)
    return job


def submit_pool(pool: PoolDir) -> HetJob:
    """Queue the job of a pool; it has one component. Raises EnvironmentFault like `submit`; then the pool is gone."""
    try:
        job = _queue(pool, render_pool(pool.path, pool.pool, pool.config, load_site(pool.config.cluster.site)), [])
    except MilesError:
        remove_tree(pool.folder)
        raise
    note_job(pool.folder, job.job_id)
    return job


def _queue(run: RunDir, script: str, arguments: list[str]) -> HetJob:
    folder = run.path.parent / "jobs"
    folder.mkdir(exist_ok=True)
    try:
        return HetJobExecutor(folder).submit_script(script, arguments)
    except FailedJobError as e:
        raise EnvironmentFault(f"sbatch refused the job: {str(e).strip()}", "a job that this cluster accepts",
                               "check the site profile (account, partition, qos) and the node counts; `miles-submit check` compares them") from e
