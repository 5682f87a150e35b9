"""A run whose roles are stubs, seen from a test."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from miles.rundir import RunDir

PROJECT = Path(__file__).resolve().parents[2]
STUBS = ("--trainer", "tests.cluster.stub_trainer", "--rollout", "tests.cluster.stub_rollout")


class StubRun:
    """A run directory, and what a test wants to know about the processes that work in it."""

    def __init__(self, run: RunDir):
        self.run, self.path = run, run.path

    def records(self, attempt: int, role: str, epoch: int) -> list[dict]:
        return [json.loads(p.read_text()) for p in sorted((self.run.attempt_dir(attempt) / "ranks").glob(f"{role}-*.e{epoch:04d}.json"))]

    def exit(self, attempt: int) -> dict:
        return json.loads((self.run.attempt_dir(attempt) / "exit.json").read_text())

    def step(self) -> int:
        counter = self.path / "stub_step"
        return int(counter.read_text()) if counter.exists() else 0

    def wait_for(self, condition, seconds: float = 40.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text() for p in self.path.glob("attempts/*/*.log"))
                raise AssertionError(f"not within {seconds} s:\n{logs}")
            time.sleep(0.05)

    def kill(self, attempt: int, role: str, epoch: int, rank: int) -> None:
        """kill -9 one rank once all ranks of its step have said that they run."""
        ranks = self.run.config.cluster.trainer.ranks if role == "trainer" else self.run.config.cluster.rollout.ranks
        logs = [self.run.attempt_dir(attempt) / f"{role}-{r}.e{epoch:04d}.log" for r in range(ranks)]
        self.wait_for(lambda: all(p.exists() and f"epoch {epoch}" in p.read_text() for p in logs))
        os.kill(self.records(attempt, role, epoch)[rank]["pid"], signal.SIGKILL)

    def living(self) -> list[str]:
        """Command lines of processes that work on this run."""
        out = []
        for proc in Path("/proc").iterdir():
            try:
                words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
                zombie = (proc / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if proc.name.isdigit() and not zombie and str(self.path) in words:
                out.append(" ".join(words))
        return out
