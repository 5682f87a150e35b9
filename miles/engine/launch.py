"""The child process: `python -m miles.engine.launch <sglang arguments>`.

Starts `sglang.launch_server` with things added that its command line cannot express: it dies with its parent, its API key comes from a file instead of the
process list, the key stays out of its log, and on a CPU it can apply patches to its own weights.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PARENT_ENV = "MILES_ENGINE_PARENT"
TOKEN_ENV = "MILES_TOKEN_FILE"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends. SGLang's own children do the same with this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


def keep_key_out_of_log() -> None:
    """SGLang logs all its arguments at start, and its own redaction leaves the API key in."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._server_args_for_logging", lambda args, *_: {**args, "api_key": "(hidden)"}, HookType.AFTER)


def main() -> None:
    die_with_parent(int(os.environ.pop(PARENT_ENV)))
    args = sys.argv[1:]
    if token_file := os.environ.get(TOKEN_ENV):
        args += ["--api-key", Path(token_file).read_text().strip()]
        keep_key_out_of_log()
    if ("--device", "cpu") in zip(args, args[1:], strict=False):
        from miles.engine.inplace import install

        install()
    sys.argv = ["sglang.launch_server", *args]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
