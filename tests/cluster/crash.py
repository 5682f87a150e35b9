"""Runs whose processes are killed at random: real roles under a real supervisor and mpiexec, SGLang's stand-in as the engine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from miles.buffer import BufferView, Status
from miles.cluster.slurm import scrubbed
from miles.config import load_config
from miles.rundir import RunDir
from tests.cluster.stubs import PROJECT

SUPERVISE = "import sys, miles.cluster.supervise as s; s.BACKOFF_S = s.MOST_BACKOFF_S = 0.2; sys.exit(s.main())"
ROLLOUT = "tests.cluster.stub_engine_rollout"
STUCK_S = 300.0  # without a kill, a step is trained within this time

VICTIMS = {  # kind: how often it is chosen
    "trainer": 3,  # a rank
    "rollout": 3,
    "engine": 3,
    "wrapper": 1,  # miles.cluster.rank, the parent of a rank
    "launcher": 1,  # mpiexec of a step
    "supervisor": 1,  # with it everything; it is started again
}


def make_tasks(folder: Path, count: int, tests_s: float = 60.0) -> Path:
    """Tasks whose reward is the sum of the digits in /app/out, modulo 10, over 10: whatever the samples of a group write, they differ."""
    for i in range(count):
        task = folder / f"sum-{i}"
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "task.toml").write_text(f'version = "1.0"\n\n[verifier]\ntimeout_sec = {tests_s}\n')
        (task / "instruction.md").write_text(f"Task {i}: write digits.\n")
        (task / "environment" / "note").write_text(f"{i}\n")
        (task / "tests" / "test.sh").write_text("n=0\nfor d in $(cat out); do n=$(( (n + d) % 10 )); done\necho 0.$n > /logs/verifier/reward.txt\n")
    return folder


def make_run(root: Path, model: Path, tasks: Path, steps: int, *overrides: str) -> RunDir:
    return RunDir.create(load_config(PROJECT / "configs" / "tiny_async.toml", (
        f"run.root={root}", f"run.steps={steps}", f"model.path={model}", "model.recipe=none", "model.max_context=512", f"tasks.path={tasks}",
        "rollout.in_flight=8", "rollout.group_size=2", "rollout.max_turns=3", "rollout.max_session_tokens=400", "rollout.retries=50",
        "engine.restarts=1000", "engine.port_base=36000", "buffer.order=index", "buffer.on_stale=retry", "buffer.max_staleness=5", "buffer.capacity_groups=5",
        "trainer.groups_per_step=2", "trainer.max_tokens_per_microbatch=400", "trainer.layout.ep=1", "weights.keyframe_every=4", "weights.keep_keyframes=100000",
        "checkpoint.every_steps=2", "cluster.max_restarts=1000", f"cluster.site={PROJECT / 'configs/sites/dev.toml'}", *overrides)))


def supervise(run: RunDir, token_s: float = 0.005) -> subprocess.Popen:
    """A supervisor on `run`, as `miles-submit local` and `resume --local` start it. `token_s`: how slowly engines sample."""
    with open(run.path / "supervise.out", "ab") as out:
        return subprocess.Popen([sys.executable, "-c", SUPERVISE, str(run.path), "--launcher", "local", "--rollout", ROLLOUT], cwd=PROJECT, stdout=out, stderr=out,
                                env={**scrubbed(os.environ), "OMP_NUM_THREADS": "1", "MILES_STUB_TOKEN_S": str(token_s)}, start_new_session=True)


def processes(run: RunDir) -> dict[str, list[int]]:
    """Living processes of a run by kind of victim."""
    found: dict[str, list[int]] = {kind: [] for kind in VICTIMS}
    parents: dict[int, int] = {}
    engines = []
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit():
            continue
        try:
            words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
            fields = (proc / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] in "ZX":
            continue
        pid, parents[int(proc.name)] = int(proc.name), int(fields[1])
        if "tests.engine.stub" in words:
            engines.append(pid)
        if str(run.path) not in words:
            continue
        kind = {"miles.trainer": "trainer", ROLLOUT: "rollout", "miles.cluster.rank": "wrapper", SUPERVISE: "supervisor"}.get(words[2])
        if words[0].endswith("mpiexec"):
            kind = "launcher"
        if kind:
            found[kind].append(pid)
    # A child looks like its parent until it executes its own program: killed then, it would be no rank's death.
    found = {kind: [pid for pid in pids if parents[pid] not in pids] for kind, pids in found.items()}
    found["engine"] = [pid for pid in engines if parents[pid] in found["rollout"]]
    return {kind: sorted(pids) for kind, pids in found.items()}


def steps_trained(run: RunDir) -> int:
    view = BufferView(run)
    view.poll()
    return len(view.state.with_status(Status.TRAINED)) // run.config.trainer.groups_per_step


class Killer:
    """Kills `count` processes of a run, chosen by `seed`, half of them within two seconds of a step, the others at any time after the kill before.
    Starts the supervisor, and again when it was the victim. `kills`: (kind, seconds since the start, steps trained)."""

    def __init__(self, run: RunDir, seed: int, count: int, victims: dict[str, int] = VICTIMS):
        self.run, self.rng, self.count, self.victims = run, random.Random(seed), count, victims
        self.kills: list[tuple[str, float, int]] = []
        self._supervisor: subprocess.Popen | None = None

    def play(self) -> None:
        """Until the run is over. Raises AssertionError: it failed, or nothing was trained for STUCK_S."""
        self._start = self._last = time.monotonic()
        self._steps = 0
        self._supervisor = supervise(self.run)
        try:
            while len(self.kills) < self.count:
                self._wait()
                self._kill()
            while self._supervisor.poll() is None:
                self._pause(0.2)
                self._progress(self._steps + 1)
            assert self._supervisor.returncode == 0 and self.run.finished, self._tell("the run failed")
        finally:
            self.end()

    def end(self) -> None:
        if self._supervisor.poll() is None:
            self._supervisor.kill()
        self._supervisor.wait()
        deadline = time.monotonic() + 20
        while any(processes(self.run).values()) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _wait(self) -> None:
        most = self._steps + 2  # or a fast machine is done before the last kill
        if self.rng.random() < 0.5:
            goal, delay = self._steps + 1, self.rng.uniform(0, 2)
            while self._progress(goal) < goal:
                self._pause(0.1)
            until = time.monotonic() + delay
        else:
            until = time.monotonic() + self.rng.uniform(0, 8)
        while time.monotonic() < until and steps_trained(self.run) < most:
            self._pause(0.1)

    def _kill(self) -> None:
        kinds, weights = zip(*self.victims.items(), strict=True)
        kind = self.rng.choices(kinds, weights)[0]
        pids = processes(self.run)[kind]
        if not pids:
            return  # it is just being started: another victim, another time
        pid = self.rng.choice(pids)
        os.kill(pid, signal.SIGKILL)
        self._steps, self._last = steps_trained(self.run), time.monotonic()
        self.kills.append((kind, round(time.monotonic() - self._start, 1), self._steps))
        if kind == "supervisor":
            self._supervisor.wait()
            time.sleep(self.rng.choice([0.0, self.rng.uniform(0, 2)]))
            self._supervisor = supervise(self.run)

    def _progress(self, goal: int) -> int:
        """Steps trained on the lineage, at least `goal` of them some time soon."""
        steps = steps_trained(self.run)
        if steps >= goal:
            self._steps, self._last = steps, time.monotonic()
        assert time.monotonic() < self._last + STUCK_S, self._tell(f"no step for {STUCK_S:.0f} s")
        return steps

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        code = self._supervisor.poll()
        assert code is None or code == 0, self._tell(f"the supervisor ended with {code}")
        assert code is None or len(self.kills) == self.count, self._tell("the run was over before all were killed")

    def _tell(self, what: str) -> str:
        return f"{what}\n{self.run.path}\nkills {self.kills}\n" + (self.run.path / "supervise.out").read_text()[-4000:]
