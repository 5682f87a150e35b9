"""MPI ranks of a test, started as the supervisor starts a run's: mpiexec over the wrapper that keeps each rank's words in a file and lets clean
ranks leave together. Under mpiexec alone the first rank to leave takes the others and what they said last with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from miles.rundir import RunDir

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))


def start(n: int, module: str, run: RunDir, role: str, **env: str) -> subprocess.Popen:
    """`n` ranks of `python -m MODULE RUN` as a new epoch of the role."""
    run.path.joinpath("ranks").mkdir(exist_ok=True)
    told = {"MILES_ROLE": role, "MILES_EPOCH": str(run.new_epoch(role)), "MILES_FIRST_RANK": "0", "MILES_LAUNCHER": "local", "MILES_FOLDER": str(run.path), "MILES_FROZEN_S": "3600"}
    return subprocess.Popen([MPIEXEC, "-n", str(n), sys.executable, "-m", "miles.cluster.rank", str(run.path), module], env={**os.environ, **told, **env})


def codes(run: RunDir, role: str) -> list[int]:
    """How the ranks of the role's newest epoch have ended. mpiexec's own code says less: to it a rank that leaves without MPI_Finalize has crashed."""
    return [json.loads(p.read_text())["code"] for p in sorted((run.path / "ranks").glob(f"{role}-*.e{run.current_epoch(role):04d}.json"))]


def said(run: RunDir, role: str) -> str:
    """What the ranks of every epoch of the role have said until now."""
    return "".join(p.read_text() for p in sorted(run.path.glob(f"{role}-*.e*.log")))
