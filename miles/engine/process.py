"""Starts, watches and stops one SGLang server as a child process of a rollout rank."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from miles.config import MilesConfig
from miles.core import EnvironmentFault
from miles.engine.command import ModelShape, Platform, server_argv, server_env
from miles.engine.handover import owned_folder
from miles.engine.launch import PARENT_ENV, TOKEN_ENV
from miles.engine.ports import PortLease, first_port, lease_port

log = logging.getLogger(__name__)

SERVER = "miles.engine.launch"
"""The module that the child process runs. Tests that kill engines by the dozen put a stand-in here (tests/engine/stub.py)."""
POLL_S = 0.2
TAIL_LINES = 25
PORT_TAKEN = ("address already in use", "is not available", "port is already")


def detect_platform() -> Platform:
    """`cuda` when torch sees a GPU, else `cpu`. Slurm's fake GPUs of a development cluster do not count."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class EngineKilled(EnvironmentFault):
    """A signal ended the server before it answered, and not SGLang itself: a second start may succeed where this one did not."""


class EngineProcess:
    """One `sglang.launch_server` child: its own process group, killed by the kernel when this process dies.

    Lifecycle: `await start()` -> serving at `url` -> (`returncode` is set when it dies; `await restart()`) -> `await stop()`.
    Start it from the thread that runs the event loop for the whole life of the engine: the kernel ties the child to that thread.
    """

    def __init__(
        self, config: MilesConfig, *, rank: int, log_path: str | Path, token_file: str | Path, platform: Platform | None = None,
        host: str = "127.0.0.1",
    ):
        self.config, self.rank, self.host = config, rank, host
        self.log_path, self.token_file = Path(log_path), Path(token_file)
        self.platform: Platform = platform or detect_platform()
        self.shape = ModelShape.from_folder(config.model.path)
        self.started_s = 0.0  # seconds the last start took
        self._lease: PortLease | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._scratch: Path | None = None  # its TMPDIR

    @property
    def url(self) -> str:
        if self._lease is None:
            raise EnvironmentFault("the engine has no address yet", "a started engine", "await start() first")
        return f"http://{self.host}:{self._lease.port}"

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.returncode is None

    @property
    def returncode(self) -> int | None:
        """Exit status of a dead server (negative: signal), None while it lives or before the first start."""
        return self._child.returncode if self._child else None

    async def start(self, weight_version: int = 0, model_path: str | None = None) -> str:
        """Start the server with the weights in `model_path` (default: model.path), called `weight_version`; return its URL once it generates.

        Raises EnvironmentFault with the end of its log when it exits or does not answer within engine.start_timeout_s; EngineKilled when somebody else
        ended it.
        """
        began = time.monotonic()
        first = first_port(self.config.engine.port_base, self.rank)
        while True:
            self._lease = lease_port(first, self.host)
            await self._spawn(weight_version, model_path)
            try:
                await self._wait_ready(began)
            except EnvironmentFault as fault:
                port = self._lease.port
                await self.stop()
                # The lease keeps Miles off a taken port; a foreign program can still take it while SGLang imports.
                if any(words in str(fault).lower() for words in PORT_TAKEN):
                    log.warning("port %d was taken while the engine started; trying the next", port)
                    first = port + 1
                    continue
                raise
            self.started_s = time.monotonic() - began
            return self.url

    async def restart(self, weight_version: int = 0, model_path: str | None = None) -> str:
        """Stop what is left of the server and start it again; returns the new URL. Raises EnvironmentFault like `start`."""
        await self.stop()
        return await self.start(weight_version, model_path)

    async def wait(self) -> int:
        """Wait until the server process ends; returns its exit status."""
        if self._child is None:
            raise EnvironmentFault("no engine to wait for", "a started engine", "await start() first")
        return await self._child.wait()

    def kill(self) -> None:
        """End a server that hangs, as if it had died by itself: `alive` turns false, `stop` removes what is left."""
        if self.alive:
            self._kill_group(self._child.pid)

    async def stop(self) -> None:
        """End the server and everything it started, at once: it has nothing to save. Does nothing when it is not running."""
        if self._child is not None:
            group = self._child.pid
            segments = _shared_memory(_group_members(group))
            self._kill_group(group)
            await self._child.wait()
            while _group_members(group):
                self._kill_group(group)
                await asyncio.sleep(0.02)
            for path in segments:
                path.unlink(missing_ok=True)
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        if not self.log_path.is_file():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    async def _spawn(self, weight_version: int, model_path: str | None) -> None:
        assert self._lease is not None
        argv = server_argv(self.config, platform=self.platform, shape=self.shape, host=self.host, port=self._lease.port, rank=self.rank,
                           weight_version=weight_version, model_path=model_path)
        tmp = Path(tempfile.gettempdir())
        self._scratch = owned_folder(tmp, "engine")  # a killed SGLang leaves its sockets there; what it has compiled is kept elsewhere
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp / f"torchinductor_{os.getuid()}"), **os.environ, "TMPDIR": str(self._scratch), **server_env(self.platform, self.shape, _sglang_models()), PARENT_ENV: str(os.getpid()),
               TOKEN_ENV: str(self.token_file.resolve())}
        for name in [n for n in env if n.startswith(("PMI", "HYDI_"))]:
            del env[name]  # the server is no MPI rank
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as out:
            out.write(f"\n--- {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} sglang.launch_server {' '.join(argv)}\n".encode())
            out.flush()
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", SERVER, *argv, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )

    async def _wait_ready(self, began: float) -> None:
        assert self._child is not None
        deadline = began + self.config.engine.start_timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            while True:
                if self._child.returncode is not None:
                    fault = self._fault(f"the engine of rank {self.rank} ended with exit status {self._child.returncode} before it answered")
                    # SGLang kills itself too, when one of its processes fails: then its log says so.
                    by_others = self._child.returncode < 0 and "sigquit" not in self.log_tail().lower()
                    raise EngineKilled(*fault.args) if by_others else fault
                if time.monotonic() > deadline:
                    raise self._fault(f"the engine of rank {self.rank} did not answer within {self.config.engine.start_timeout_s:.0f} s")
                try:
                    # 503 until its own warm-up request is done; 200 after it has generated a token for this very request.
                    async with http.get(f"{self.url}/health") as reply:
                        if reply.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    log.debug("engine of rank %d not listening yet", self.rank)
                await asyncio.sleep(POLL_S)

    def _fault(self, what: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"{what}; the end of {self.log_path}:\n{self.log_tail()}", f"an SGLang server that answers on {self.url}",
            "read the log; common causes: too little memory, a model SGLang does not know, a wrong flag in engine.extra_args, start_timeout_s too short",
        )

    @staticmethod
    def _kill_group(group: int) -> None:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("process group %d is gone", group)


def _group_members(group: int) -> list[int]:
    """Living (not zombie) processes of a process group, from /proc."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if int(fields[2]) == group and fields[0] not in "ZX":
                members.append(int(entry))
    return members


def _shared_memory(pids: list[int]) -> set[Path]:
    """Named shared memory of SGLang that these processes have mapped: it does not remove it itself (0.5.23)."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it ended while we looked
        found |= {Path(word) for word in maps.split() if word.startswith("/dev/shm/sglang_")}
    return found


def _sglang_models() -> Path | None:
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parent / "srt" / "models" if spec and spec.origin else None
