"""Fixtures: runs whose roles are stubs, a supervisor in the foreground, a development cluster of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.register_assert_rewrite("tests.cluster.crash_checks")  # so that what they found is shown

from miles.cluster.slurm import scrubbed
from miles.config import load_config
from miles.rundir import RunDir
from tests.cluster.stubs import PROJECT, STUBS, StubRun


@pytest.fixture
def make_run(tmp_path):
    def make(steps: int, *overrides: str) -> StubRun:
        config = load_config(PROJECT / "configs" / "tiny_async.toml", (
            f"run.root={tmp_path}", f"run.steps={steps}", f"cluster.site={PROJECT / 'configs/sites/dev.toml'}", *overrides))
        return StubRun(RunDir.create(config))

    return make


@pytest.fixture
def supervise():
    """Start a local supervisor on a run; whatever happens, it does not outlive the test."""
    started: list[subprocess.Popen] = []

    def start(run: StubRun) -> subprocess.Popen:
        argv = [sys.executable, "-m", "miles.cluster.supervise", str(run.path), "--launcher", "local", *STUBS]
        started.append(subprocess.Popen(argv, cwd=PROJECT, env={**scrubbed(os.environ), "OMP_NUM_THREADS": "1"}))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)


@pytest.fixture(scope="session")
def devcluster(tmp_path_factory):
    """A cluster of four nodes beside any other on this machine; its folder."""
    folder = tmp_path_factory.mktemp("devcluster")
    program = str(PROJECT / "slurm" / "devcluster")
    subprocess.run([program, "start", "--nodes", "4", "--dir", str(folder)], check=True, env=scrubbed(os.environ))
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "etc" / "slurm.conf")
    yield folder
    subprocess.run([program, "stop", "--dir", str(folder)], check=True, env=scrubbed(os.environ))
    if before is None:
        del os.environ["SLURM_CONF"]
    else:
        os.environ["SLURM_CONF"] = before
