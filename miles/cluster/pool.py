"""`python -m miles.cluster.pool RUN POOL --launcher slurm|local`: the supervisor of a pool, from its batch script or in the foreground.

    ranks run ── they die ──────────────────────────> started again with a new epoch (at most cluster.max_restarts times)
        │─────── the run is finished, or away ──────> over
        │─────── USR2 (preemption, time limit) ─────> its ranks are ended, over: the job is requeued (at most cluster.max_requeues times) and joins again
        │─────── TERM, INT ─────────────────────────> its ranks are ended, over
        └─────── exit 2 or 3 ───────────────────────> over (failed)

Whatever ends it, the pool's epoch is raised last: that hands its trajectories back to the run at once, which otherwise waits for rollout.pool_lease_s. The ranks
have nothing to save, so a notice of preemption needs no time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from miles.cluster import slurm
from miles.cluster.decide import EX_TEMPFAIL, NOT_RESTARTED, Cause, Outcome
from miles.cluster.local import started
from miles.cluster.supervise import POLL_S, Step, last_error, restart_delay
from miles.config import load_site
from miles.core import MilesError, Role
from miles.rundir import PoolDir, publish_bytes

STOP_S = 15.0  # between TERM and KILL


def after_end(cause: Cause, *, finished: bool, restarts: int, most: int) -> Outcome | None:
    """What the end of a pool's ranks means; None: start them again. Pure.

    finished: the run is. restarts: how often they were started again so far, `most` times at most.
    """
    if finished:
        return Outcome("finished", 0, "the run is finished")
    if cause.code == 0:
        return Outcome("left", 0, "no leader of the run has written for rollout.pool_wait_s: the run was stopped, or waits in a queue")
    if cause.code in NOT_RESTARTED:
        return Outcome("failed", cause.code, f"a restart cannot mend this: {cause.text}", cause)
    if restarts >= most:
        return Outcome("failed", 1, f"{cause.text}; the ranks were already started again {most} times (cluster.max_restarts)", cause)
    return None


def when_told(sig: signal.Signals, requeues_left: int) -> Outcome:
    """What a signal to the supervisor means. Pure. `requeues_left`: 0 without Slurm."""
    if sig is not signal.SIGUSR2:
        return Outcome("left", 128 + sig, f"told to leave ({sig.name})")
    if requeues_left > 0:
        return Outcome("requeue", EX_TEMPFAIL, "preempted, or its time is up: it joins again when Slurm starts it again")
    return Outcome("left", 0, "preempted, or its time is up")


class PoolSupervisor:
    def __init__(self, pool: PoolDir, launcher: str, module: str):
        self.pool, self.launcher, self.module = pool, launcher, module
        self.site = load_site(pool.config.cluster.site)
        self.signals: deque[int] = deque()
        self.log = open(pool.folder / "supervisor.log", "a", buffering=1)

    def run(self) -> Outcome:
        """Until the pool is over; nothing of it is left running afterwards."""
        (self.pool.folder / "exit.json").unlink(missing_ok=True)  # of an earlier start of a requeued job
        facts = {"launcher": self.launcher, "host": socket.gethostname(), "pid": os.getpid(), "job_id": os.environ.get("SLURM_JOB_ID"), "started": time.time(),
                 "node_list": os.environ.get("SLURM_JOB_NODELIST", socket.gethostname())}
        publish_bytes(self.pool.folder / "start.json", json.dumps(facts).encode())
        outcome, restarts = None, 0
        try:
            while outcome is None:
                cause = self._step()
                outcome = cause if isinstance(cause, Outcome) else after_end(
                    cause, finished=self.pool.finished, restarts=restarts, most=self.pool.config.cluster.max_restarts)
                if outcome is None:
                    restarts += 1
                    self._wait(restart_delay(restarts))
        finally:
            outcome = outcome or Outcome("failed", 1, "the supervisor itself failed; the job's output has the traceback")
            self.pool.new_epoch()
            record = {"outcome": outcome.kind, "exit_code": outcome.exit_code, "text": outcome.text, "ended": time.time()}
            publish_bytes(self.pool.folder / "exit.json", json.dumps(record).encode())
            self.say(f"pool {self.pool.pool} is over: {outcome.kind}, {outcome.text}")
            self.log.close()
        return outcome

    def _step(self) -> Cause | Outcome:
        """Run the ranks once. An Outcome when a signal or the run's end came before or meanwhile."""
        if self.signals or self.pool.finished:
            return self._told() or Outcome("finished", 0, "the run is finished")
        step = Step(self.pool, self.site, self.launcher, Role.ROLLOUT, 0, self.module)
        self.say(f"pool {self.pool.pool} of {self.pool.path}: {step.ranks} ranks start with epoch {step.epoch} under {self.launcher}")
        try:
            while (cause := step.ended()) is None and not self.signals:
                time.sleep(POLL_S)
            if self.signals:  # also when the ranks got the same signal and were first
                return self._told()
        finally:
            _stop(step)
        if cause.rank is not None and (error := last_error(step.rank_log(cause.rank))):
            cause = replace(cause, text=f"{cause.text}\n{error}")
        self.say(f"epoch {step.epoch} is over: {cause.text}")
        return cause

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.signals:
            time.sleep(POLL_S)

    def _told(self) -> Outcome | None:
        if not self.signals:
            return None
        used = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return when_told(signal.Signals(self.signals[0]), self.pool.config.cluster.max_requeues - used if self.launcher == "slurm" else 0)

    def say(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}"
        print(line, file=self.log)
        print(line, flush=True)


def _stop(step: Step) -> None:
    """End what is left of a step: TERM, then KILL."""
    for hard in (False, True, True):
        if step.process.poll() is not None:
            return
        step.stop(hard)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.process.wait(timeout=STOP_S)


def supervise_pool(pool: PoolDir, launcher: str, module: str = "miles.rollout") -> int:
    """Run the pool until it is over. Returns the exit code: 0 (the run is finished or away), 75 (requeued), 1, 2, 3, 128 + signal."""
    supervisor = PoolSupervisor(pool, launcher, module)
    for sig in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda number, _: supervisor.signals.append(number))
    outcome = supervisor.run()
    if outcome.kind == "requeue":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # requeueing ends this very job; scontrol must get its answer first
        slurm.requeue(os.environ["SLURM_JOB_ID"])
    return outcome.exit_code


@contextlib.contextmanager
def started_pool(pool: PoolDir):
    """The same as a child process, its output in the pool's local.out, so that the foreground can show progress. Ended on leaving."""
    with started(pool.folder / "local.out", "miles.cluster.pool", str(pool.path), str(pool.pool), "--launcher", "local") as process:
        yield process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m miles.cluster.pool", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("pool", type=int, help="number of the pool, made by `miles-submit attach`")
    parser.add_argument("--launcher", choices=("slurm", "local"), required=True)
    parser.add_argument("--rollout", default="miles.rollout", metavar="MODULE", help="Python module of a rank")
    args = parser.parse_args()
    try:
        return supervise_pool(PoolDir(args.run, args.pool), args.launcher, args.rollout)
    except MilesError as e:
        print(e, file=sys.stderr)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
