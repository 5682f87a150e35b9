"""The trainer's side of shared GPUs over a real run directory; its world here is one rank, its memory a list of what was asked of it."""

import threading
import time
from types import SimpleNamespace

import pytest

from miles.config import load_config
from miles.rundir import RunDir
from miles.trainer import turns as module
from miles.trainer.turns import LOOKS, Turns
from miles.weights.acks import Ack, write_ack


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(module.dist, "barrier", lambda: None)

    def make(file="configs/tiny_colocated.toml"):
        run = RunDir.create(load_config(file, (f"run.root={tmp_path}",)))
        turns = Turns(run, SimpleNamespace(leader=True, broadcast_bytes=lambda data: data))
        asked = []
        turns.memory = SimpleNamespace(take=lambda: asked.append("take"), release=lambda: asked.append("release"))
        return run, turns, asked

    return make


def publish(run, version):
    (run.weights_dir / f"v{version:06d}").mkdir()


def released(run, version, ranks=(0, 1)):
    for rank in ranks:
        write_ack(run, Ack(rank, 1, 0, version, "", released=version))


def test_memory_is_given_once_and_taken_once_a_turn(made):
    run, turns, asked = made()
    turns.take()  # the first start: nothing is published, and the memory is there already
    turns.give(), turns.give()
    publish(run, 1), released(run, 1)
    turns.take(), turns.take()
    assert asked == ["release", "take"]


def test_the_trainer_waits_until_the_last_engine_has_released(made):
    run, turns, asked = made()
    turns.give()
    publish(run, 1), released(run, 1, ranks=(0,))
    late = threading.Timer(0.4, released, (run, 1, (1,)))
    late.start()
    start = time.monotonic()
    waited, _ = turns.take()
    late.join()
    assert 0.3 < waited <= time.monotonic() - start and asked == ["release", "take"]


def test_engines_get_another_turn_only_after_a_look_at_the_journal_has_found_too_little(made):
    run, turns, _ = made()
    publish(run, 1)
    assert [turns.given_back() for _ in range(4)] == [False] * 4  # their turn has not ended
    released(run, 1)
    assert [turns.given_back() for _ in range(LOOKS)] == [False, False, True]
    publish(run, 2)
    assert not turns.given_back()


def test_with_gpus_of_its_own_nothing_is_waited_for_and_nothing_moves(made):
    run, turns, asked = made("configs/tiny_async.toml")
    publish(run, 1)
    waited, resumed = turns.take()
    assert turns.give() + waited + resumed < 0.1 and asked == [] and not turns.given_back()
