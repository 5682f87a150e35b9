"""The terminal agent loop: the model writes one shell command a turn, sees its output, and says when it is done; then tests give the reward.

All commands of an episode go to one shell (`miles.env.shell`): working directory, variables and background jobs live from turn to turn.

A reply is the command, as it is (a fenced code block in it, if there is one, is taken as the command). The word DONE alone, or as the last line after
a command, ends the episode. Everything is ordinary chat messages, so any model with a chat template can play.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

from miles.config import MilesConfig, SiteConfig
from miles.core import EnvironmentFault
from miles.env.sandbox import CommandLimits, CommandResult, Kind, Sandbox, Workspace
from miles.env.shell import Shell
from miles.env.tasks import Task

SYSTEM_PROMPT = "You work in a Linux shell. Reply with one shell command and nothing else. When the task is finished, reply DONE."
DONE = "DONE"
TESTS_ENV = {  # what the model left in /app must not run as a part of the tests
    "HOME": "/tmp",  # .bashrc, .gitconfig, .local/lib/python*/site-packages/*.pth
    "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1",  # /app/json.py beside `cd /app; python -c "import json"`
    "GIT_CONFIG_COUNT": "3", "GIT_CONFIG_KEY_0": "core.hooksPath", "GIT_CONFIG_VALUE_0": "/dev/null",  # .git/hooks and .git/config of a repository in /app
    "GIT_CONFIG_KEY_1": "core.fsmonitor", "GIT_CONFIG_VALUE_1": "false", "GIT_CONFIG_KEY_2": "core.pager", "GIT_CONFIG_VALUE_2": "cat",
}
_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)


class ChatReply(Protocol):
    content: str
    finish_reason: str  # stop | length | abort
    message: dict  # as it has to be sent back


Chat = Callable[[list[dict[str, str]]], Awaitable[ChatReply]]


@dataclass(frozen=True)
class EpisodeLimits:
    """What one episode may use, and how its commands are confined."""

    max_turns: int = 8
    deadline_s: float = 3600.0  # wall clock of the turns, seconds; the tests have their own
    command: CommandLimits = CommandLimits()
    system_prompt: str = SYSTEM_PROMPT
    sandbox: Kind = "bubblewrap"
    image: str = ""  # of launchers that need one
    scratch: Path | None = None  # folder for workspaces that are plain folders; None: TMPDIR

    @classmethod
    def from_config(cls, config: MilesConfig, site: SiteConfig) -> EpisodeLimits:
        t, r = config.tasks, config.rollout
        command = CommandLimits(wall_s=t.command_timeout_s, output_chars=t.output_limit, memory_mb=t.memory_mb, processes=t.processes, file_mb=t.file_mb,
                                disk_mb=t.disk_mb, cpu_s=t.cpu_s)
        return cls(max_turns=r.max_turns, deadline_s=r.deadline_s, command=command, system_prompt=t.system_prompt or SYSTEM_PROMPT,
                   sandbox=site.sandbox if t.sandbox == "confined" else t.sandbox, image=site.sandbox_image, scratch=Path(site.scratch))


@dataclass(frozen=True)
class Episode:
    """How an episode ended."""

    reward: float  # 0..1, from the tests (miles.env.reward makes the sample's of it)
    finish: str  # done | turns | length | deadline | crashed (a harness); tests:CAUSE where the tests said nothing that counts
    turns: int  # replies of the model
    env_s: float  # seconds spent in commands and tests


def shared_sandbox(limits: EpisodeLimits) -> Sandbox:
    """The one sandbox of this process and kind: its self-check runs once."""
    return _sandbox(limits.sandbox, limits.image, limits.scratch)


_sandbox = cache(Sandbox)


async def run_episode(task: Task, chat: Chat, limits: EpisodeLimits) -> Episode:
    """Play one task: `chat` is given the whole message list, which only ever grows at its end, and answers with the model's next reply.

    Raises EnvironmentFault when the machine fails (sandbox, tests, an aborted reply): such an episode has no reward.
    """
    sandbox = shared_sandbox(limits)
    if task.memory_mb:
        limits = replace(limits, command=replace(limits.command, memory_mb=task.memory_mb))
    await sandbox.check()  # before the model is asked anything
    deadline = time.monotonic() + min(limits.deadline_s, task.agent_timeout_s or math.inf)
    messages = first_messages(task, limits)
    env_s, turns, finish = 0.0, 0, "turns"
    async with sandbox.opened(task.start_files, limits.command) as workspace:
        async with Shell(sandbox, workspace, limits.command, task.env) as shell:
            while turns < limits.max_turns:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()) as limit:
                        reply = await chat(messages)
                except TimeoutError:
                    if not limit.expired():  # not asked of the clock: a loop that is late counts from its last look at it, and ends the time before
                        raise  # a time-out of the caller's own, not this deadline
                    finish = "deadline"
                    break
                turns += 1
                if reply.finish_reason == "abort":
                    raise EnvironmentFault(f"task {task.name}: the engine aborted turn {turns}", "a reply that ended by itself or by length", "start the episode again")
                if reply.finish_reason == "length":  # half a command is not run
                    finish = "length"
                    break
                command, done = parse_reply(reply.content)
                result = None
                if command:
                    result = await shell.run(command)
                    env_s += result.seconds
                if done:
                    finish = "done"
                    break
                messages = [*messages, reply.message, {"role": "user", "content": show(result, limits.command)}]
        verdict = await run_tests(task, sandbox, workspace, limits.command)
    return Episode(verdict.reward, verdict.why or finish, turns, env_s + verdict.seconds)


def first_messages(task: Task, limits: EpisodeLimits) -> list[dict[str, str]]:
    return [{"role": "system", "content": limits.system_prompt}, {"role": "user", "content": task.instruction}]


def parse_reply(content: str) -> tuple[str, bool]:
    """(command, whether the model says that it is done) of a reply."""
    text = content.strip()
    done = False
    if text.rsplit("\n", 1)[-1].strip() == DONE:
        text, done = text[: -len(DONE)].rstrip(), True
    fenced = _FENCE.search(text)
    return (fenced.group(1) if fenced else text).strip(), done


def show(result: CommandResult | None, limits: CommandLimits) -> str:
    """What the model is told about its command. Never empty: templates differ in how they write an empty message."""
    if result is None:
        return "[no command]"
    lines = [result.output.rstrip()] if result.output.strip() else []
    if result.stopped:
        lines.append(f"[stopped: {_WHY[result.stopped].format(limits)}]")
    elif result.exit_code:
        lines.append(f"[exit {result.exit_code}]")
    if result.fresh_shell:
        lines.append("[the shell ended; a new one starts in /app]")
    return "\n".join(lines) or "[ok]"


_WHY = {"time": "over {0.wall_s:g} s", "output": "too much output", "memory": "over {0.memory_mb} MiB of memory", "cpu": "over {0.cpu_s:g} s of CPU"}


@dataclass(frozen=True)
class Verdict:
    """What the tests of an episode said."""

    reward: float  # 0..1
    seconds: float
    why: str = ""  # tests:CAUSE, where they said nothing that counts: the reward is 0


async def run_tests(task: Task, sandbox: Sandbox, workspace: Workspace, command: CommandLimits) -> Verdict:
    """The verdict of tests/test.sh, in a fresh sandbox: no process of the model is alive, the tests are mounted read-only only now.

    Exit 0 is 1.0 and exit 1 is 0.0. Tests that write their reward (`Task.writes_reward`; not unconfined) get a /logs/verifier to write to, and exit 0 is then
    the number in reward.txt. A program of the model that a test runs can kill the tests, use up what they share and end with any exit code, so that is 0.0
    too, with a cause: a model must not choose between that and a sample that is taken again. A fault of the task or the machine, raised as EnvironmentFault, is
    what is left: their time limit, which a slow machine exceeds as well, and 126 and 127, a program that is not there. A test that runs what the model wrote
    must bound it (`timeout -k 1 5 ./prog`).
    """
    confined = sandbox.kind != "unconfined-i-know"
    preparing = asyncio.ensure_future(asyncio.to_thread(_prepare, task, workspace, confined))
    try:
        tests, logs = await asyncio.shield(preparing)
    except asyncio.CancelledError:
        await asyncio.wait({preparing})  # it is at work in the workspace, which is closed next
        raise
    result = await sandbox.run("bash /tests/test.sh" if confined else f"bash '{tests}/test.sh'", workspace, replace(command, wall_s=task.verifier_timeout_s),
                               readonly={"/tests": tests} if confined else {}, writable={"/logs": logs} if logs else {},
                               env={**TESTS_ENV, **task.env, **task.verifier_env}, may_flood=True)
    if result.stopped == "time" or result.exit_code in (126, 127):
        what = f"was stopped by its {result.stopped} limit" if result.stopped else f"exited with {result.exit_code}"
        raise EnvironmentFault(f"task {task.name}: tests/test.sh {what}; output: {result.output[-300:]!r}", "exit 0 (solved) or 1 (not solved)",
                               "correct the test, or raise [verifier] timeout_sec in its task.toml")
    if result.exit_code not in (0, 1):
        verdict = Verdict(0.0, result.seconds, f"tests:{result.stopped or f'exit-{result.exit_code}'}")
    elif result.exit_code == 1 or logs is None:
        verdict = Verdict(1.0 - result.exit_code, result.seconds)
    elif (reward := _written_reward(logs / "verifier" / "reward.txt")) is not None:
        verdict = Verdict(reward, result.seconds)
    else:
        verdict = Verdict(0.0, result.seconds, "tests:reward-file")
    if verdict.why:
        print(f"task {task.name}: reward 0, {verdict.why}; output of tests/test.sh: {result.output[-300:]!r}", flush=True)
    return verdict


def _prepare(task: Task, workspace: Workspace, confined: bool) -> tuple[Path, Path | None]:
    """The folders of the tests and, where they write their reward, for it. Takes as long as there are files, and a model can make many."""
    workspace.make_room()
    workspace.drop_traps()
    tests = workspace.add("tests", task.tests, owned=False)
    if not (confined and task.writes_reward):
        return tests, None
    logs = workspace.add("logs", owned=False)
    (logs / "verifier").mkdir()
    os.chown(logs / "verifier", workspace.uid, workspace.gid)
    return tests, logs


def _written_reward(path: Path) -> float | None:
    """None where there is no such number. What a program of the model may have put there is not followed: links and pipes are no reward file."""
    if path.is_symlink() or not path.is_file():
        return None
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as f:
            reward = float(f.read(64).decode("utf-8", "replace"))
    except (ValueError, PermissionError):
        return None
    return reward if 0.0 <= reward <= 1.0 else None
