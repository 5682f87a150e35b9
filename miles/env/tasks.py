"""Task folders in the layout of Harbor and terminal-bench:

    NAME/task.toml          limits ([agent], [verifier], [environment]) and free [metadata]
    NAME/instruction.md     what the model is told
    NAME/environment/       start files, copied into the working directory (Dockerfile and .keep are left out: the sandbox
                            shows this machine's /usr)
    NAME/tests/test.sh      run after the episode, in the working directory; exit 0 = solved, 1 = not solved. Where a file of tests/ names /logs/verifier,
                            0 = the number in /logs/verifier/reward.txt
    NAME/solution/solve.sh  optional: one command per line that solves it

Format: https://www.harborframework.com/docs/tasks. Keys of Harbor that ask for what the sandbox always or never gives (cpus, storage,
network, images) are read and left alone; a key that Harbor does not have is refused, since a mistyped limit is a limit not kept. Refused too is what
would silently be another task here: several containers, another working directory, variables taken from this machine, the older layout of terminal-bench.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from miles.core import ConfigError
from miles.env.backends import APP

_KEYS = {  # section -> keys of Harbor's task.toml that may appear; those used here are read in `load_task`
    "agent": {"timeout_sec", "user", "network_mode"},
    "verifier": {"timeout_sec", "env", "user", "environment_mode", "collect", "network_mode"},
    "environment": {
        "build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "memory", "storage_mb", "storage", "gpus", "gpu_types",
        "allow_internet", "network_mode", "mcp_servers", "env", "skills_dir", "healthcheck", "workdir",
    },
}
VERIFIER = "/logs/verifier"  # where Harbor's tests write their reward
_SIZES = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024}  # MiB
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
    env: dict[str, str] = field(default_factory=dict)  # variables of the model's commands and of the tests
    verifier_env: dict[str, str] = field(default_factory=dict)  # further ones of the tests
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def start_files(self) -> Path:
        return self.path / "environment"

    @property
    def tests(self) -> Path:
        return self.path / "tests"

    @cached_property
    def writes_reward(self) -> bool:
        """Whether its tests write their reward to a file: some file of theirs names the folder for it. Reads all of them, once."""
        return any(VERIFIER.encode() in p.read_bytes() for p in self.tests.rglob("*") if p.is_file())

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
    _refuse_other_layouts(path)
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
    workdir = data.get("environment", {}).get("workdir", APP)
    if workdir != APP:
        raise ConfigError(f"task {path.name}: task.toml has environment.workdir = {workdir!r}", f"{APP}, where commands and tests run",
                          f"use {APP} in task.toml, instruction.md and tests/test.sh")
    return Task(
        name=path.name,
        path=path.resolve(),  # episodes run with other working directories
        instruction=instruction,
        agent_timeout_s=_positive(path.name, data, "agent", "timeout_sec"),
        verifier_timeout_s=_positive(path.name, data, "verifier", "timeout_sec") or Task.verifier_timeout_s,
        memory_mb=_memory_mb(path.name, data),
        env=_variables(path.name, data, "environment"),
        verifier_env=_variables(path.name, data, "verifier"),
        metadata=dict(data.get("metadata", {})),
    )


def _refuse_other_layouts(path: Path) -> None:
    if (path / "task.yaml").is_file() and not (path / "task.toml").is_file():
        raise ConfigError(
            f"task {path.name} has task.yaml: the older layout of terminal-bench", "Harbor's layout: task.toml, instruction.md, environment/, tests/test.sh",
            "convert it: `instruction` of task.yaml -> instruction.md; max_agent_timeout_sec -> [agent] timeout_sec and max_test_timeout_sec -> "
            "[verifier] timeout_sec in task.toml; run-tests.sh -> tests/test.sh, which must exit with 0 or 1, or with 0 and write /logs/verifier/reward.txt; start files -> environment/; "
            "solution.sh -> solution/solve.sh; or let Harbor do it: `harbor tasks migrate -i OLD -o NEW` (https://harborframework.com/docs/migration)")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (path / "environment" / name).is_file():
            raise ConfigError(f"task {path.name} has environment/{name}", "a task that needs one machine: a sandbox runs no further containers",
                              "leave this task out, or write it for one machine")


def _memory_mb(task: str, data: dict[str, Any]) -> int | None:
    """`memory_mb = 2048`, or `memory = "2G"` as earlier versions of Harbor wrote it."""
    written = data.get("environment", {}).get("memory")
    if written is None:
        memory = _positive(task, data, "environment", "memory_mb")
        return int(memory) if memory else None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])i?b?", str(written).strip().lower())
    if match is None:
        raise ConfigError(f"task {task}: task.toml has environment.memory = {written!r}", "a size such as '2G' or '512M'", "correct it, or use memory_mb")
    return max(1, int(float(match[1]) * _SIZES[match[2]]))


def _variables(task: str, data: dict[str, Any], section: str) -> dict[str, str]:
    written = data.get(section, {}).get("env", {})
    if not isinstance(written, dict) or not all(isinstance(v, str) and re.fullmatch(r"[A-Za-z_]\w*", k) for k, v in written.items()):
        raise ConfigError(f"task {task}: task.toml has {section}.env = {written!r}", "a table of names and strings", "correct it")
    for key, value in written.items():
        if "${" in value:
            raise ConfigError(f"task {task}: task.toml has {section}.env.{key} = {value!r}", "plain text: no variable of this machine is given to a sandbox",
                              "write the value itself, or leave the task out")
    return dict(written)


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
