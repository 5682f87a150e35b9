import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles.config import load_config
from miles.rundir import RunDir

PROGRAM = Path(__file__).with_name("world_program.py")
MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))


def mpi(n, *args, **kw):
    return subprocess.Popen([MPIEXEC, "-n", str(n), sys.executable, str(PROGRAM), *map(str, args)],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kw)


def test_broadcast_and_ordered_messages_over_three_ranks():
    p = mpi(3, "world")
    out, _ = p.communicate(timeout=60)
    assert p.returncode == 0 and out.count("world ok") == 3, out


def test_a_world_of_the_wrong_size_says_what_to_check():
    p = mpi(2, "world")
    out, _ = p.communicate(timeout=60)
    assert p.returncode != 0 and "the MPI world has 2 rank(s)" in out and "srun --mpi=list" in out


def test_the_link_survives_kill_9_of_the_rollout_side_and_connects_to_its_successor(tmp_path):
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))
    t, r1 = run.new_epoch("trainer"), run.new_epoch("rollout")
    trainer = mpi(1, "link", run.path, "trainer", t)
    first = mpi(1, "link", run.path, "rollout", r1)
    assert first.communicate(timeout=40)[0].startswith("rollout woken")  # ended without a goodbye
    second = mpi(1, "link", run.path, "rollout", run.new_epoch("rollout"))
    assert second.communicate(timeout=40)[0].startswith("rollout woken")
    trainer.kill()
    trainer.wait()


@pytest.fixture(autouse=True)
def _no_leftovers():
    yield
    time.sleep(0.05)
    subprocess.run(["pkill", "-9", "-f", str(PROGRAM)], check=False)
