"""Episodes played by an agent program: any that speaks OpenAI's chat completions, unchanged.

    workspace ── sandbox, no network ─────────────────────────────────────────┐
    │ harness and the commands it runs ── 127.0.0.1:PORT ── relay ── socket ──┼── one session, served by the host ── engine
    └──────────────────────────────────────────────────────────────────────────┘

The harness does what the model says, so all of it is confined like a command of the built-in loop. A folder that only this sandbox has holds the socket of
this episode's session: there is nothing else to talk to, and so no token inside that could be stolen. The task's tests give the reward, as in
`miles.env.terminal`, whatever the harness says of itself.

How an episode ends:

    done        the harness ended with exit code 0
    crashed     it ended otherwise. A model can bring its harness down, so this is an ending and the tests decide
    turns       it asked for more turns than the run allows; it is told so, and stopped if it goes on
    length      its last reply was cut by a token limit, or there was no room for one
    deadline    its time was over

No episode: the engine failed, or the harness ended without one reply (EnvironmentFault: it is set up wrongly); or the session refused its last request and it
ended in failure (StructureError, with the session's cause: not the model, but what the harness sends, decided that ending).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from miles.config import MilesConfig, SiteConfig
from miles.core import ConfigError, EnvironmentFault, StructureError
from miles.env import relay
from miles.env.sandbox import APP, CommandResult, Workspace
from miles.env.tasks import Task
from miles.env.terminal import Episode, EpisodeLimits, run_tests, shared_sandbox

MODEL_NAME = "miles"  # agents have to name one; a session has one model
INSIDE = "/miles"  # relay, job, instruction and socket, as the harness sees them
GRACE_S = 5.0  # for a harness that was told that its turns are over to end by itself
_ENV = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp", "LANG": "C.UTF-8"}  # HOME: what an agent keeps for itself is not part of the task
_LONGEST_SOCKET = 107  # bytes of a path, unix(7)


@dataclass
class Asked:
    """What a harness has asked its model so far. Kept by whoever serves it, read when it ends."""

    requests: int = 0
    replies: int = 0
    waited_s: float = 0.0  # seconds spent in replies
    last: str = ""  # finish reason of the last reply: stop | length | tool_calls
    over: bool = False  # it asked for one turn too many
    refused: StructureError | None = None  # why its last request was refused; None when it was answered
    fault: EnvironmentFault | None = None  # of the engine
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set with `over` and `fault`: there will be no more replies


class Model(Protocol):
    """What answers the harness."""

    def serve(self, socket: Path) -> AbstractAsyncContextManager[Asked]:
        """While entered: an OpenAI endpoint (/v1/chat/completions) of one conversation on this unix socket, for whoever can reach it."""


@dataclass(frozen=True)
class Harness:
    """What is run, with what, and how long."""

    command: tuple[str, ...]
    mounts: Mapping[str, Path] = field(default_factory=dict)  # path inside -> path here, read-only
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = 8000
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)  # those of commands bind the harness and its commands, except for their seconds and output

    @classmethod
    def from_config(cls, config: MilesConfig, site: SiteConfig) -> Harness:
        """Raises ConfigError for something to mount that is not there, or that commands in the sandbox could not reach."""
        h = config.tasks.harness
        return cls(h.command, {inside: _mountable(inside, Path(host)) for inside, host in h.mounts.items()}, dict(h.env), h.port,
                   EpisodeLimits.from_config(config, site))

    async def check(self) -> str:
        """The program as the sandbox finds it. Raises EnvironmentFault when it, or a Python for the relay, is not there."""
        path = {**_ENV, **self.env}["PATH"]
        look = f"python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 8))' || exit 3; PATH={shlex.quote(path)}; command -v -- {shlex.quote(self.command[0])} || exit 4"
        sandbox = shared_sandbox(self.limits)
        with sandbox.workspace(None, self.limits.command) as workspace:
            result = await sandbox.run(look, workspace, self.limits.command, readonly=self.mounts)
        if result.exit_code == 4:
            raise EnvironmentFault(f"tasks.harness: the sandbox has no {self.command[0]}", "a program under /usr or in tasks.harness.mounts",
                                   "mount it; links have to lead to places that the sandbox shows")
        if result.exit_code:
            raise EnvironmentFault(f"tasks.harness: no python3 of 3.8 or newer in the sandbox: {result.output[-300:]!r}", "one in /usr/bin, for the relay", "install python3")
        return result.output.strip()


async def run_harness(task: Task, model: Model, harness: Harness) -> Episode:
    """Let the harness play one task. Raises EnvironmentFault and StructureError where there is no episode (see above)."""
    sandbox, own = shared_sandbox(harness.limits), harness.limits.command
    await sandbox.check()  # before anything is asked of the model
    deadline_s = min(harness.limits.deadline_s, task.agent_timeout_s or math.inf)
    tests = replace(own, memory_mb=task.memory_mb or own.memory_mb)
    # A task's memory is meant for its commands; it must not keep the harness itself from starting.
    limits = replace(own, wall_s=deadline_s, output_chars=4 * relay.KEPT, memory_mb=max(tests.memory_mb, own.memory_mb))
    started = time.monotonic()
    async with sandbox.opened(task.start_files, own) as workspace:
        folder = _job(task, harness, workspace)
        async with model.serve(folder / "session") as asked:
            if os.geteuid() == 0:
                os.chown(folder / "session", workspace.uid, workspace.gid)
            (folder / "session").chmod(0o600)
            result = await _until_over(asked, sandbox.run(f"exec python3 -I {INSIDE}/relay.py {INSIDE}/job.json", workspace, limits,
                                                          readonly={INSIDE: folder, **harness.mounts}))
        finish = ending(task.name, result, asked)
        env_s = max(0.0, time.monotonic() - started - asked.waited_s)
        verdict = await run_tests(task, sandbox, workspace, tests)
    return Episode(verdict.reward, verdict.why or finish, asked.replies, env_s + verdict.seconds)


def ending(task: str, result: CommandResult | None, asked: Asked) -> Literal["done", "crashed", "turns", "length", "deadline"]:
    """How an episode ended, or the error for there being none. `result` is None for a harness that was stopped because no more replies would come."""
    if asked.fault:
        raise asked.fault
    if asked.over:
        return "turns"
    if result.stopped == "time" and asked.requests:
        return "deadline"
    if asked.last == "length":
        return "length"
    if asked.refused and result.exit_code != 0:
        raise asked.refused
    if not asked.replies:
        how = f"was stopped by its {result.stopped} limit" if result.stopped else f"ended with exit code {result.exit_code}"
        raise EnvironmentFault(f"task {task}: the harness {how} before the model answered it once ({asked.requests} requests); "
                               f"it said: {result.output.strip()[-1500:]!r}",
                               "a harness that asks the model at {url}", "run it by hand (docs/harnesses.md); see tasks.harness, tasks.memory_mb and rollout.deadline_s")
    return "done" if result.exit_code == 0 else "crashed"


async def _until_over(asked: Asked, running) -> CommandResult | None:
    """The harness's own ending; None when it was stopped."""
    harness, over = asyncio.ensure_future(running), asyncio.ensure_future(asked.stop.wait())
    try:
        await asyncio.wait((harness, over), return_when=asyncio.FIRST_COMPLETED)
        if not harness.done() and asked.fault is None:
            await asyncio.wait((harness,), timeout=GRACE_S)
    finally:
        over.cancel()
        harness.cancel()  # kills its processes
        await asyncio.wait((harness, over))
    return None if harness.cancelled() else harness.result()


def _job(task: Task, harness: Harness, workspace: Workspace) -> Path:
    """The folder that is mounted at INSIDE."""
    folder = workspace.add("miles", owned=False)
    if len(os.fsencode(folder / "session")) > _LONGEST_SOCKET:
        raise EnvironmentFault(f"the session's socket would be {folder / 'session'}", f"at most {_LONGEST_SOCKET} bytes, the limit of unix sockets",
                               "set TMPDIR to a shorter path")
    url = f"http://127.0.0.1:{harness.port}/v1"
    values = {"url": url, "model": MODEL_NAME, "instruction": task.instruction, "instruction_file": f"{INSIDE}/instruction.md", "workspace": APP,
              "max_turns": str(harness.limits.max_turns)}
    env = {**_ENV, "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": "none", **{k: fill(v, values) for k, v in harness.env.items()}}
    job = {"socket": f"{INSIDE}/session", "port": harness.port, "argv": [fill(a, values) for a in harness.command], "env": env}
    for name, text in (("job.json", json.dumps(job)), ("instruction.md", task.instruction + "\n")):
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copyfile(relay.__file__, folder / "relay.py")
    for p in folder.iterdir():
        p.chmod(0o644)
    return folder


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace {name} for the names in `values`; every other brace stays, and so does what the values hold."""
    return re.sub(r"(?<!\$)\{([a-z_]+)\}", lambda m: values.get(m[1], m[0]), text)


def _mountable(inside: str, host: Path) -> Path:
    host = host.resolve()
    if not host.exists():
        raise ConfigError(f"tasks.harness.mounts: {host}, for {inside}, is not there", "a folder or file on every rollout node", "make it, or correct the path")
    closed = [p for p in (host, *host.parents) if not p.stat().st_mode & (0o001 if p.is_dir() else 0o004)] if os.geteuid() == 0 else []
    if closed:
        raise ConfigError(f"tasks.harness.mounts: {host}, for {inside}, is closed to others by the mode of {closed[-1]}",
                          "readable by everyone: as root, the sandbox runs under an unprivileged id", f"chmod o+rx {closed[-1]}, or put it elsewhere")
    return host
