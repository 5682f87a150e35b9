"""One command in one sandbox, for tests."""

import asyncio
import subprocess
import time

from miles.env import CommandLimits, Sandbox

QUICK = CommandLimits(wall_s=5.0, output_chars=4000, processes=32)


def run(command, limits=QUICK, files=None, kind="bubblewrap", inspect=None, **mounts):
    """(result, what `inspect(workspace)` returned) of one command in a fresh workspace."""
    sandbox = Sandbox(kind)
    with sandbox.workspace(None, limits) as ws:
        for name, text in (files or {}).items():
            (ws.app / name).write_text(text)
        result = asyncio.run(sandbox.run(command, ws, limits, **mounts))
        return result, inspect(ws) if inspect else None


def alive(mark):
    """Whether a process `sleep MARK` is alive on this machine."""
    time.sleep(0.1)
    out = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return any(line.startswith(("sleep " + mark, "setsid sleep " + mark)) for line in out.splitlines())


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
