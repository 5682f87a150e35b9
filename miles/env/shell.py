"""One shell for a whole episode: working directory, variables, functions and background jobs live from turn to turn.

    harness                              sandbox
    stdin  ── "eval 'COMMAND' ..." ────▶ bash -i          its own 0 and 1 are the control channel
    stdout ◀─ "NONCE exit-code" ────────    │
    FIFO n ◀─ output of command n ──────────┘             a command has /dev/null, FIFO n, FIFO n as its 0, 1, 2

- The end of a command is a line with a random word that was made for it, on a channel that commands do not have. A command that hunts for it (it
  runs in the same bash) can only falsify its own record.
- Every command has a FIFO of its own: what a background job writes after the command's end is still read, up to FLOOD_BYTES, and thrown away;
  it never appears in a later record. A job that writes more than that waits until the shell ends.
- bash is interactive, without a terminal: then SIGINT makes it drop whatever it is doing, loops of its own included, and read the next line. That is
  how a command is stopped and the shell kept: SIGINT to bash, SIGINT and then SIGKILL to every process that was not there when the command began.
  Where that does not help (`trap '' INT`, a stopped bash, a broken `builtin`), the sandbox is killed and the next command has a new shell.
- `eval` of one quoted word bounds what unbalanced quotes and endless here-documents can swallow.

What a later version needs to restore a shell after a crash of the harness (cwd, `declare -p`, `declare -f`) can be asked for by one more such line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import time
from collections.abc import Mapping

from miles.env import processes
from miles.env.backends import CONTROL
from miles.env.limits import CommandLimits, CommandResult, Stopped
from miles.env.output import FLOOD_BYTES, Output
from miles.env.sandbox import Running, Sandbox, Workspace, not_started, unfit

_BASH = ("bash", "--norc", "--noprofile", "--noediting", "-i")
_SETUP = "PS1= PS2= PS4='+ '; unset HISTFILE; set +o history +o histexpand; shopt -u checkwinsize huponexit"
_START_S = 20.0
_STOP_S = 3.0  # how long SIGINT may take before the whole sandbox is killed
_ROUND_S = 0.05
_KILL_ROUND = 4  # every so many rounds SIGKILL goes to what runs in the shell


class Shell:
    """`async with Shell(...) as shell: result = await shell.run("cd src")`. One command at a time. On exit, no process of it is alive."""

    def __init__(self, sandbox: Sandbox, workspace: Workspace, limits: CommandLimits, env: Mapping[str, str] | None = None):
        self._sandbox, self._ws, self._limits, self._env = sandbox, workspace, limits, dict(env or {})
        self._control = workspace.add("control", owned=False)
        self._inside = CONTROL if sandbox.kind != "unconfined-i-know" else workspace.local(self._control)
        self._running: Running | None = None
        self._bash = 0  # its pid here
        self._own: set[int] = set()  # pids of launcher and bash
        self._commands = 0
        self._used_s = 0.0  # CPU seconds of shells before this one
        self._late: list[_Fifo] = []  # of commands that ended and left something behind that may still write
        self._guard: asyncio.Task | None = None
        self._ended = False  # a shell ended and nobody was told yet

    async def __aenter__(self) -> Shell:
        await self._sandbox.check()
        return self

    async def __aexit__(self, *_exc) -> None:
        await self._end()

    async def run(self, command: str) -> CommandResult:
        """Run one command in the shell. Raises EnvironmentFault when the sandbox itself fails."""
        started = time.monotonic()
        if (refused := unfit(command)) is not None:
            return refused
        await self._stand_down()
        if self._running is not None and self._running.process.returncode is not None:
            await self._end()  # it was killed between two commands, by a job of its own
            self._ended = True
        if self._running is None:
            await self._begin()
        output = Output(self._limits.output_chars)
        fifo = self._fifo(output)
        try:
            nonce = secrets.token_hex(16)
            exit_code, stopped, lives = await self._play(command, fifo, nonce)
            if not lives:
                exit_code = await self._end() if exit_code is None else exit_code
        except BaseException:
            fifo.close()
            raise
        fifo.ended(keep=self._running is not None)
        if not fifo.closed:
            self._late.append(fifo)
        text, cut = output.text()
        fresh, self._ended = self._ended or self._running is None, False
        self._watch_jobs()
        return CommandResult(None if stopped else exit_code, text, cut, stopped, time.monotonic() - started, fresh_shell=fresh)

    # -- one command ---------------------------------------------------------------------------------------------------------
    async def _play(self, command: str, fifo: _Fifo, nonce: str) -> tuple[int | None, Stopped, bool]:
        """(exit code if the shell said one, which limit stopped it, whether the shell waits for the next line)."""
        running = self._running
        before = {p.pid for p in processes.below(running.process.pid)}
        write = running.process.stdin.write
        # Two lines: bash forgets the rest of a line when it drops a command (SIGINT, an unset variable under `set -u`), and goes on with the next.
        write(f"\\builtin eval {shlex.quote(command)} </dev/null >{self._inside}/{fifo.name} 2>&1\n".encode("utf-8", "replace") + _report(nonce))
        ended = asyncio.ensure_future(self._report(nonce))
        watcher = asyncio.ensure_future(running.watched())
        flood = asyncio.ensure_future(fifo.flooded.wait())
        try:
            await asyncio.wait({ended, watcher, flood}, timeout=self._limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result(), "", ended.result() is not None
            stopped: Stopped = "output" if flood.done() else watcher.result() if watcher.done() else "time"
            return None, stopped, await self._interrupt(ended, nonce, before) and not running.over()
        finally:
            for job in (ended, watcher, flood):
                job.cancel()
            await asyncio.gather(ended, watcher, flood, return_exceptions=True)

    async def _report(self, nonce: str) -> int | None:
        """The exit code when the command of `nonce` has ended; None when the shell itself has."""
        process, foreign = self._running.process, 0
        while foreign < FLOOD_BYTES:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than any line of ours
                foreign += FLOOD_BYTES >> 4
                continue
            if not line:
                break
            words = line.split()
            if len(words) == 2 and words[0] == nonce.encode() and words[1].isdigit():
                return int(words[1])
            foreign += len(line)
        await process.wait()  # `exec program`: it has no control channel any more and goes on
        return None

    async def _interrupt(self, ended: asyncio.Future, nonce: str, before: set[int]) -> bool:
        """Stop what runs in the shell; whether the shell is still there and waits for a line.

        bash first: it drops its command where its own SIGINT has come when it sees that its child died of one; seeing the child first it goes on, and says
        so on the command's output. Of any other death of the child it concludes that the child has dealt with the interrupt, so SIGKILL, for those that do
        not end by SIGINT, comes only now and then.
        """
        end, rounds = time.monotonic() + _STOP_S, 0
        while time.monotonic() < end and not ended.done():
            rounds += 1
            inside = {p.pid for p in processes.below(self._running.process.pid)}
            with contextlib.suppress(ProcessLookupError):
                if self._bash in inside:
                    os.kill(self._bash, signal.SIGINT)
            for pid in inside - self._own - before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if rounds % _KILL_ROUND == 0 else signal.SIGINT)
            self._running.process.stdin.write(_report(nonce))  # the first may be what SIGINT met
            await asyncio.wait({ended}, timeout=_ROUND_S)
        if not ended.done() or ended.result() is None:
            return False
        while time.monotonic() < end:  # bash is free; what ran beside it may not be gone yet
            left = [p.pid for p in processes.below(self._running.process.pid) if p.pid not in self._own | before]
            if not left:
                return True
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_ROUND_S / 5)
        return False

    # -- between commands ----------------------------------------------------------------------------------------------------
    def _watch_jobs(self) -> None:
        """Limits hold for background jobs too. Nothing to do where there are none."""
        if self._running is not None and any(p.pid not in self._own for p in processes.below(self._running.process.pid)):
            self._guard = asyncio.ensure_future(self._kill_when_over())

    async def _kill_when_over(self) -> None:
        await self._running.watched()
        await self._running.kill()

    async def _stand_down(self) -> None:
        if self._guard is not None:
            over = self._guard.done()
            self._guard.cancel()
            await asyncio.gather(self._guard, return_exceptions=True)
            self._guard = None
            if over:
                await self._running.process.wait()

    # -- life of the shell ---------------------------------------------------------------------------------------------------
    async def _begin(self) -> None:
        self._running = await self._sandbox.start(
            _BASH, self._ws, self._limits, cpu_s=int(self._limits.cpu_s) + 1, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            readonly={CONTROL: self._control} if self._inside == CONTROL else {}, used_s=self._used_s, env=self._env)
        nonce = secrets.token_hex(16)
        self._running.process.stdin.write(f"{_SETUP}\n".encode() + _report(nonce))
        try:
            async with asyncio.timeout(_START_S):
                ready = await self._report(nonce)
        except TimeoutError:
            ready = None
        if ready is None:
            await self._end()
            raise not_started("no answer of the shell")
        chain = [p.pid for p in processes.below(self._running.process.pid)]  # each the only child of the one before; bash has none yet
        self._own = {self._running.process.pid, *chain}
        self._bash = chain[-1] if chain else self._running.process.pid

    async def _end(self) -> int:
        """Kill the shell with everything it started. Its exit code."""
        await self._stand_down()
        for fifo in self._late:
            fifo.close()
        self._late.clear()
        running, self._running = self._running, None
        if running is None:
            return 0
        self._used_s = running.cpu_s
        try:
            running.process.stdin.close()
            await running.kill()
            code = running.exit_code()
        finally:
            running.close()
        return 128 + signal.SIGKILL if code is None else code  # none: killed together with its launcher

    def _fifo(self, output: Output) -> _Fifo:
        self._commands += 1
        self._late = [f for f in self._late if not f.closed]
        return _Fifo(self._control / str(self._commands), output)


def _report(nonce: str) -> bytes:
    return f"\\builtin printf '%s %d\\n' {nonce} \"$?\"\n".encode()


class _Fifo:
    """The output of one command, read as it comes."""

    def __init__(self, path, output: Output):
        self.name, self.closed, self.flooded = path.name, False, asyncio.Event()
        self._path, self._output, self._late_bytes = path, output, -1
        os.mkfifo(path)
        path.chmod(0o622)  # the shell writes and nobody in the sandbox but its owner reads
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def _read(self) -> bool:
        """Take what is there; whether there may be more."""
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        if self._late_bytes < 0:
            self._output.add(data)
            if self._output.flooded:
                self._loop.remove_reader(self._fd)  # the writer waits, and is stopped
                self.flooded.set()
                return False
        else:
            self._late_bytes += len(data)
            if self._late_bytes > FLOOD_BYTES:
                self._loop.remove_reader(self._fd)
                return False
        if not data:
            self.close()
        return bool(data)

    def ended(self, keep: bool) -> None:
        """The command has ended: everything it wrote is here or in the pipe."""
        while not self.closed and not self.flooded.is_set() and self._read():
            pass
        self._late_bytes = 0
        if not keep or self.flooded.is_set():
            self.close()
        else:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._path.unlink(missing_ok=True)
