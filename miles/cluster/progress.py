"""Where a run stands, read from its files and from squeue, without disturbing it. Used by status, follow, logs, cancel."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import msgspec

from miles.cluster import slurm
from miles.core import ConfigError, EnvironmentFault, Role
from miles.rundir import PoolDir, RunDir


@dataclass(frozen=True)
class Progress:
    """`rows`: newest row of the trainer's `steps` table for each step number, in order."""

    run: str
    steps: int
    finished: bool
    attempts: list[dict] = field(default_factory=list)  # attempt.json and exit.json of each
    job_id: str | None = None
    job_state: str | None = None
    job_reason: str | None = None
    alive: bool = False  # a job is queued or running, or a local supervisor lives
    rows: list[dict] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    def to_json(self) -> dict:
        last = self.rows[-1] if self.rows else None
        return {"run": self.run, "finished": self.finished, "step": self.step, "steps": self.steps, "alive": self.alive, "job_id": self.job_id,
                "job_state": self.job_state, "job_reason": self.job_reason, "attempts": self.attempts, "last_step": last}


def find_run(text: str, root: Path = Path("runs")) -> RunDir:
    """The run a user means: a path, a name below runs/, or a Slurm job id. Raises ConfigError with the newest candidates."""
    candidates = [Path(text), root / text]
    if text.isdigit():
        candidates += [p.parent for p in root.glob("*/job.json") if json.loads(p.read_text()).get("job_id") == text]
    for path in candidates:
        if (path / "run.toml").is_file():
            return RunDir(path.resolve())
    newest = sorted((p.parent.name for p in root.glob("*/run.toml") if not p.parent.is_symlink()), key=lambda n: (root / n).stat().st_mtime)[-3:]
    raise ConfigError(f"no run {text!r}", f"a run directory, its name, or a job id{'; newest: ' + ', '.join(newest) if newest else ''}",
                      "check the path (the newest run is runs/latest)")


def progress(run: RunDir) -> Progress:
    """A snapshot. A cluster that does not answer leaves the job state unknown; the files still speak."""
    attempts = [_attempt(run, n) for n in run.attempts()]
    job_id, state = job_of(run), None
    if job_id is not None:
        with contextlib.suppress(EnvironmentFault):
            state = slurm.squeue(job_id).get(job_id)
    alive = state.active if state else bool(attempts) and supervisor_pid(run) is not None
    return Progress(str(run.path), run.config.run.steps, run.finished, attempts, job_id, state and state.state, state and state.reason, alive,
                    read_steps(run))


def read_steps(run: RunDir) -> list[dict]:
    """Rows of `steps` over all attempts. A step trained again after a restart counts once, as trained last."""
    rows: dict[int, dict] = {}
    for path in sorted((run.path / "attempts").glob(f"*/logs/{Role.TRAINER}-0.e*.h5")):
        # A file that is being created or flushed may not open at this moment: the next poll reads it.
        with contextlib.suppress(OSError, KeyError), h5py.File(path, "r", locking=False) as f:
            table = f["tables/steps"][:]
            for row in table:
                rows[int(row["step"])] = {name: row[name].item() for name in table.dtype.names if table.dtype[name].kind in "iuf"}
    return [rows[step] for step in sorted(rows)]


class _Made(msgspec.Struct):
    """Of a version's manifest."""

    step: int


def reached(run: RunDir) -> tuple[int, int]:
    """(step of the newest version of the weights that can be read, step of the newest checkpoint); 0 where there is none."""
    step = 0
    for path in sorted(run.weights_dir.glob("v[0-9]*/MANIFEST.json"), reverse=True):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            step = msgspec.json.decode(path.read_bytes(), type=_Made).step
            break
    return step, max((int(p.parent.name[5:]) for p in run.checkpoints_dir.glob("step_[0-9]*/COMMIT")), default=0)


def attempts_of(run: RunDir, facts: dict) -> list[dict]:
    """attempt.json of the attempts of one job, or of one local supervisor: that of these `facts`."""
    return [a for n in run.attempts() if all((a := _attempt(run, n)).get(k, "") == facts[k] for k in ("launcher", "job_id"))
            and (facts["job_id"] is not None or (a.get("pid"), a.get("host")) == (facts["pid"], facts["host"]))]


def job_of(run: RunDir) -> str | None:
    """Slurm job that works or worked last on the run; None for a local one."""
    note = run.path / "job.json"
    return json.loads(note.read_text())["job_id"] if note.is_file() else None


def supervisor_pid(run: RunDir) -> int | None:
    """Process id of the local supervisor of the newest attempt, if it lives on this machine."""
    number = run.attempts()[-1] if run.attempts() else None
    if number is None or not (facts := _attempt(run, number)).get("pid"):
        return None
    return facts["pid"] if is_our_process(facts) else None


def is_our_process(facts: dict) -> bool:
    """Whether the local supervisor that wrote these facts (`pid`, `host`, `launcher`) lives on this machine."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{facts['pid']}/cmdline").read_bytes().split(b"\0")
        return facts["launcher"] == "local" and facts["host"] == os.uname().nodename and any(b"miles" in w for w in words)
    return False


def cancel(run: RunDir) -> str:
    """Stop whatever works on the run; says what was stopped. Raises EnvironmentFault when nothing does."""
    job_id = job_of(run)
    if job_id is not None:
        state = slurm.squeue(job_id).get(job_id)
        if state is not None and state.active:
            slurm.cancel(job_id)
            return f"cancelled job {job_id}"
    elif (pid := supervisor_pid(run)) is not None:
        os.kill(pid, signal.SIGTERM)
        return f"told the supervisor (process {pid}) to stop"
    raise EnvironmentFault(f"nothing works on {run.path}", "a queued or running job, or a local supervisor on this machine", "nothing: it has ended")


def outcome(run: RunDir) -> int:
    """0 when the run finished, else the exit code of its last attempt (1 when that left none)."""
    if run.finished:
        return 0
    attempts = run.attempts()
    return (_attempt(run, attempts[-1]).get("exit_code") if attempts else None) or 1


def pool_outcome(pool: PoolDir) -> tuple[str, int]:
    """Why a pool ended, and the exit code of its supervisor (1 when it left no record)."""
    with contextlib.suppress(FileNotFoundError):
        record = json.loads((pool.folder / "exit.json").read_text())
        return f"{record['outcome']}, {record['text']}", record["exit_code"]
    return "it left no record", 1


def tail(path: Path, lines: int, most_bytes: int = 1 << 18) -> str:
    """The last lines of a text file, whatever its size."""
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - most_bytes))
        return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])


def log_files(run: RunDir, attempt: int | None = None) -> list[Path]:
    """Text logs of an attempt, supervisor first; without a number, of the newest attempt and of all pools."""
    number = attempt or max(run.attempts(), default=0)
    folder = run.attempt_dir(number)
    if not folder.is_dir():
        raise ConfigError(f"{run.path} has no attempt {number}", f"one of {run.attempts()}", "the job may still be queued: miles-submit status")
    pools = () if attempt else (p for p in run.pools_dir.glob("*/*.log"))
    return [folder / "supervisor.log", *sorted(p for p in folder.rglob("*.log") if p.name != "supervisor.log"), *sorted(pools)]


def check_resume(run: RunDir, other) -> None:
    """Refuse to go on with another config than the run was made with (`other` is a MilesConfig)."""
    changed = run.differences(other)
    if changed:
        raise ConfigError(f"{run.path} was made with another config:\n  " + "\n  ".join(changed), "the frozen config RUN/run.toml",
                          "resume without a config, or start a new run with `miles-submit submit`")


def _attempt(run: RunDir, number: int) -> dict:
    facts: dict = {"attempt": number}
    for name in ("attempt.json", "exit.json"):
        with contextlib.suppress(FileNotFoundError, ValueError):  # a damaged one says nothing
            facts |= json.loads((run.attempt_dir(number) / name).read_text())
    facts.pop("versions", None)
    return facts
