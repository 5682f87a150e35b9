#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""Restarts of a run with real engines: seconds from a kill to the first trained step, against a cold start. [--quick] [--json] [--set KEY=VALUE ...]

The tiny_async run on this machine under mpiexec, every part real: 2 trainer ranks, 2 rollout ranks with an SGLang server each. Baseline: its own cold start,
from the supervisor's start to the end of the first step. Then, each while the run is at work, kill -9 of
  trainer      a trainer rank: to the end of the first step after it
  rollout      a rollout rank: to the end of the first step that trains a group made by its successors (what was ready is trained meanwhile)
  everything   the supervisor, with which all ends; a new one is started at once: to the end of the first step, and of the first on new groups
Three kills of each, of which the median counts. Target: the baseline + 10 %. Limit: the shortest training step of the run, and for new groups the shortest
trajectory besides. Exit 1 where a target is missed.

--quick: one rollout rank, SGLang's stand-in from the tests as its engine, one kill of a trainer rank and no other. It shows what Miles itself takes to start
anew; what engines take is left out, since their two starts alone take most of a minute where two cores share them.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from miles.cluster.shm import remove_dead_segments
from miles.cluster.slurm import scrubbed
from miles.config import load_config
from miles.models import prepare
from miles.report.read import read_run
from miles.rundir import RunDir, read_journal
from tools.bench.table import figure, tell

LIMIT_S = 1200.0
ENDLESS = ("run.steps=100000", "checkpoint.every_steps=2", "cluster.max_restarts=1000")


class Run:
    def __init__(self, run: RunDir, rollout: str):
        """`rollout`: the module of a rollout rank."""
        self.dir, self._rollout = run, rollout

    def start(self) -> float:
        """Start a supervisor; returns the time at which it was."""
        at = time.monotonic()
        with open(self.dir.path / "local.out", "ab") as out:
            self.supervisor = subprocess.Popen([sys.executable, "-m", "miles.cluster.supervise", str(self.dir.path), "--launcher", "local", "--rollout", self._rollout],
                                               stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=scrubbed(os.environ), start_new_session=True)
        return at

    def stop(self) -> None:
        if self.supervisor.poll() is None:
            self.supervisor.terminate()
        self.supervisor.wait()
        remove_dead_segments()  # of the ranks that were killed

    def epochs(self) -> tuple[int, int]:
        return self.dir.current_epoch("trainer"), self.dir.current_epoch("rollout")

    def _records(self, role: str, after: int) -> list[dict]:
        """Of the epochs after `after`."""
        paths = sorted((self.dir.buffer_dir / "journal").glob(f"{role}.e*.log"))
        return [r for p in paths if int(p.name.split(".")[1][1:]) > after for r in read_journal(p)]

    def first_step(self, after: int) -> bool:
        return any(r["kind"] == "trained" for r in self._records("trainer", after))

    def first_step_on_new_groups(self, trainer: int, rollout: int) -> bool:
        made = {r["group"] for r in self._records("rollout", rollout) if r["kind"] == "ready"}
        return any(r["kind"] == "trained" and made & set(r["groups"]) for r in self._records("trainer", trainer))

    def wait(self, condition) -> float:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline or self.supervisor.poll() is not None:
                raise SystemExit(f"{self.dir.path}: not within {LIMIT_S:.0f} s, or the run ended:\n{(self.dir.path / 'local.out').read_text()[-3000:]}")
            time.sleep(0.05)
        return time.monotonic()

    def at_work(self) -> None:
        """Three more steps on groups of the living rollout ranks: everything is warm, and a checkpoint is there."""
        _, rollout = self.epochs()
        made = len(self._records("trainer", 0))
        self.wait(lambda: self.first_step_on_new_groups(0, rollout - 1) and len(self._records("trainer", 0)) > made + 6)

    def kill_rank(self, role: str) -> float:
        epoch = self.dir.current_epoch(role)
        (record,) = (json.loads(p.read_text()) for p in self.dir.path.glob(f"attempts/*/ranks/{role}-1.e{epoch:04d}.json"))
        os.kill(record["pid"], signal.SIGKILL)
        return time.monotonic()


def real(root: Path, overrides: list[str]) -> Run:
    config = load_config(ROOT / "configs/tiny_async.toml", (f"run.root={root}", *ENDLESS, *overrides))
    prepare(config)
    return Run(RunDir.create(config), "miles.rollout")


def with_stand_ins(root: Path, overrides: list[str]) -> Run:
    from tests.cluster.crash import ROLLOUT, make_run, make_tasks
    from tests.engine.tiny import make_model

    overrides = ["cluster.rollout.nodes=1", *overrides]
    return Run(make_run(root, make_model(root / "model"), make_tasks(root / "tasks", 8), 1, *ENDLESS, *overrides), ROLLOUT)


def measure(run: Run, kills: tuple[str, ...], times: int) -> list[dict]:
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        print(f"  {name}: {seconds:.1f} s", file=sys.stderr, flush=True)  # minutes pass between two
        found.setdefault(name, []).append(seconds)

    try:
        at = run.start()
        cold = run.wait(lambda: run.first_step(0)) - at
        print(f"  cold start: {cold:.1f} s", file=sys.stderr, flush=True)
        for kill in kills * times:
            run.at_work()
            trainer, rollout = run.epochs()
            if kill == "trainer":
                at = run.kill_rank("trainer")
                note("trainer", run.wait(lambda t=trainer: run.first_step(t)) - at)
            elif kill == "rollout":
                at = run.kill_rank("rollout")
                note("rollout, new groups", run.wait(lambda r=rollout: run.first_step_on_new_groups(0, r)) - at)
            else:
                run.supervisor.kill()
                run.supervisor.wait()
                at = run.start()
                note("everything", run.wait(lambda t=trainer: run.first_step(t)) - at)
                note("everything, new groups", run.wait(lambda t=trainer, r=rollout: run.first_step_on_new_groups(t, r)) - at)
    finally:
        run.stop()
    tables = read_run(run.dir.path).tables
    step = float(tables["steps"]["train_s"].min())
    trajectory = float(tables["trajectories"]["seconds"][tables["trajectories"]["status"] == "ok"].min())
    return [figure(f"{name}: kill to step", "s", statistics.median(seconds), cold, step + (trajectory if "new groups" in name else 0.0), most=1.1, of_ratio=True,
                   each=[round(s, 1) for s in seconds]) for name, seconds in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one kill of a trainer rank beside a stand-in for the engine; no real engine, no kill of a rollout rank or of everything")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override an option of configs/tiny_async.toml")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run ends with the bench, also when that is stopped
    os.chdir(ROOT)  # relative paths of the configuration
    with tempfile.TemporaryDirectory(prefix="miles-bench-restart-") as name:
        make, kills, times = (with_stand_ins, ("trainer",), 1) if args.quick else (real, ("trainer", "rollout", "everything"), 3)
        figures = measure(make(Path(name), args.set), kills, times)
    return tell("restart", figures, args.json, engines="stand-ins" if args.quick else "real")


if __name__ == "__main__":
    sys.exit(main())
