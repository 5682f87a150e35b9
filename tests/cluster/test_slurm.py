"""The rendered job on a real Slurm cluster with virtual nodes, stub roles in its steps."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from miles.cluster import slurm, submit
from miles.cluster.render import render_job
from miles.config import load_config, load_site
from miles.core import EnvironmentFault
from tests.cluster.stubs import PROJECT, STUBS

pytestmark = pytest.mark.cluster
SITE = load_site(PROJECT / "configs/sites/dev.toml").model_copy(update={"python": sys.executable})


@pytest.fixture
def sbatch(devcluster, tmp_path):
    """sbatch the rendered script of a run, its roles replaced by stubs; cancelled after the test."""
    jobs: list[str] = []

    def go(run, *options: str) -> str:
        text = render_job(run.run.config, "configs/tiny_async.toml", SITE)
        assert "--launcher slurm" in text
        script = tmp_path / "job.sbatch"
        script.write_text(text.replace("--launcher slurm", f"--launcher slurm {' '.join(STUBS)}"))
        done = slurm.command(["sbatch", f"--chdir={PROJECT}", f"--output={run.path}/job.out", *options, str(script), "--run", str(run.path)])
        jobs.append(re.search(r"job (\d+)", done.stdout)[1])
        return jobs[-1]

    yield go
    for job in jobs:
        slurm.cancel(job)


def ended(job: str) -> bool:
    state = slurm.squeue(job).get(job)
    return state is not None and not state.active


def test_status_of_the_cluster(devcluster):
    done = subprocess.run([PROJECT / "slurm" / "devcluster", "status", "--dir", devcluster], capture_output=True, text=True)
    assert done.returncode == 0 and "running: 4 nodes" in done.stdout
    again = subprocess.run([PROJECT / "slurm" / "devcluster", "start", "--nodes", "4", "--dir", devcluster], capture_output=True, text=True)
    assert again.returncode == 0 and "already running with 4 nodes" in again.stdout


def test_het_job_finishes(sbatch, make_run):
    run = make_run(10)
    job = sbatch(run)
    run.wait_for(lambda: ended(job), 60)
    assert slurm.squeue(job)[job].components == ("COMPLETED", "COMPLETED")
    assert run.step() == 10 and run.exit(1)["outcome"] == "finished"
    facts = json.loads((run.run.attempt_dir(1) / "attempt.json").read_text())
    assert facts["job_id"] == job and len(facts["job_ids"]) == 2 and len(facts["nodes"]) == 2
    assert {r["node"] for r in run.records(1, "rollout", 1)}.isdisjoint({r["node"] for r in run.records(1, "trainer", 1)})


def test_killed_ranks_restart_their_step(sbatch, make_run):
    run = make_run(200)  # more than the kills take
    job = sbatch(run)
    run.kill(1, "rollout", 1, rank=1)
    run.kill(1, "trainer", 1, rank=0)
    run.kill(1, "rollout", 2, rank=0)
    run.wait_for(lambda: ended(job), 120)
    assert run.step() == 200 and run.exit(1)["outcome"] == "finished"
    assert run.run.current_epoch("rollout") == 3 and run.run.current_epoch("trainer") == 2
    assert run.records(1, "rollout", 1)[1]["code"] == 137


def test_a_frozen_rank_is_killed_on_its_node_and_its_step_started_again(sbatch, make_run):
    run = make_run(400, "cluster.frozen_s=20")
    job = sbatch(run)
    run.wait_for(lambda: run.step() >= 5)
    frozen = run.records(1, "rollout", 1)[1]
    os.kill(frozen["pid"], signal.SIGSTOP)
    run.wait_for(lambda: ended(job), 180)
    assert run.step() == 400 and run.exit(1)["outcome"] == "finished"
    assert run.run.current_epoch("rollout") == 2 and run.run.current_epoch("trainer") == 1
    assert run.records(1, "rollout", 1)[1] == {**frozen, **run.records(1, "rollout", 1)[1], "code": 137, "frozen": "T (stopped)"}
    assert "rollout rank 1 on" in (log := (run.run.attempt_dir(1) / "supervisor.log").read_text()) and "gave no sign of life" in log


def test_notice_requeues_the_job(sbatch, make_run):
    run = make_run(60)
    job = sbatch(run)
    run.wait_for(lambda: run.step() >= 3)
    slurm.command(["scancel", "--batch", "--signal=USR2", job])
    run.wait_for(lambda: run.run.attempts() == [1, 2], 60)
    assert run.exit(1)["outcome"] == "requeue" and run.exit(1)["step_exit_code"] == 75
    run.wait_for(lambda: ended(job), 60)
    assert run.step() == 60 and run.exit(2)["outcome"] == "finished"
    assert json.loads((run.run.attempt_dir(2) / "attempt.json").read_text())["restart_count"] == 1


def test_preemption_ends_in_a_requeued_job_that_goes_on(sbatch, make_run, tmp_path):
    run = make_run(60)
    low = ["--partition=low"]
    job = sbatch(run, *low)  # the command line reaches component 0; preempting any component preempts the job
    run.wait_for(lambda: run.step() >= 3)
    slurm.command(["sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"])
    run.wait_for(lambda: run.run.attempts() == [1, 2], 90)
    assert run.exit(1)["outcome"] == "requeue"
    run.wait_for(lambda: ended(job), 60)
    assert run.step() == 60


def test_scancel_leaves_nothing(sbatch, make_run):
    run = make_run(1000)
    job = sbatch(run)
    run.wait_for(lambda: run.step() >= 2)
    slurm.cancel(job)
    run.wait_for(lambda: ended(job) and not run.living(), 40)
    assert run.exit(1)["outcome"] == "cancelled"


def test_job_of_another_size_is_refused(devcluster, make_run, tmp_path):
    config = load_config(PROJECT / "configs/tiny_async.toml", (f"run.root={tmp_path}", "cluster.rollout.nodes=1"))
    script = tmp_path / "job.sbatch"
    script.write_text(render_job(config, "configs/tiny_async.toml", SITE))
    out = tmp_path / "job.out"
    job = re.search(r"job (\d+)", slurm.command(["sbatch", f"--chdir={PROJECT}", f"--output={out}", str(script), "--set", f"run.root={tmp_path}"]).stdout)[1]
    deadline = time.monotonic() + 30
    while not ended(job) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert slurm.squeue(job)[job].state == "FAILED"
    assert "the job has 1 tasks for the rollout, the config asks for 2" in out.read_text()


def test_submitit_job_reports_its_state_without_accounting(devcluster, make_run, monkeypatch):
    text = render_job(make_run(5).run.config, "configs/tiny_async.toml", SITE).replace("--launcher slurm", f"--launcher slurm {' '.join(STUBS)}")
    monkeypatch.setattr(submit, "render_job", lambda *_: text)
    monkeypatch.setenv("SLURM_CPU_BIND", "map_cpu:99")  # what a surrounding job would leave behind
    monkeypatch.setenv("SBATCH_PARTITION", "none")
    run = make_run(10)
    job = submit.submit(run.run, "configs/tiny_async.toml")
    assert json.loads((run.path / "job.json").read_text()) == {"job_id": job.job_id}
    assert job.state in ("PENDING", "RUNNING") and not job.done()
    job.wait()
    assert job.state == "COMPLETED" and run.exit(1)["outcome"] == "finished"
    jobs = run.path.parent / "jobs"
    assert (jobs / f"{job.job_id}_submission.sh").read_text() == text
    assert "is over: finished" in (jobs / f"{job.job_id}.out").read_text()


def test_a_job_that_slurm_refuses_says_why(devcluster, make_run):
    run = make_run(5, "cluster.rollout.gpus_per_node=9")
    with pytest.raises(EnvironmentFault, match="sbatch refused the job"):
        submit.submit(run.run, "configs/tiny_async.toml")
