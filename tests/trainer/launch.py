"""Run a function of a test file on several processes that form a world: no MPI, no launcher, one subprocess per rank.

    results = launch(fn, ranks=2, layout={"ep": 2}, args=(str(tmp_path),))

`fn(*args)` is a top-level function of an importable test module; it runs with torch.distributed and megatron-core set up, and returns JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch(function, *, ranks: int = 1, layout: dict | None = None, args: tuple = (), timeout_s: float = 120.0) -> list:
    """Values returned by `function(*args)` on each rank. Raises AssertionError with the output of the ranks that failed."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"module": function.__module__, "function": function.__name__, "ranks": ranks, "layout": layout or {}, "args": list(args),
               "folder": folder, "path": sys.path}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        processes = [
            subprocess.Popen([sys.executable, __file__, json.dumps({**job, "rank": rank})], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             cwd=ROOT, env=env, text=True)
            for rank in range(ranks)
        ]
        try:
            outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
        finally:
            for p in processes:
                p.kill()
        bad = [f"--- rank {i}, exit {p.returncode}\n{out[-6000:]}" for i, (p, out) in enumerate(zip(processes, outputs, strict=True)) if p.returncode]
        assert not bad, "\n".join(bad)
        return [json.loads((Path(folder) / f"result{rank}.json").read_text()) for rank in range(ranks)]


def _broadcast_through(folder: Path):
    def broadcast(data: bytes | None) -> bytes:
        path = folder / "broadcast"
        if data is not None:
            path.with_suffix(".tmp").write_bytes(data)
            path.with_suffix(".tmp").rename(path)
        while not path.exists():
            time.sleep(0.01)
        return path.read_bytes()

    return broadcast


def _main(job: dict) -> None:
    sys.path[:] = job["path"]
    from miles.core import Layout
    from miles.trainer.distributed import close_distributed, init_distributed

    folder = Path(job["folder"])
    init_distributed(job["rank"], Layout(world=job["ranks"], **job["layout"]), _broadcast_through(folder), seed=1, timeout_s=60)
    function = getattr(importlib.import_module(job["module"]), job["function"])
    result = function(*job["args"])
    (folder / f"result{job['rank']}.json").write_text(json.dumps(result))
    close_distributed()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
