"""Runs commands of the model confined.

What a command sees (bubblewrap, https://github.com/containers/bubblewrap; other launchers: `miles.env.backends`): this machine's /usr (without
/usr/local and /usr/src) read-only, a generated /etc with almost nothing, its own /proc, /dev and a small /tmp, and one writable folder, /app. No
network, no process of the host, no variable of the host's environment, no capability, no file descriptor beside 0, 1, 2.

Limits and how they are kept:
- wall clock: the tree is killed: bwrap, process 1 of the pid namespace (also by --die-with-parent), and the kernel kills everything else in it. When this
  process dies, the workspace's namespace dies with it (`miles.env.workspace`).
- address space, file size, open files and CPU seconds of one process: rlimits, set inside by prlimit, just before the program.
- memory and CPU seconds of all processes together: measured (`miles.env.processes`), killed when over.
- processes: RLIMIT_NPROC, which counts by real user id and does not bind host user id 0 at all. As root, bwrap is therefore started under an
  unprivileged host id that belongs to this workspace (no account, from systemd's range of dynamic ids), which also means that a file
  of root is never the command's own. The limit is set after the user namespace is made: since Linux 5.14 the count is per namespace.
- disk and number of files: the size of the file systems behind /app and /tmp.
- output: read as it comes and kept up to a limit; a command that goes on flooding is killed, or slowed down where it `may_flood`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import time
from collections.abc import AsyncIterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from miles.core import ConfigError, EnvironmentFault
from miles.env import processes, seccomp
from miles.env.backends import APP, BACKENDS, ENV, Box, HostLayout, Kind
from miles.env.limits import CommandLimits, CommandResult, Stopped
from miles.env.output import FLOOD_BYTES, Output
from miles.env.workspace import Workspace

__all__ = ["APP", "FLOOD_BYTES", "CommandLimits", "CommandResult", "Kind", "Running", "Sandbox", "Workspace", "unfit"]
_FLOOD_PAUSE_S = 0.01  # between two reads of what nobody will read: it must not take the event loop for itself
_LINGER_S = 2.0  # how long a launcher may take to follow its sandbox
_MAX_COMMAND_BYTES = 100_000  # Linux takes 128 KiB in one argument
_NOTHING: Mapping[str, Path] = MappingProxyType({})
_NO_ENV: Mapping[str, str] = MappingProxyType({})


class Running:
    """A sandbox at work: its launcher, and what all its processes use together."""

    def __init__(self, process: asyncio.subprocess.Process, limits: CommandLimits, status_read: int | None, used_s: float = 0.0):
        self.process, self._limits, self._status_read, self._used_s = process, limits, status_read, used_s
        self._meter = processes.CpuMeter()
        self._looked = time.monotonic()
        self._code: int | None = None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this sandbox and, in the same trajectory, of those before it."""
        return self._used_s + self._meter.total_s

    def over(self) -> Stopped:
        """Which limit of the whole sandbox is exceeded now. To be asked every `processes.POLL_S`."""
        now = time.monotonic()
        found = processes.below(self.process.pid)
        self._meter.look(found, min(now - self._looked, 2 * processes.POLL_S))  # nobody looks while there is nothing to see
        self._looked = now
        if processes.memory_bytes(found, self._limits.memory_mb << 20) > self._limits.memory_mb << 20:
            return "memory"
        return "cpu" if self.cpu_s > self._limits.cpu_s else ""

    async def watched(self) -> Stopped:
        """Waits until a limit of the whole sandbox is exceeded."""
        while not (over := self.over()):
            await asyncio.sleep(processes.POLL_S)
        return over

    def exit_code(self) -> int | None:
        """Of the program inside; None when the launcher reported none, so did not start it or was killed."""
        if self._status_read is None:
            return self.process.returncode
        if self._code is None:
            with contextlib.suppress(BlockingIOError):  # someone still holds the writing end; nothing was reported
                lines = os.read(self._status_read, 1 << 16).splitlines()
                codes = [record["exit-code"] for record in map(json.loads, lines) if "exit-code" in record]
                self._code = codes[-1] if codes else None
        return self._code

    async def kill(self) -> None:
        """Idempotent. Afterwards no process of the sandbox is alive.

        What the launcher started is killed before the launcher, which then ends by itself: it must reap its child, since a zombie whose parent is outside
        the workspace's namespace holds up the end of that namespace until the machine's process 1 cares.
        """
        drained = asyncio.ensure_future(self._drain())
        try:
            end = time.monotonic() + _LINGER_S
            while not drained.done() and time.monotonic() < end:
                started = processes.below(self.process.pid)
                for p in started:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(p.pid, signal.SIGKILL)
                await asyncio.wait({drained}, timeout=0.02)
            with contextlib.suppress(ProcessLookupError):  # unconfined, the group outlives its leader; or there never was a child
                os.killpg(self.process.pid, signal.SIGKILL)
            await asyncio.wait({drained}, timeout=10)
            if not drained.done():
                raise EnvironmentFault(f"sandbox: processes of {self.process.pid} still hold its output 10 s after SIGKILL", "none alive",
                                       "look for processes in uninterruptible sleep (file system), or set tasks.sandbox = 'confined'")
        finally:
            drained.cancel()
            await asyncio.gather(drained, return_exceptions=True)

    async def _drain(self) -> None:
        while await self.process.stdout.read(1 << 16):
            pass
        await self.process.wait()

    def close(self) -> None:
        if self._status_read is not None:
            os.close(self._status_read)
            self._status_read = None


class Sandbox:
    """Starts sandboxes in workspaces. One object per process serves any number of workspaces at once."""

    def __init__(self, kind: Kind = "bubblewrap", image: str = "", scratch: Path | None = None):
        if kind not in BACKENDS:
            raise ConfigError(f"a sandbox of kind {kind!r}", "bubblewrap, apptainer or enroot (site profile), or tasks.sandbox = 'unconfined-i-know' "
                              "to run the model's commands as you, with all your rights", "correct the site profile's `sandbox`, or tasks.sandbox")
        if BACKENDS[kind].needs_image and not image:
            raise ConfigError(f"sandbox = {kind!r} without an image", "an image with bash, coreutils and util-linux", "set the site profile's `sandbox_image`")
        self.kind, self.backend, self._image, self._scratch = kind, BACKENDS[kind], image, scratch
        self._checked = False

    def workspace(self, start_files: Path | None, limits: CommandLimits) -> Workspace:
        """A workspace as this kind of sandbox needs it."""
        return Workspace(start_files, disk_mb=limits.disk_mb if self.kind == "bubblewrap" else None, scratch=self._scratch)

    @contextlib.asynccontextmanager
    async def opened(self, start_files: Path | None, limits: CommandLimits) -> AsyncIterator[Workspace]:
        """A workspace for the length of a block, made and closed without holding up the loop (tens of milliseconds, the time to copy the files, and that of
        processes to die)."""
        making = asyncio.ensure_future(asyncio.to_thread(self.workspace, start_files, limits))
        try:
            workspace = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: made.cancelled() or made.exception() or made.result().close())
            raise
        try:
            yield workspace
        finally:
            await asyncio.shield(asyncio.to_thread(workspace.close))

    async def check(self) -> None:
        """Run one harmless command. Raises EnvironmentFault when this machine cannot confine commands, with what to do."""
        if self._checked:
            return
        missing = [tool for tool in self.backend.tools if shutil.which(tool) is None]
        if missing:
            raise EnvironmentFault(f"sandbox: {', '.join(missing)} not found", f"{self.kind}, util-linux and bash on every rollout node",
                                   "install them (Debian/Ubuntu: apt-get install bubblewrap util-linux bash)")
        async with self.opened(None, CommandLimits(disk_mb=1)) as ws:
            result = await self._run("echo ready > f && cat f", ws, CommandLimits(), _NOTHING, _NOTHING, _NO_ENV, False)
        if result.output != "ready\n":
            raise EnvironmentFault(f"sandbox: a trial command gave {result.output!r} (exit {result.exit_code})", "'ready'",
                                   "run `bwrap --unshare-all --ro-bind / / true` by hand and see docs on user namespaces")
        self._checked = True

    async def run(self, command: str, workspace: Workspace, limits: CommandLimits, *, readonly: Mapping[str, Path] = _NOTHING,
                  writable: Mapping[str, Path] = _NOTHING, env: Mapping[str, str] = _NO_ENV, may_flood: bool = False) -> CommandResult:
        """Run `bash -c command` in the workspace's app/ until it ends or a limit stops it; its whole process tree is gone on return.

        `readonly` and `writable` mount further folders (inside path -> host path; not unconfined), `env` adds variables, `may_flood`: output beyond FLOOD_BYTES
        is cut and stops nothing. Raises EnvironmentFault when the sandbox itself fails.
        """
        await self.check()
        return await self._run(command, workspace, limits, readonly, writable, env, may_flood)

    async def _run(self, command: str, ws: Workspace, limits: CommandLimits, readonly: Mapping[str, Path], writable: Mapping[str, Path],
                   env: Mapping[str, str], may_flood: bool) -> CommandResult:
        started = time.monotonic()
        if (refused := unfit(command)) is not None:
            return refused
        output, stopped = Output(limits.output_chars), ""
        running = await self.start(("bash", "-c", command.encode("utf-8", "replace")), ws, limits, cpu_s=int(limits.wall_s) + 1, readonly=readonly,
                                   writable=writable, env=env)
        try:
            reader, watcher = asyncio.ensure_future(self._read(running, output, may_flood)), asyncio.ensure_future(running.watched())
            try:
                await asyncio.wait({reader, watcher}, timeout=limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    stopped = reader.result()
                else:
                    stopped = watcher.result() if watcher.done() else "time"
            finally:
                for job in (reader, watcher):
                    job.cancel()
                await asyncio.gather(reader, watcher, return_exceptions=True)
                await running.kill()
            exit_code = running.exit_code()
        finally:
            running.close()
        text, cut = output.text()
        if not stopped and exit_code is None:
            raise not_started(text)
        return CommandResult(None if stopped else exit_code, text, cut, stopped, time.monotonic() - started)

    async def _read(self, running: Running, output: Output, may_flood: bool) -> Stopped:
        while chunk := await running.process.stdout.read(1 << 16):
            output.add(chunk)
            if output.flooded and not may_flood:
                return "output"
            if output.flooded:
                await asyncio.sleep(_FLOOD_PAUSE_S)
        await running.process.wait()  # unconfined, a command may close its output and go on
        return ""

    async def start(self, program: tuple[str | bytes, ...], ws: Workspace, limits: CommandLimits, *, cpu_s: int, readonly: Mapping[str, Path] = _NOTHING,
                    writable: Mapping[str, Path] = _NOTHING, env: Mapping[str, str] = _NO_ENV, used_s: float = 0.0,
                    stdin: int = asyncio.subprocess.DEVNULL, stderr: int = asyncio.subprocess.STDOUT) -> Running:
        """Start a program in a sandbox; the caller kills and closes it. Its stdout is a pipe."""
        bubblewrap = self.kind == "bubblewrap"
        with contextlib.suppress(FileNotFoundError):
            ws.app.chmod(0o755)  # an earlier command may have taken the rights away; that must not look like a sandbox that fails
        inherited: list[int] = []
        status_read = seccomp_fd = None
        try:
            if bubblewrap:
                status_read, status_write = os.pipe()
                os.set_blocking(status_read, False)
                inherited.append(status_write)
                if (filter_ := seccomp.program(platform.machine())) is not None:
                    seccomp_fd = _holding(filter_)
                    inherited.append(seccomp_fd)
            box = Box(
                app=ws.local(ws.app), program=program, limits=limits, cpu_s=cpu_s, image=self._image, env=env,
                readonly={inside: ws.local(host) for inside, host in readonly.items()}, writable={inside: ws.local(host) for inside, host in writable.items()},
                setid=(ws.uid, ws.gid) if os.geteuid() == 0 and bubblewrap else None, host=host_layout(), tmp=ws.local(ws.root / "tmp"),
                status_fd=inherited[0] if bubblewrap else -1, seccomp_fd=seccomp_fd)
            process = await asyncio.create_subprocess_exec(
                *ws.enter, *self.backend.argv(box), stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=stderr, pass_fds=inherited, start_new_session=True,
                cwd="/" if self.kind != "unconfined-i-know" else ws.app, env=dict(ENV) if bubblewrap or self.kind == "unconfined-i-know" else None)
        except BaseException:
            if status_read is not None:
                os.close(status_read)
            raise
        finally:
            for fd in inherited:
                os.close(fd)
        return Running(process, limits, status_read, used_s)


def unfit(command: str) -> CommandResult | None:
    """The result of what is no command at all; None for everything else."""
    size = len(command.encode("utf-8", "replace"))
    if "\0" not in command and size <= _MAX_COMMAND_BYTES:
        return None
    return CommandResult(126, f"bash: not a command: {size} bytes, or a NUL byte\n", False, "", 0.0)


def not_started(said: str) -> EnvironmentFault:
    return EnvironmentFault(f"sandbox: the launcher did not start the command: {said.strip()[-500:]!r}",
                            "user namespaces for ordinary users (also as root: commands run under an unprivileged id), and paths that id can reach",
                            "check `sysctl user.max_user_namespaces kernel.unprivileged_userns_clone kernel.apparmor_restrict_unprivileged_userns`")


def _holding(data: bytes) -> int:
    """A descriptor from which `data` (less than a pipe holds) can be read once."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return reading


@cache
def host_layout() -> HostLayout:
    """How this machine's root is made: links into /usr on merged systems, folders elsewhere."""
    names = [name for name in ("bin", "sbin", "lib", "lib32", "lib64") if os.path.isdir(f"/{name}")]
    return HostLayout(links={n: os.readlink(f"/{n}") for n in names if os.path.islink(f"/{n}")}, folders=tuple(n for n in names if not os.path.islink(f"/{n}")),
                      hidden=tuple(p for p in ("/usr/local", "/usr/src") if os.path.isdir(p)))
