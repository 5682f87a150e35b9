"""Run functions of a test module on several processes that form a world: no MPI, no launcher, one subprocess per rank.

    first, second = launch([Job(fn, {"ep": 2}, (folder,)), Job(fn, {"tp": 2}, (folder,))], ranks=2)

`fn(*args)` is a top-level function of an importable module; it runs with torch.distributed and megatron-core set up for its layout, and
returns JSON. The ranks run the jobs one after another, each in a fork, because importing megatron-core is the slow part.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    function: Callable
    layout: dict
    args: tuple = ()


def launch(jobs: list[Job], *, ranks: int, timeout_s: float = 240.0) -> list[list]:
    """For each job, what its function returned on each rank. Raises AssertionError with the output of the ranks that failed."""
    with tempfile.TemporaryDirectory() as folder:
        work = {"ranks": ranks, "folder": folder, "path": sys.path, "jobs": [
            {"module": job.function.__module__, "function": job.function.__name__, "layout": job.layout, "args": list(job.args)} for job in jobs]}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        processes = [
            subprocess.Popen([sys.executable, __file__, json.dumps({**work, "rank": rank})], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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
        by_rank = [json.loads((Path(folder) / f"results{rank}.json").read_text()) for rank in range(ranks)]
        return [list(results) for results in zip(*by_rank, strict=True)]


def _broadcast_through(path: Path):
    def broadcast(data: bytes | None) -> bytes:
        if data is not None:
            path.with_suffix(".tmp").write_bytes(data)
            path.with_suffix(".tmp").rename(path)
        while not path.exists():
            time.sleep(0.01)
        return path.read_bytes()

    return broadcast


def _main(work: dict) -> None:
    """Each job in a fork: nothing of its groups and their threads is left for the next one, and megatron-core is imported once."""
    sys.path[:] = work["path"]
    import miles.trainer.step  # noqa: F401  (the slow imports)
    for number, job in enumerate(work["jobs"]):
        child = os.fork()
        if child == 0:
            try:
                _run(work, number, job)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"job {number}, {job['function']}: exit {code}")
    results = [json.loads((Path(work["folder"]) / f"result{n}.{work['rank']}.json").read_text()) for n in range(len(work["jobs"]))]
    (Path(work["folder"]) / f"results{work['rank']}.json").write_text(json.dumps(results))


def _run(work: dict, number: int, job: dict) -> None:
    from miles.core import Layout
    from miles.trainer.distributed import close_distributed, init_distributed

    folder = Path(work["folder"])
    layout = Layout(world=work["ranks"], **job["layout"])
    init_distributed(work["rank"], layout, _broadcast_through(folder / f"broadcast{number}"), seed=1, timeout_s=60)
    result = getattr(importlib.import_module(job["module"]), job["function"])(*job["args"])
    close_distributed()
    (folder / f"result{number}.{work['rank']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
