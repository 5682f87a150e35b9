"""`python -m miles.cluster.rank RUN MODULE`: the thin parent of one MPI rank.

It sends the rank's output to FOLDER/<role>-<rank>.e<epoch>.log, and records pid, host and at the end the exit code in
FOLDER/ranks/<role>-<rank>.e<epoch>.json, because neither srun nor mpiexec tells which rank failed first and how. FOLDER is RUN/attempts/NNNN, or RUN/pools/NNNN
for a rank of a pool, which has its number in the whole run in the names.
Alternatives that do not work: `srun -o` patterns are wrong for het components > 0; srun's exit code is that of the last rank it killed.
Imports little: it starts once per rank. A rank dies with its wrapper, the wrapper with its launcher (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from miles.cluster.shm import remove_dead_segments

LEAVE_S = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(run: str, module: str) -> int:
    env = os.environ
    role, epoch, first = env["MILES_ROLE"], int(env["MILES_EPOCH"]), int(env["MILES_FIRST_RANK"])
    rank = int(env["SLURM_PROCID"] if env["MILES_LAUNCHER"] == "slurm" else env["PMI_RANK"])
    folder = Path(env["MILES_FOLDER"])
    name = f"{role}-{first + rank}.e{epoch:04d}"
    die_with_parent()
    remove_dead_segments()
    for sig in (signal.SIGUSR2, signal.SIGINT):
        # Ignored here, and by the child until it has its own handler: USR2 would kill a rank that is still importing. It is repeated.
        signal.signal(sig, signal.SIG_IGN)
    with open(folder / f"{name}.log", "ab") as log:
        # close_fds=False: the launcher's PMI connection is an inherited file descriptor.
        child = subprocess.Popen([sys.executable, "-m", module, run], stdout=log, stderr=log, close_fds=False, preexec_fn=die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    record = {"rank": rank, "pid": child.pid, "host": socket.gethostname(), "node": env.get("SLURMD_NODENAME", ""),
              "step": env.get("SLURM_STEP_ID", ""), "started": time.time(), "code": None, "ended": 0.0}
    write(folder / "ranks" / f"{name}.json", record)
    code = child.wait()
    record.update(code=code if code >= 0 else 128 - code, ended=time.time())
    write(folder / "ranks" / f"{name}.json", record)
    if record["code"] not in (0, os.EX_TEMPFAIL):
        return record["code"]
    # Clean ranks leave together, and 75 leaves as 0. They end without MPI_Finalize (it hangs when a peer was killed), so to mpiexec the
    # first of them to go looks like a crash, as to srun --kill-on-bad-exit does a 75: peers still writing would be killed.
    size = int(env["SLURM_NTASKS"] if env["MILES_LAUNCHER"] == "slurm" else env["PMI_SIZE"])
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline and not all(ended(folder / "ranks" / f"{role}-{first + r}.e{epoch:04d}.json") for r in range(size)):
        time.sleep(0.1)
    return 0


def ended(path: Path) -> bool:
    return path.exists() and json.loads(path.read_text())["code"] is not None


def write(path: Path, record: dict) -> None:
    """Atomic, not fsynced: the record matters only while this job lives."""
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_text(json.dumps(record))
    tmp.rename(path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
