"""Two trainer ranks (tensor and expert parallel) and two rollout ranks, each an MPI world of its own: every byte arrives, or somebody says why not."""

import re
import shutil
import time
from pathlib import Path

import pytest

from miles.config import load_config
from miles.rundir import RunDir
from tests import ranks


@pytest.fixture
def world(tmp_path, request):
    """Starts one role of a run, in which a transfer may take 60 s, or as long as the test says; everything ends with the test."""
    limit_s = getattr(request, "param", 60)
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"weights.ack_timeout_s={limit_s}")))
    started = []

    def start(role, fault=""):
        started.append(ranks.start(2, "tests.weights.p2p.transfer_program", run, role, FAULT=fault))
        return started[-1]

    yield run, start
    (run.path / "end").touch()
    for process in started:
        process.kill()
        process.wait()
    for folder in Path("/dev/shm").glob("miles-weights-*"):
        if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def finish(run, trainer, rollout):
    """What the trainer's ranks and the rollout's said until the end."""
    trainer.wait(timeout=150)
    (run.path / "end").touch()
    rollout.wait(timeout=30)
    sent, got = ranks.said(run, "trainer"), ranks.said(run, "rollout")
    assert ranks.codes(run, "trainer") == ranks.codes(run, "rollout") == [0, 0], sent + got
    return sent, got


def test_every_receiver_has_every_version_bit_for_bit_in_a_file_that_engines_load(world):
    run, start = world
    rollout = start("rollout")
    sent, got = finish(run, start("trainer"), rollout)
    assert sorted(re.findall(r"rank \d v\d filled", sent)) == [f"rank {r} v{v} filled" for r in (0, 1) for v in (1, 2)], sent + got
    assert sorted(re.findall(r"rank \d has v\d", got)) == [f"rank {r} has v{v}" for r in (0, 1) for v in (1, 2)], sent + got


def test_a_receiver_killed_in_the_middle_ends_the_transfer_and_its_successors_are_served_by_the_same_trainer(world):
    run, start = world
    first, trainer = start("rollout", "killed"), start("trainer", "killed")
    assert first.wait(timeout=150) != 0
    second = start("rollout", "killed")
    sent, got = finish(run, trainer, second)
    assert len(re.findall(r"rank \d v1 failed after \d+ s: the rollout ranks were restarted$", sent, re.MULTILINE)) == 2, sent + got
    assert len(re.findall(r"rank \d v[23] filled", sent)) == 4 and len(re.findall(r"rank \d has v[23]", got)) == 4, sent + got


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_receiver_that_is_killed_and_not_started_again_costs_two_deadlines(world):
    run, start = world
    first, trainer = start("rollout", "killed"), start("trainer", "killed")
    assert first.wait(timeout=150) != 0
    while "failed" not in (sent := ranks.said(run, "trainer")):
        assert trainer.poll() is None, sent
        time.sleep(0.1)
    # the other receiver, while it lives, may be the first to say so
    assert re.search(r"v1 failed after \d+ s: .*arrived within weights.ack_timeout_s; again: not all weights arrived within weights.ack_timeout_s", sent), sent


def test_a_byte_that_changed_on_the_way_is_noticed_and_the_transfer_repeated(world):
    run, start = world
    rollout = start("rollout", "flipped")
    sent, got = finish(run, start("trainer"), rollout)
    assert len(re.findall(r"rank \d v[12] filled", sent)) == 4 and len(re.findall(r"rank \d has v[12]", got)) == 4, sent + got
    chunks = {rank: int(n) for rank, n in re.findall(r"rank (\d) has v1 after (\d+) chunks", got)}
    assert chunks["0"] == chunks["1"]  # twice as many as a version has
