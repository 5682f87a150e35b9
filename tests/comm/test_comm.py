import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles.comm import Link, link
from miles.config import load_config
from miles.core import Role
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


def test_a_rank_that_takes_no_messages_keeps_nobody_else_from_being_heard_and_gets_them_all_in_order_later(tmp_path):
    p = mpi(3, "frozen", cwd=tmp_path)
    out, _ = p.communicate(timeout=90)
    assert p.returncode == 0 and out.count("frozen ok") == 3, out


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
    assert trainer.poll() is None


def test_a_rollout_leader_killed_between_its_hello_and_its_connect_costs_its_successor_one_time_limit_and_the_trainer_lives(tmp_path):
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))
    t, r1 = run.new_epoch("trainer"), run.new_epoch("rollout")
    dead = mpi(1, "link", run.path, "rollout", r1, 3.0, 1000.0)
    until(lambda: (run.path / "link" / f"hello.{r1}.{t}").exists())
    dead.kill()
    trainer = mpi(1, "link", run.path, "trainer", t, 3.0)
    until(lambda: (run.path / "link" / f"port.{r1}.{t}").exists())  # it accepts, and nobody comes
    second = mpi(1, "link", run.path, "rollout", run.new_epoch("rollout"), 3.0)
    assert second.communicate(timeout=40)[0].startswith("rollout woken")
    trainer.kill()
    said = trainer.communicate()[0]
    assert f"no link to the peer (epochs {r1}.{t})" in said and "trainer woken" in said


def test_a_leader_that_comes_too_late_to_the_handshake_goes_without_a_link_and_its_successor_has_one(tmp_path):
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))
    t, r1 = run.new_epoch("trainer"), run.new_epoch("rollout")
    trainer, late = mpi(1, "link", run.path, "trainer", t, 3.0), mpi(1, "link", run.path, "rollout", r1, 3.0, 6.0)
    with pytest.raises(subprocess.TimeoutExpired):
        late.communicate(timeout=12)
    assert late.poll() is None and not (run.path / "link" / f"port.{r1}.{t}").exists()
    late.kill()
    second = mpi(1, "link", run.path, "rollout", run.new_epoch("rollout"), 3.0)
    assert second.communicate(timeout=40)[0].startswith("rollout woken")
    trainer.kill()
    assert f"no link to the peer (epochs {r1}.{t})" in trainer.communicate()[0]


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _no_leftovers():
    yield
    time.sleep(0.05)
    subprocess.run(["pkill", "-9", "-f", str(PROGRAM)], check=False)


class Handshaken:
    """In place of a handshake: it ends at once. Nothing is sent."""

    def __init__(self, call, what):
        self.of = what

    def ended(self):
        return SimpleNamespace(Iprobe=lambda *_: False, of=self.of)


@pytest.fixture
def leader(tmp_path, monkeypatch):
    """The rollout leader's end beside a clock of the test's own, with a count of its looks at the trainer's epoch."""
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))
    clock, looks = SimpleNamespace(now=0.0), Counter()
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(link, "Handshake", Handshaken)
    read = run.current_epoch
    monkeypatch.setattr(run, "current_epoch", lambda role: looks.update([role]) or read(role))
    end = Link(run, Role.ROLLOUT, run.new_epoch("rollout"))

    def tick(seconds):
        """As a leader does, every 5 ms. Returns how often the epoch was read."""
        before = looks[Role.TRAINER]
        for _ in range(round(seconds / 0.005)):
            end.tick()
            end.woken()
            clock.now += 0.005
        return looks[Role.TRAINER] - before

    return SimpleNamespace(run=run, end=end, tick=tick)


def test_a_connected_leader_reads_the_epoch_of_its_peer_once_a_second_and_finds_a_successor_within_one(leader):
    leader.run.new_epoch("trainer")
    leader.tick(1.0)
    (leader.run.path / "link" / "port.1.1").touch()
    leader.tick(1.0)
    assert leader.end.connected and leader.tick(20.0) <= 21
    leader.run.new_epoch("trainer")
    (leader.run.path / "link" / "port.1.2").touch()
    assert leader.tick(link.LOOK_S + link.SHAKE_S + 0.1) and leader.end.connected and "1.2" in leader.end._comm.of


def test_a_leader_without_a_peer_looks_for_it_a_few_times_a_second(leader):
    assert leader.tick(20.0) <= 20 / link.SHAKE_S + 1
    leader.run.new_epoch("trainer")
    leader.tick(link.SHAKE_S)
    assert (leader.run.path / "link" / "hello.1.1").exists()
