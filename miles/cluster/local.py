"""A run without Slurm: the same supervisor and roles, mpiexec on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from miles.cluster.slurm import scrubbed
from miles.cluster.supervise import supervise
from miles.rundir import RunDir


def run_local(run: RunDir) -> int:
    """Supervise in the foreground until the run is over; Ctrl-C stops it. Returns the exit code."""
    return supervise(run, "local")


@contextlib.contextmanager
def started_local(run: RunDir) -> Iterator[subprocess.Popen]:
    """The same as a child process, its output in RUN/local.out, so that the foreground can show progress. Ended on leaving."""
    with started(run.path / "local.out", "miles.cluster.supervise", str(run.path), "--launcher", "local") as process:
        yield process


@contextlib.contextmanager
def started(output: Path, module: str, *words: str) -> Iterator[subprocess.Popen]:
    """A Python module as a child process outside any MPI or Slurm step, its output appended to a file. Ended on leaving."""
    with open(output, "ab") as out:
        process = subprocess.Popen([sys.executable, "-m", module, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=scrubbed(os.environ),
                                   start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
