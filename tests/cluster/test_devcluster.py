"""slurm/devcluster as a user calls it: start, use, stop; long paths; as another user than root."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from miles.cluster.slurm import scrubbed
from tests.cluster.stubs import PROJECT

pytestmark = pytest.mark.cluster


def devcluster(*words: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    env = {k: v for k, v in scrubbed(os.environ).items() if k != "SLURM_CONF"}
    if prefix:
        env |= {"HOME": "/tmp", "USER": "nobody", "LOGNAME": "nobody"}
    return subprocess.run([*prefix, str(PROJECT / "slurm" / "devcluster"), *map(str, words)], capture_output=True, text=True, env=env, timeout=120, check=False)


def daemons(folder: Path) -> list[str]:
    """Living daemons whose command line names the folder."""
    out = []
    for proc in Path("/proc").iterdir():
        try:
            if proc.name.isdigit() and str(folder).encode() in (proc / "cmdline").read_bytes():
                out.append((proc / "comm").read_text().strip())
        except OSError:
            continue
    return [name for name in out if name in ("slurmctld", "slurmd", "munged")]


def test_start_status_stop(tmp_path):
    assert devcluster("status", "--dir", tmp_path / "c").returncode == 1
    done = devcluster("start", "--nodes", "2", "--dir", tmp_path / "c")
    try:
        assert done.returncode == 0 and f"export SLURM_CONF={tmp_path}/c/etc/slurm.conf" in done.stdout
        assert sorted(daemons(tmp_path / "c")) == ["slurmctld", "slurmd", "slurmd"]  # munged's socket may lie in a short folder
        env = {**os.environ, "SLURM_CONF": str(tmp_path / "c" / "etc" / "slurm.conf")}
        hosts = subprocess.run(["srun", "--nodes=2", "--gpus-per-node=4", "bash", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"],
                               capture_output=True, text=True, env=env, check=True)
        assert sorted(hosts.stdout.splitlines()) == ["node0 0,1,2,3", "node1 0,1,2,3"]
        subprocess.run(["sbatch", "--output=/dev/null", "--wrap=sleep 600"], env=env, check=True, capture_output=True)
    finally:
        stopped = devcluster("stop", "--dir", tmp_path / "c")  # also ends the job
    assert stopped.returncode == 0 and daemons(tmp_path / "c") == []
    assert devcluster("status", "--dir", tmp_path / "c").returncode == 1
    assert devcluster("stop", "--dir", tmp_path / "c").returncode == 0  # nothing to do is no error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_and_a_path_too_long_for_a_socket():
    folder = Path(tempfile.mkdtemp(prefix="a-long-name-" + "x" * 70, dir="/tmp"))
    folder.chmod(0o777)  # munged would refuse a socket below this folder, too
    nobody = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    try:
        done = devcluster("start", "--nodes", "2", "--dir", folder / "c", prefix=nobody)
        assert done.returncode == 0, done.stderr
        env = {"PATH": os.environ["PATH"], "SLURM_CONF": str(folder / "c" / "etc" / "slurm.conf")}
        who = subprocess.run([*nobody, "srun", "--chdir=/tmp", "id", "-un"], capture_output=True, text=True, env=env, check=True, cwd="/tmp")
        assert who.stdout == "nobody\n"
    finally:
        devcluster("stop", "--dir", folder / "c", prefix=nobody)
        shutil.rmtree(folder)
    assert daemons(folder) == []
