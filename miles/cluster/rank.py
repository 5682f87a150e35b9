"""`python -m miles.cluster.rank RUN MODULE`: the thin parent of one MPI rank.

It sends the rank's output to FOLDER/<role>-<rank>.e<epoch>.log, and records pid, host and at the end the exit code in
FOLDER/ranks/<role>-<rank>.e<epoch>.json, because neither srun nor mpiexec tells which rank failed first and how. FOLDER is RUN/attempts/NNNN, or RUN/pools/NNNN
for a rank of a pool, which has its number in the whole run in the names. It ends a rank that gives no sign of life for cluster.frozen_s (miles.comm.pulse), and
records that it did: neither srun nor mpiexec sees that a process is frozen, and the supervisor may be on another node.
Alternatives that do not work: `srun -o` patterns are wrong for het components > 0; srun's exit code is that of the last rank it killed.
Imports little: it starts once per rank. A rank dies with its wrapper, the wrapper with its launcher (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from miles.cluster.shm import remove_dead_segments
from miles.cluster.silence import LOOK_S, Silence

LEAVE_S = 60.0
STUCK_S = 10.0  # for what a dead file system may hold up: the end of a process that waits for it, a record
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
    pulse = os.memfd_create("miles-pulse", 0)  # inherited
    with open(folder / f"{name}.log", "ab") as log:
        # close_fds=False: the launcher's PMI connection is an inherited file descriptor.
        child = subprocess.Popen([sys.executable, "-m", module, run], stdout=log, stderr=log, close_fds=False, preexec_fn=die_with_parent,
                                 env={**env, "MILES_PULSE": str(pulse)})
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    record = {"rank": rank, "pid": child.pid, "host": socket.gethostname(), "node": env.get("SLURMD_NODENAME", ""),
              "step": env.get("SLURM_STEP_ID", ""), "started": time.time(), "code": None, "ended": 0.0, "frozen": ""}
    write(folder / "ranks" / f"{name}.json", record)
    code, frozen = watch(child, pulse, float(env["MILES_FROZEN_S"]))
    record.update(code=code if code >= 0 else 128 - code, ended=time.time(), frozen=frozen)
    writing = threading.Thread(target=write, args=(folder / "ranks" / f"{name}.json", record), daemon=True)
    writing.start()
    writing.join(STUCK_S if frozen else None)
    if record["code"] not in (0, os.EX_TEMPFAIL):
        return record["code"]
    # Clean ranks leave together, and 75 leaves as 0. They end without MPI_Finalize (it hangs when a peer was killed), so to mpiexec the
    # first of them to go looks like a crash, as to srun --kill-on-bad-exit does a 75: peers still writing would be killed.
    size = int(env["SLURM_NTASKS"] if env["MILES_LAUNCHER"] == "slurm" else env["PMI_SIZE"])
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline and not all(ended(folder / "ranks" / f"{role}-{first + r}.e{epoch:04d}.json") for r in range(size)):
        time.sleep(0.1)
    return 0


def watch(child: subprocess.Popen, pulse: int, limit_s: float) -> tuple[int, str]:
    """Wait until a rank ends, or gives no new number in the file `pulse` for `limit_s`: then it is killed. Returns its exit code, negative for a signal, and,
    if it was killed here, in what state the kernel had its main thread."""
    silence = Silence(b"", time.monotonic())
    while silence.seconds < limit_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_S), ""
        silence = silence.look(os.pread(pulse, 8, 0), time.monotonic())
    if (code := child.poll()) is not None:
        return code, ""
    state = next(line for line in Path(f"/proc/{child.pid}/status").read_text().splitlines() if line.startswith("State:")).split("\t")[1]
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STUCK_S)  # one that waits in the kernel may not even end of this; its step does
    return -signal.SIGKILL, state


def ended(path: Path) -> bool:
    return path.exists() and json.loads(path.read_text())["code"] is not None


def write(path: Path, record: dict) -> None:
    """Atomic, not fsynced: the record matters only while this job lives."""
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_text(json.dumps(record))
    tmp.rename(path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
