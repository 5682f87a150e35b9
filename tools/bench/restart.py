#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""Restarts of a run with real engines: seconds from a kill to the first trained step, against a cold start. [--quick] [--json] [--set KEY=VALUE ...]

The tiny_async run on this machine under mpiexec, every part real: 2 trainer ranks, 2 rollout ranks with an SGLang server each. Baseline: its own cold start,
from the supervisor's start to the end of the first step. Then, each while the run is at work, kill -9 of
  trainer      a trainer rank: to the end of the first step after it
  rollout      a rollout rank: to the end of the first step that trains a group made by its successors (what was ready is trained meanwhile)
  everything   the supervisor, with which all ends; a new one is started at once: to the end of the first step, and of the first on new groups
Target: the baseline + 10 %. One kill of each; without --quick three, of which the median counts. Exit 1 where a target is missed.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from miles.cluster.slurm import scrubbed
from miles.config import load_config
from miles.models import prepare
from miles.rundir import RunDir, read_journal

LIMIT_S = 1200.0


class Run:
    def __init__(self, root: str, overrides: list[str]):
        config = load_config("configs/tiny_async.toml", (f"run.root={root}", "run.steps=100000", "checkpoint.every_steps=2", "cluster.max_restarts=1000", *overrides))
        prepare(config)
        self.dir = RunDir.create(config)

    def start(self) -> float:
        """Start a supervisor; returns the time at which it was."""
        at = time.monotonic()
        with open(self.dir.path / "local.out", "ab") as out:
            self.supervisor = subprocess.Popen([sys.executable, "-m", "miles.cluster.supervise", str(self.dir.path), "--launcher", "local"],
                                               stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=scrubbed(os.environ), start_new_session=True)
        return at

    def stop(self) -> None:
        if self.supervisor.poll() is None:
            self.supervisor.terminate()
        self.supervisor.wait()

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


def measure(quick: bool, overrides: list[str]) -> list[dict]:
    found: dict[str, list[float]] = {name: [] for name in ("trainer", "rollout", "everything", "everything, new groups")}

    def note(name: str, seconds: float) -> None:
        print(f"  {name}: {seconds:.1f} s", file=sys.stderr, flush=True)  # minutes pass between two
        found[name].append(seconds)

    with tempfile.TemporaryDirectory(prefix="bench-restart-") as root:
        run = Run(root, overrides)
        try:
            at = run.start()
            cold = run.wait(lambda: run.first_step(0)) - at
            print(f"  cold start: {cold:.1f} s", file=sys.stderr, flush=True)
            for _ in range(1 if quick else 3):
                run.at_work()
                trainer, rollout = run.epochs()
                at = run.kill_rank("trainer")
                note("trainer", run.wait(lambda t=trainer: run.first_step(t)) - at)
                run.at_work()
                trainer, rollout = run.epochs()
                at = run.kill_rank("rollout")
                note("rollout", run.wait(lambda r=rollout: run.first_step_on_new_groups(0, r)) - at)
                run.at_work()
                trainer, rollout = run.epochs()
                run.supervisor.kill()
                run.supervisor.wait()
                at = run.start()
                note("everything", run.wait(lambda t=trainer: run.first_step(t)) - at)
                note("everything, new groups", run.wait(lambda t=trainer, r=rollout: run.first_step_on_new_groups(t, r)) - at)
        finally:
            run.stop()
    rows = []
    for name, seconds in found.items():
        value = statistics.median(seconds)
        rows.append({"figure": f"{name}: s from kill to step", "value": value, "baseline": cold, "ratio": value / cold, "limit": None, "target": 1.1 * cold,
                     "ok": value <= 1.1 * cold, "all": [round(s, 1) for s in seconds]})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one kill of each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override an option of configs/tiny_async.toml")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run ends with the bench, also when that is stopped
    figures = measure(args.quick, args.set)
    if args.json:
        print(json.dumps({"bench": "restart", "cpus": os.cpu_count(), "figures": figures}))
    else:
        print(f"{'figure':44} {'restart':>8} {'cold':>8} {'ratio':>6} {'target':>8}")
        for f in figures:
            print(f"{f['figure']:44} {f['value']:>8.1f} {f['baseline']:>8.1f} {f['ratio']:>6.2f} {f['target']:>8.1f}  {f['all']}" + ("" if f["ok"] else "  MISSED"))
    return 0 if all(f["ok"] for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
