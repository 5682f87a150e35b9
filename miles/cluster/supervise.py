"""`python -m miles.cluster.supervise RUN --launcher slurm|local`: one attempt of a run, from the batch script or in the foreground.

Starts the trainer and the rollout step, each an MPI world of its own, starts again what dies, hands on USR2, requeues, and leaves a cause in
exit.json. All decisions are in miles.cluster.decide; this file is the shell around it: processes, signals, files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from miles.cluster import launch, slurm
from miles.cluster.decide import (
    Cancel,
    Cause,
    Limits,
    Notice,
    Nudge,
    Outcome,
    Phase,
    RankReport,
    Reached,
    Start,
    StepEnded,
    Stop,
    Tick,
    begin,
    decide,
    step_cause,
    wasted,
)
from miles.cluster.progress import attempts_of, reached
from miles.cluster.rank import die_with_parent
from miles.config import SiteConfig, load_site
from miles.core import MilesError, Role
from miles.rundir import RunDir, publish_bytes

POLL_S = 0.2
BACKOFF_S, MOST_BACKOFF_S = 2.0, 30.0
"""Seconds before the second restart of a role, twice as many before each further one, up to the most."""
START_S = 120.0
"""Seconds in which every rank of a step must exist; a step that Slurm or hydra never launches is stopped and tried again."""
CHECK_S = 5.0
"""How often the records of a running step's ranks are read. One that has failed at two looks in a row has not taken its step with it: mpiexec sees to
that only after all ranks have met in MPI_Init, and those that wait there for a dead one wait for ever."""
ERROR = re.compile(r"(MilesError|ConfigError|EnvironmentFault|StructureError|StaleEpochError): ")
PACKAGES = ("miles", "torch", "sglang", "megatron-core", "transformers", "mpi4py", "numpy", "h5py")


class Step:
    """One launch of one role: the srun or mpiexec process and the records of its ranks. With a PoolDir as `run`, one launch of that pool's ranks."""

    def __init__(self, run: RunDir, site: SiteConfig, launcher: str, role: Role, attempt: int, module: str):
        self.role, self.launcher = role, launcher
        self.epoch = run.new_epoch(role)
        self.records = run.attempt_dir(attempt) / "ranks"
        self.ranks, self.first_rank = launch.component(run.config, role).ranks, run.first_rank
        self.hung = self.asked = False
        self.deadline, self.check_at, self.bereft = time.monotonic() + START_S, time.monotonic() + CHECK_S, False
        if launcher == "slurm":
            argv, env = launch.slurm_argv(run, site, role, module), dict(os.environ)
        else:
            argv, env = launch.local_argv(run.config, role, run.path, module), slurm.scrubbed(os.environ)
        # A session of its own: Ctrl-C reaches the supervisor alone, and the whole step can be killed as a group.
        # die_with_parent: srun and mpiexec end with the supervisor, and their ranks with them.
        self.process = subprocess.Popen(argv, env={**env, **launch.rank_environment(run, site, launcher, role, attempt, self.epoch)},
                                        stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent)

    def rank_log(self, rank: int) -> Path:
        return self.records.parent / f"{self.role}-{self.first_rank + rank}.e{self.epoch:04d}.log"

    def reports(self) -> list[dict]:
        out = []
        for path in self.records.glob(f"{self.role}-*.e{self.epoch:04d}.json"):
            with contextlib.suppress(FileNotFoundError):
                out.append(json.loads(path.read_text()))
        return out

    def ended(self) -> Cause | None:
        """The cause when the step is over, else None. Also stops a step whose ranks never appeared, or that outlives one of them."""
        code = self.process.poll()
        if code is None:
            if time.monotonic() > self.check_at:
                failed = any(r["code"] not in (None, 0, os.EX_TEMPFAIL) for r in self.reports())
                if failed and self.bereft:
                    self.stop(hard=True)
                self.check_at, self.bereft = time.monotonic() + CHECK_S, failed
            if time.monotonic() > self.deadline:
                missing = self.ranks - len(self.reports())
                self.deadline = float("inf")
                if missing:
                    self.hung = True
                    self.stop(hard=True)
            return None
        if self.hung:
            return Cause(self.role, 1, f"{self.role} step was not launched within {START_S:.0f} s")
        reports = [RankReport(r["rank"], r["pid"], r["host"], r["code"], r["ended"], r["frozen"]) for r in self.reports()]
        return step_cause(self.role, reports, self.ranks, code)

    def nudge(self) -> None:
        if self.launcher == "slurm":
            if self._launched():
                self.process.send_signal(signal.SIGUSR2)  # srun hands it to every task
        else:
            self._signal_ranks(signal.SIGUSR2)  # mpiexec would die of it

    def stop(self, hard: bool) -> None:
        if self.launcher == "slurm":
            step = next((r["step"] for r in self.reports()), None)
            if step is not None and not hard:
                # Not to srun: TERM makes it kill the tasks at once. The step belongs to the component's own job id.
                job = os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{launch.HET_GROUP[self.role]}", os.environ["SLURM_JOB_ID"])  # a pool's is no het job
                slurm.signal_step(f"{job}.{step}", "TERM")
                return
        elif not hard:
            self._signal_ranks(signal.SIGTERM)
            return
        with contextlib.suppress(ProcessLookupError):
            # srun asks slurmd to kill its tasks, mpiexec its proxies; a second hard stop does not ask any more.
            os.killpg(self.process.pid, signal.SIGKILL if self.asked else signal.SIGTERM)
        self.asked = True

    def _launched(self) -> bool:
        return len(self.reports()) == self.ranks

    def _signal_ranks(self, sig: int) -> None:
        for r in self.reports():
            if r["code"] is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(r["pid"], sig)


class Supervisor:
    def __init__(self, run: RunDir, launcher: str, modules: dict[Role, str]):
        self.run, self.launcher, self.modules = run, launcher, modules
        self.site = load_site(run.config.cluster.site)
        self.steps: dict[Role, Step] = {}
        self.starting: dict[Role, float] = {}  # role -> monotonic time of its delayed start
        self.never_started: list[Cause] = []  # counted as running by `decide`, told to stop before their delayed start
        self.signals: deque[int] = deque()
        self.attempt = 0
        c = run.config.cluster
        # Slurm kills at the limit: the requeue must have been asked for before. Its notice is early rather than late.
        self.checkpoint_s = 0.75 * c.signal_before_s

    def attempt_once(self) -> Outcome:
        """Run until the attempt is over; nothing of it is left running afterwards."""
        begin_at = Reached(*reached(self.run))
        facts = self._facts(begin_at)
        earlier = [a.get("checkpoint", 0) for a in attempts_of(self.run, facts)]
        requeues_left = self.run.config.cluster.max_requeues - wasted([*earlier, begin_at.checkpoint])
        self.attempt = self.run.new_attempt()
        folder = self.run.attempt_dir(self.attempt)
        (folder / "ranks").mkdir()
        self.log = open(folder / "supervisor.log", "a", buffering=1)
        publish_bytes(folder / "attempt.json", json.dumps({"attempt": self.attempt, **facts}, indent=1).encode())
        limits = Limits(self.run.config.cluster.max_restarts, requeues_left, self.checkpoint_s)
        self.say(f"attempt {self.attempt} of {self.run.path} begins under {self.launcher}")
        state, actions = begin(begin_at)
        try:
            self.act(actions)
            while state.phase is not Phase.OVER:
                for event in self.events():
                    before = state.phase
                    state, actions = decide(state, event, time.monotonic(), limits)
                    if state.phase is not before:
                        self.say(f"{before} -> {state.phase}" + (f": {_headline(state.outcome)}" if state.outcome else ""))
                    self.act(actions)
                time.sleep(POLL_S)
        finally:
            self.kill_all()
            outcome = state.outcome or Outcome("failed", 1, "the supervisor itself failed; the job's output has the traceback")
            self.record(outcome)
            self.log.close()
        return outcome

    # -- events --------------------------------------------------------------------------------------------------------------
    def events(self) -> list:
        out: list = []
        while self.signals:
            sig = signal.Signals(self.signals.popleft())
            out.append(Notice(Reached(*reached(self.run))) if sig is signal.SIGUSR2 else Cancel(f"the job was told to stop ({sig.name})", 128 + sig))
            self.say(f"got {sig.name}")
        out += [StepEnded(self.never_started.pop()) for _ in range(len(self.never_started))]
        now = time.monotonic()
        for role in [r for r, when in self.starting.items() if when <= now]:
            del self.starting[role]
            self.start(role)
        for role, step in list(self.steps.items()):
            cause = step.ended()
            if cause is not None:
                del self.steps[role]
                if cause.rank is not None and (error := last_error(step.rank_log(cause.rank))):
                    cause = replace(cause, text=f"{cause.text}\n{error}")
                self.say(f"{role} step of epoch {step.epoch} is over: {cause.text}")
                out.append(StepEnded(cause, self.run.finished, Reached(*reached(self.run))))
        return [*out, Tick()]

    # -- actions -------------------------------------------------------------------------------------------------------------
    def act(self, actions: list) -> None:
        for action in actions:
            match action:
                case Start(role, restart):
                    self.starting[role] = time.monotonic() + restart_delay(restart)
                case Nudge(role):
                    if role in self.steps:
                        self.steps[role].nudge()
                case Stop(role, hard):
                    self.stop(role, hard)

    def start(self, role: Role) -> None:
        self.steps[role] = Step(self.run, self.site, self.launcher, role, self.attempt, self.modules[role])
        self.say(f"{role} step starts with epoch {self.steps[role].epoch}")

    def stop(self, role: Role, hard: bool) -> None:
        if role in self.steps:
            self.steps[role].stop(hard)
        elif self.starting.pop(role, None) is not None:
            self.never_started.append(Cause(role, 0, f"{role} step was waiting to be started again"))

    def kill_all(self) -> None:
        """The last resort, when the loop above ended by an exception."""
        for step in self.steps.values():
            for _ in range(2):
                step.stop(hard=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.process.wait(timeout=10)
                    break

    # -- records -------------------------------------------------------------------------------------------------------------
    def _facts(self, begin_at: Reached) -> dict:
        env = os.environ
        het = range(int(env.get("SLURM_HET_SIZE", "0")))
        return {
            "checkpoint": begin_at.checkpoint, "launcher": self.launcher, "started": time.time(), "host": socket.gethostname(), "pid": os.getpid(),
            "job_id": env.get("SLURM_JOB_ID"), "cluster": env.get("SLURM_CLUSTER_NAME"), "restart_count": int(env.get("SLURM_RESTART_COUNT", "0")),
            "job_ids": [env.get(f"SLURM_JOB_ID_HET_GROUP_{i}") for i in het],
            "nodes": [env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}") for i in het] or [env.get("SLURM_JOB_NODELIST") or socket.gethostname()],
            "versions": {name: _version(name) for name in PACKAGES},
        }

    def record(self, outcome: Outcome) -> None:
        cause = outcome.cause
        publish_bytes(self.run.attempt_dir(self.attempt) / "exit.json", json.dumps({
            "outcome": outcome.kind, "exit_code": outcome.exit_code, "text": outcome.text, "ended": time.time(),
            "step": cause and str(cause.role), "rank": cause and cause.rank, "step_exit_code": cause and cause.code,
            "signal": cause and (cause.code - 128 if cause.code > 128 else None),
        }, indent=1).encode())
        self.say(f"attempt {self.attempt} is over: {outcome.kind}, {_headline(outcome)}")

    def say(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}"
        print(line, flush=True)
        with contextlib.suppress(OSError):  # a full disk ends ranks, with advice; not the one who reports it
            print(line, file=self.log)


def restart_delay(restart: int) -> float:
    """Seconds before the `restart`-th restart: the first at once, then slower, because whatever killed the step may need a moment to pass."""
    return 0.0 if restart <= 1 else min(BACKOFF_S * 2.0 ** (restart - 2), MOST_BACKOFF_S)


def _headline(outcome: Outcome) -> str:
    """The first line of why; the rest was said when the step ended, and is in exit.json."""
    return outcome.text.splitlines()[0]


def last_error(log: Path, lines: int = 12) -> str:
    """The end of a rank's log from its last Miles error on (see miles.comm.entry), at most `lines` lines; empty when it died without one."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    starts = [i for i, line in enumerate(text) if ERROR.match(line)]
    if not starts:
        return ""
    end = text[starts[-1]:]
    return "\n".join(end if len(end) <= lines else [end[0], "  ...", *end[-(lines - 2):]])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def supervise(run: RunDir, launcher: str, modules: dict[Role, str] | None = None) -> int:
    """Run attempts until the run is over or handed back to Slurm. Returns the exit code: 0, 2, 3, 1, 75 (requeued), 128 + signal.

    Under Slurm the job itself is requeued and this process ends; locally the next attempt starts in place.
    """
    supervisor = Supervisor(run, launcher, modules or {Role.TRAINER: "miles.trainer", Role.ROLLOUT: "miles.rollout"})
    for sig in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda number, _: supervisor.signals.append(number))
    while True:
        outcome = supervisor.attempt_once()
        if outcome.kind != "requeue":
            return outcome.exit_code
        if launcher == "slurm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # requeueing ends this very job; scontrol must get its answer first
            slurm.requeue(os.environ["SLURM_JOB_ID"])
            return outcome.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m miles.cluster.supervise", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--launcher", choices=("slurm", "local"), required=True)
    parser.add_argument("--trainer", default="miles.trainer", metavar="MODULE", help="Python module of a trainer rank")
    parser.add_argument("--rollout", default="miles.rollout", metavar="MODULE", help="Python module of a rollout rank")
    args = parser.parse_args()
    try:
        return supervise(RunDir(args.run), args.launcher, {Role.TRAINER: args.trainer, Role.ROLLOUT: args.rollout})
    except MilesError as e:
        print(e, file=sys.stderr)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
