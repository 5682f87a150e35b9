"""Runs commands of the model confined by bubblewrap (https://github.com/containers/bubblewrap).

What a command sees: this machine's /usr (without /usr/local and /usr/src) read-only, a generated /etc with almost nothing, its own /proc,
/dev and a small /tmp, and one writable folder, /app. No network, no process of the host, no variable of the host's environment, no capability.

Limits and how they are kept:
- wall clock: the whole tree is killed. The outer bwrap gets SIGKILL, its death kills process 1 of the pid namespace (--die-with-parent), and the
  kernel kills everything else in it. The same happens when the command itself ends, so nothing it started in the background outlives it.
- memory, file size, CPU seconds, open files: rlimits, set inside by prlimit, just before the shell.
- processes: RLIMIT_NPROC, which counts by real user id and does not bind host user id 0 at all. As root, bwrap is therefore started under an
  unprivileged host id that belongs to this workspace (no account, from systemd's range of dynamic ids), which also means that a file
  of root is never the command's own. As an ordinary user the limit is set after the user namespace is made: since Linux 5.14 the count is per namespace.
- output: read as it comes and kept up to a limit; a command that goes on flooding is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from miles.core import ConfigError, EnvironmentFault

Kind = Literal["bubblewrap", "unconfined-i-know"]
APP = "/app"
FLOOD_BYTES = 1 << 20  # a command that has written this much is stopped: nobody will read it
_TMP_BYTES = 64 << 20
_DYNAMIC_IDS = range(61184, 65520)  # systemd's range of ids without an account (systemd.io/UIDS-GIDS), mapped also in rootless containers
_MAX_COMMAND_BYTES = 100_000  # Linux takes 128 KiB in one argument
_ENV = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": APP, "LANG": "C.UTF-8", "TERM": "dumb", "USER": "agent"}
_NOTHING: Mapping[str, Path] = MappingProxyType({})


@dataclass(frozen=True)
class CommandLimits:
    """What one command may use."""

    wall_s: float = 10.0  # seconds
    output_chars: int = 2000  # characters kept
    memory_mb: int = 512  # address space of each process, MiB
    processes: int = 64
    file_mb: int = 64  # largest file, MiB


@dataclass(frozen=True)
class CommandResult:
    """What came of one command."""

    exit_code: int | None  # None when it was stopped
    output: str  # stdout and stderr as they came, invalid UTF-8 replaced, at most `output_chars` characters
    cut: bool  # the output was longer
    stopped: Literal["", "time", "output"]  # which limit ended it
    seconds: float


class Workspace:
    """The folder of one episode on the host: `app/` (the working directory), later `tests/` and `logs/`. Removed on close.

    As root, `app/` belongs to an unprivileged id; otherwise to the user who runs Miles.
    """

    def __init__(self, start_files: Path | None = None):
        self.root = Path(tempfile.mkdtemp(prefix="miles-env-"))
        self.uid = _DYNAMIC_IDS[secrets.randbelow(len(_DYNAMIC_IDS))] if os.geteuid() == 0 else os.geteuid()
        self.gid = self.uid if os.geteuid() == 0 else os.getegid()
        try:
            self.root.chmod(0o711)  # the unprivileged id must reach app/ and nothing else
            self.app = self.add("app", start_files, ignore=("Dockerfile", ".keep"))  # the second keeps empty folders in git
        except BaseException:
            self.close()
            raise

    def add(self, name: str, content: Path | None = None, *, ignore: tuple[str, ...] = (), owned: bool = True) -> Path:
        """A folder of the workspace with a copy of `content`; `owned`: commands in the sandbox may write to it when it is mounted."""
        path = self.root / name
        if content is not None and content.is_dir():
            shutil.copytree(content, path, symlinks=True, ignore=shutil.ignore_patterns(*ignore))
        else:
            path.mkdir()
        for p in (path, *path.rglob("*")):
            if not p.is_symlink():  # the checkout may be private (umask 077); what is shown to the sandbox must be readable there
                p.chmod(p.stat().st_mode | (0o755 if p.is_dir() else 0o644))
            if owned and os.geteuid() == 0:
                os.chown(p, self.uid, self.gid, follow_symlinks=False)
        return path

    def drop_traps(self) -> None:
        """Remove from app/ whatever could make a test read or wait for something else than the model's own files.

        Links that lead out of app/ (`out.txt -> /tests/expected`), pipes, sockets. No process of the model is alive when this runs.
        """
        self.app.chmod(0o755)
        for folder, names, files in os.walk(self.app, followlinks=False):
            for name in names + files:
                p = Path(folder, name)
                mode = p.lstat().st_mode
                if stat.S_ISLNK(mode):
                    target = os.path.normpath(os.path.join(APP, os.path.relpath(folder, self.app), os.readlink(p)))
                    if os.path.isabs(os.readlink(p)) or not (target == APP or target.startswith(APP + "/")):
                        p.unlink()
                elif stat.S_ISDIR(mode):
                    p.chmod(stat.S_IMODE(mode) | 0o700)  # entered next
                elif not stat.S_ISREG(mode):
                    p.unlink()

    def close(self) -> None:
        def make_writable(function, path, _info):  # a command may have left folders without rights
            for p in (os.path.dirname(path), path):
                if not os.path.islink(p):
                    os.chmod(p, 0o700)
            function(path)

        shutil.rmtree(self.root, onerror=make_writable)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()


class Sandbox:
    """Runs commands in a workspace. One object per process serves any number of workspaces at once."""

    def __init__(self, kind: Kind = "bubblewrap"):
        if kind not in ("bubblewrap", "unconfined-i-know"):
            raise ConfigError(f"tasks.sandbox = {kind!r}", "'bubblewrap', or 'unconfined-i-know' to run the model's commands as you, with all your rights",
                              "set tasks.sandbox")
        self.kind = kind
        self._checked = False

    async def check(self) -> None:
        """Run one harmless command. Raises EnvironmentFault when this machine cannot confine commands, with what to do."""
        if self._checked:
            return
        needed = ("bwrap", "setpriv", "prlimit", "bash") if self.kind == "bubblewrap" else ("prlimit", "bash")
        missing = [tool for tool in needed if shutil.which(tool) is None]
        if missing:
            raise EnvironmentFault(f"sandbox: {', '.join(missing)} not found", "bubblewrap, util-linux and bash on every rollout node",
                                   "install them (Debian/Ubuntu: apt-get install bubblewrap util-linux bash)")
        with Workspace() as ws:
            result = await self._run("echo ready > f && cat f", ws, CommandLimits(), _NOTHING, _NOTHING)
        if result.output != "ready\n":
            raise EnvironmentFault(f"sandbox: a trial command gave {result.output!r} (exit {result.exit_code})", "'ready'",
                                   "run `bwrap --unshare-all --ro-bind / / true` by hand and see docs on user namespaces")
        self._checked = True

    async def run(self, command: str, workspace: Workspace, limits: CommandLimits, *,
                  readonly: Mapping[str, Path] = _NOTHING, writable: Mapping[str, Path] = _NOTHING) -> CommandResult:
        """Run `bash -c command` in the workspace's app/ until it ends or a limit stops it; its whole process tree is gone on return.

        `readonly` and `writable` mount further folders (inside path -> host path; bubblewrap only). Raises EnvironmentFault when the sandbox
        itself fails.
        """
        await self.check()
        return await self._run(command, workspace, limits, readonly, writable)

    async def _run(self, command: str, ws: Workspace, limits: CommandLimits, readonly: Mapping[str, Path], writable: Mapping[str, Path]) -> CommandResult:
        started = time.monotonic()
        ws.app.chmod(0o755)  # an earlier command may have taken the rights away; that must not look like a sandbox that fails
        raw = command.encode("utf-8", "replace")
        if b"\0" in raw or len(raw) > _MAX_COMMAND_BYTES:
            return CommandResult(126, f"bash: not a command: {len(raw)} bytes, or a NUL byte\n", False, "", 0.0)
        status_read, status_write = os.pipe()
        try:
            argv = self._argv(raw, ws, limits, readonly, writable, status_write)
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                pass_fds=(status_write,), start_new_session=True, cwd=ws.app if self.kind != "bubblewrap" else "/", env=_ENV)
            os.close(status_write)
            status_write = -1
            kept, total, stopped = bytearray(), 0, ""
            try:
                async with asyncio.timeout(limits.wall_s):
                    while chunk := await process.stdout.read(1 << 16):
                        total += len(chunk)
                        kept += chunk[: max(0, 4 * limits.output_chars - len(kept))]  # a character takes at most 4 bytes
                        if total > FLOOD_BYTES:
                            stopped = "output"
                            break
                    else:
                        await process.wait()  # unconfined, a command may close its output and go on
            except TimeoutError:
                stopped = "time"
            finally:
                await self._kill(process)
            exit_code = process.returncode if self.kind != "bubblewrap" else _exit_code(status_read)
        finally:
            os.close(status_read)
            if status_write >= 0:
                os.close(status_write)
        if not stopped and exit_code is None:
            raise EnvironmentFault(f"sandbox: bubblewrap did not start the command: {kept.decode('utf-8', 'replace').strip()[-500:]!r}",
                                   "user namespaces for ordinary users (also as root: commands run under an unprivileged id) and a /tmp that id can reach",
                                   "check `sysctl user.max_user_namespaces kernel.unprivileged_userns_clone kernel.apparmor_restrict_unprivileged_userns` and TMPDIR")
        text = kept.decode("utf-8", "replace")
        return CommandResult(None if stopped else exit_code, text[: limits.output_chars], total > len(kept) or len(text) > limits.output_chars,
                             stopped, time.monotonic() - started)

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        # The group holds bwrap alone (it puts the command into a session of its own); its death takes the pid namespace along.
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself and left nothing
            if process.returncode is None or self.kind != "bubblewrap":
                os.killpg(process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(10):
                while await process.stdout.read(1 << 16):
                    pass
                await process.wait()
        except TimeoutError as e:
            raise EnvironmentFault(f"sandbox: processes of command {process.pid} still hold its output 10 s after SIGKILL", "none alive",
                                   "look for processes in uninterruptible sleep (file system), or use tasks.sandbox = 'bubblewrap'") from e

    def _argv(self, command: bytes, ws: Workspace, limits: CommandLimits, readonly: Mapping[str, Path], writable: Mapping[str, Path],
              status_fd: int) -> list[str | bytes]:
        shell = ["prlimit", f"--nproc={limits.processes}", f"--as={limits.memory_mb << 20}", f"--fsize={limits.file_mb << 20}",
                 f"--cpu={int(limits.wall_s) + 1}", "--nofile=256", "--core=0", "--", "bash", "-c", command]
        if self.kind != "bubblewrap":
            return shell
        args: list[str | bytes] = []
        if os.geteuid() == 0:
            args += [shutil.which("setpriv"), f"--reuid={ws.uid}", f"--regid={ws.gid}", "--clear-groups"]
        args += [shutil.which("bwrap"), "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv",
                 "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--json-status-fd", str(status_fd),
                 "--ro-bind", "/usr", "/usr"]
        for hidden in ("/usr/local", "/usr/src"):
            if os.path.isdir(hidden):
                args += ["--tmpfs", hidden, "--remount-ro", hidden]
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):  # links into /usr on merged systems, folders elsewhere
            if os.path.islink(f"/{name}"):
                args += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            elif os.path.isdir(f"/{name}"):
                args += ["--ro-bind", f"/{name}", f"/{name}"]
        for name in ("/etc/alternatives", "/etc/ld.so.cache"):  # awk and others are links through the first
            args += ["--ro-bind-try", name, name]
        args += ["--proc", "/proc", "--dev", "/dev", "--size", str(_TMP_BYTES), "--tmpfs", "/dev/shm", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp",
                 "--bind", str(ws.app), APP]
        for flag, mounts in (("--ro-bind", readonly), ("--bind", writable)):
            for inside, host in mounts.items():
                args += [flag, str(host), inside]
        args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", APP]
        for key, value in _ENV.items():
            args += ["--setenv", key, value]
        return args + shell


def _exit_code(status_fd: int) -> int | None:
    """bwrap's status lines hold `{"exit-code": N}` only when the command really ran to its end."""
    os.set_blocking(status_fd, False)
    try:
        lines = os.read(status_fd, 1 << 16).splitlines()
    except BlockingIOError:  # someone still holds the writing end; nothing was reported
        return None
    codes = [record["exit-code"] for record in map(json.loads, lines) if "exit-code" in record]
    return codes[-1] if codes else None
