"""`miles-submit` as a user types it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles.config import load_config
from miles.log import RunLog
from miles.rundir import JournalWriter, PoolDir, PoolFacts, RunDir, publish_bytes

TINY = "configs/tiny_async.toml"


def miles(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", "from miles.cli import main; main(prog_name='miles-submit')", *map(str, words)],
                          capture_output=True, text=True, timeout=120)


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run that trained steps 1-3, died, and trained 3-4 again in a second attempt."""
    made = RunDir.create(load_config(TINY, (f"run.root={tmp_path}", "run.steps=4")))
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        assert made.new_attempt() == attempt
        log = RunLog(made.log_path(attempt, "trainer", 0, attempt))
        for step in steps:
            log.row("steps", step=step, reward_mean=step / 10 + attempt, loss=0.5, grad_norm=1.0, staleness_max=1, logprob_diff_mean=1e-5, wait_s=0.1, step_s=2.0)
        log.close()
    folder = made.attempt_dir(1)
    publish_bytes(folder / "exit.json", json.dumps({"outcome": "failed", "exit_code": 1, "text": "a disk was full"}).encode())
    (folder / "supervisor.log").write_text("one\ntwo\nthree\n")
    return made


def test_render_prints_the_job_file():
    done = miles("render", TINY)
    assert done.returncode == 0 and done.stdout == Path("jobs/tiny_async.sbatch").read_text()


def test_an_unknown_key_is_code_2_with_the_nearest_name():
    done = miles("render", TINY, "--set", "rollout.in_fligth=3")
    assert done.returncode == 2 and "did you mean 'in_flight'" in done.stderr and "Traceback" not in done.stderr


def test_the_big_job_checks_without_gpus():
    done = miles("check", "configs/glm52_async.toml", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0 and data["ok"] and data["memory"]
    assert {f["name"] for f in data["findings"]} >= {"memory", "tasks", "model", "run root", "python", "sandbox", "slurm", "mpi world"}


def test_check_refuses_a_function_that_does_not_exist():
    done = miles("check", "configs/tiny_async.toml", "--set", "algorithm.advantage=nowhere.at.all", "--json")
    (finding,) = [f for f in json.loads(done.stdout)["findings"] if f["name"] == "functions"]
    assert "algorithm.advantage = 'nowhere.at.all'" in finding["text"]


def test_a_missing_task_folder_is_found_by_check(tmp_path):
    done = miles("check", TINY, "--set", f"tasks.path={tmp_path}/none", "--json")
    assert done.returncode == 2
    assert [f["name"] for f in json.loads(done.stdout)["findings"] if f["status"] == "fail"] == ["tasks"]


def test_status_counts_a_step_that_was_trained_again_once(run):
    data = json.loads(miles("status", run.path, "--json").stdout)
    assert (data["step"], data["steps"], data["finished"], data["alive"]) == (4, 4, False, False)
    assert data["last_step"]["reward_mean"] == pytest.approx(2.4)
    assert [a.get("outcome") for a in data["attempts"]] == ["failed", None]


def test_follow_prints_lines_into_a_pipe_and_the_outcome(run):
    done = miles("follow", run.path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert done.returncode == 1 and len(lines) == 4 and lines[2].startswith("step 3  reward 2.300")
    assert "miles-submit resume" in done.stdout
    run.finish("test")
    assert miles("follow", run.path).returncode == 0


def test_logs_lists_and_prints_the_end(run):
    assert json.loads(miles("logs", run.path, "--attempt", "1", "--json").stdout) == [str(run.attempt_dir(1) / "supervisor.log")]
    assert miles("logs", run.path, "supervisor", "--attempt", "1", "--lines", "2").stdout.endswith("two\nthree\n")


def test_resume_refuses_another_config_field_by_field(run):
    done = miles("resume", run.path, "--config", TINY)
    assert done.returncode == 2 and "run.steps: 4 -> 48" in done.stderr
    assert "rollout.in_flight" not in done.stderr


def test_a_run_that_does_not_exist_is_code_2():
    done = miles("status", "runs/none")
    assert done.returncode == 2 and "no run 'runs/none'" in done.stderr


def test_cancel_of_a_dead_run_is_code_3(run):
    done = miles("cancel", run.path)
    assert done.returncode == 3 and "nothing works on" in done.stderr


@pytest.mark.parametrize("command", ["render", "check", "plan", "prepare", "submit", "local", "status", "follow", "logs", "cancel", "resume", "attach", "report"])
def test_every_command_helps_with_an_example(command):
    done = miles(command, "--help")
    assert done.returncode == 0 and f"miles-submit {command}" in done.stdout


def test_help_is_quick():
    began = time.monotonic()
    miles("--help")
    assert time.monotonic() - began < 5  # imports of torch or mpi4py would show


def test_attach_prints_the_job_of_a_pool_and_refuses_what_cannot_be(run):
    done = miles("attach", run.path, "--nodes", "3", "--time-limit", "02:00:00", "--in-flight", "7", "--dry-run")
    assert done.returncode == 0 and not run.pools() and f"-m miles.cluster.pool {run.path} 1 --launcher slurm" in done.stdout
    assert "#SBATCH --nodes=3" in done.stdout and "#SBATCH --time=02:00:00" in done.stdout and "at most 7 trajectories at once" in done.stdout
    assert miles("attach", "runs/none", "--nodes", "1").returncode == 2
    run.finish("test")
    done = miles("attach", run.path, "--nodes", "3")
    assert done.returncode == 2 and "the run is finished" in done.stderr and not run.pools()


def test_status_lists_pools(run):
    pool = PoolDir.create(run, PoolFacts(nodes=2, in_flight=24, time_limit="01:00:00"))
    JournalWriter(pool.pool_epoch_dir(1, pool.new_epoch()) / "out.log").append(
        {"kind": "up", "rank": 1000, "version": 1, "url": "http://x", "moved": []}, {"kind": "up", "rank": 1001, "version": 1, "url": "http://y", "moved": []})
    assert "  pool 1: local lost, 2 nodes, 2 engines up, 0 of 24 trajectories\n" in miles("status", run.path).stdout
    (row,) = json.loads(miles("status", run.path, "--json").stdout)["pools"]
    assert (row["pool"], row["state"], row["epoch"], row["engines"], row["running"]) == (1, "lost", 1, 2, 0)


def test_report_prints_figures_and_writes_a_page(run, tmp_path):
    data = json.loads(miles("report", run.path, "--json").stdout)
    assert (data["steps_planned"], data["attempts"]) == (4, 2)
    assert "not finished: 0 of 4 steps" in miles("report", run.path).stdout
    assert miles("report", run.path, "--html", tmp_path / "r.html").returncode == 0
    assert "<html" in (tmp_path / "r.html").read_text().lower()
