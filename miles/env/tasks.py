"""Task folders in the layout of Harbor and terminal-bench:

    NAME/task.toml          limits ([agent], [verifier], [environment]) and free [metadata]
    NAME/instruction.md     what the model is told
    NAME/environment/       start files, copied into the working directory (Dockerfile and .keep are left out: the sandbox
                            shows this machine's /usr)
    NAME/tests/test.sh      run after the episode, in the working directory; exit 0 = solved, 1 = not solved
    NAME/solution/solve.sh  optional: one command per line that solves it

Format: https://www.harborframework.com/docs/tasks. Keys of Harbor that ask for what the sandbox always or never gives (cpus, storage,
network, images) are read and left alone; a key that Harbor does not have is refused, since a mistyped limit is a limit not kept.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.core import ConfigError

_KEYS = {  # section -> keys of Harbor's task.toml that may appear; those used here are read in `load_task`
    "agent": {"timeout_sec", "user", "network_mode"},
    "verifier": {"timeout_sec", "env", "user", "environment_mode", "collect", "network_mode"},
    "environment": {
        "build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "memory", "storage_mb", "storage", "gpus", "gpu_types",
        "allow_internet", "network_mode", "mcp_servers", "env", "skills_dir", "healthcheck", "workdir",
    },
}
_FREE = {"version", "schema_version", "metadata", "task", "solution", "source", "artifacts"}


@dataclass(frozen=True)
class Task:
    """One task as read from its folder; the files themselves stay on disk until an episode needs them."""

    name: str  # folder name, unique in its set
    path: Path
    instruction: str
    agent_timeout_s: float | None = None  # wall clock of one episode, seconds; None: the run's own deadline
    verifier_timeout_s: float = 60.0  # wall clock of tests/test.sh, seconds
    memory_mb: int | None = None  # address space of one process, MiB; None: the run's own limit
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def start_files(self) -> Path:
        return self.path / "environment"

    @property
    def tests(self) -> Path:
        return self.path / "tests"

    @property
    def solution(self) -> Path:
        return self.path / "solution" / "solve.sh"


def load_tasks(path: str | Path) -> tuple[Task, ...]:
    """Every task folder directly under `path`, sorted by name. Raises ConfigError naming the folder and the file that is wrong."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"no folder of tasks at {path}", "a folder that holds one folder per task", "check tasks.path")
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise ConfigError(f"{path} holds no task folder", "at least one folder with task.toml, instruction.md and tests/test.sh", "check tasks.path")
    return tuple(load_task(p) for p in folders)


def load_task(path: str | Path) -> Task:
    """Read one task folder. Raises ConfigError: a part missing or empty, not TOML, an unknown key, a limit that is no positive number."""
    path = Path(path)
    for part in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (path / part).is_file():
            raise ConfigError(f"task {path.name}: {path / part} is missing", "task.toml, instruction.md and tests/test.sh in every task folder",
                              "add it, or point tasks.path at a folder of task folders")
    instruction = (path / "instruction.md").read_text(encoding="utf-8").strip()
    if not instruction:
        raise ConfigError(f"task {path.name}: instruction.md is empty", "what the model is to do", "write the instruction")
    try:
        data = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"task {path.name}: task.toml is not valid TOML: {e}", "TOML 1.0", "correct that line") from e
    _refuse_unknown(path.name, data)
    memory = _positive(path.name, data, "environment", "memory_mb")
    return Task(
        name=path.name,
        path=path.resolve(),  # episodes run with other working directories
        instruction=instruction,
        agent_timeout_s=_positive(path.name, data, "agent", "timeout_sec"),
        verifier_timeout_s=_positive(path.name, data, "verifier", "timeout_sec") or Task.verifier_timeout_s,
        memory_mb=int(memory) if memory else None,
        metadata=dict(data.get("metadata", {})),
    )


def _refuse_unknown(task: str, data: dict[str, Any]) -> None:
    for section, value in data.items():
        if section in _FREE:
            continue
        if section not in _KEYS:
            raise ConfigError(f"task {task}: task.toml has an unknown section {section!r}{_nearest(section, _KEYS.keys() | _FREE)}",
                              f"one of {', '.join(sorted(_KEYS.keys() | _FREE))}", "correct its name, or move it into [metadata]")
        if not isinstance(value, dict):
            raise ConfigError(f"task {task}: task.toml has {section} = {value!r}", f"a section [{section}]", "write it as a table")
        for key in value:
            if key not in _KEYS[section]:
                raise ConfigError(f"task {task}: task.toml has an unknown key {section}.{key}{_nearest(key, _KEYS[section])}",
                                  f"one of {', '.join(sorted(_KEYS[section]))}", "correct its name, or move it into [metadata]")


def _nearest(name: str, valid) -> str:
    near = difflib.get_close_matches(name, sorted(valid), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _positive(task: str, data: dict[str, Any], section: str, key: str) -> float | None:
    value = data.get(section, {}).get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"task {task}: task.toml has {section}.{key} = {value!r}", "a positive number", "correct it, or remove it for the default")
    return value
