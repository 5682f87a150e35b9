"""Shared GPUs: nobody takes memory that another has, wherever processes are killed, and the turns go on."""

import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config import load_config
from miles.core import StaleEpochError
from miles.rundir import RunDir
from miles.weights.acks import Ack, read_ack, write_ack
from miles.weights.store import WeightStore
from miles.weights.turns import (
    EngineTurns,
    all_released,
    engine_may_hold,
    trainer_may_hold,
)


def make_run(root, placement="shared"):
    changes = ("cluster.placement=disjoint",) if placement == "disjoint" else ()
    return RunDir.create(load_config("configs/tiny_colocated.toml", (f"run.root={root}", *changes)))


def publish(run, version):
    (run.weights_dir / f"v{version:06d}").mkdir()


def test_an_engine_has_memory_for_versions_newer_than_what_its_rank_released():
    assert not engine_may_hold(None, -1)
    assert engine_may_hold(1, -1) and engine_may_hold(5, 4)
    assert not engine_may_hold(4, 4)


def test_the_trainer_has_memory_when_every_rank_released_the_newest_version():
    assert trainer_may_hold(None, {}, 2)
    assert trainer_may_hold(3, {0: 3, 1: 3}, 2)
    assert not trainer_may_hold(3, {0: 3, 1: 2}, 2)
    assert not trainer_may_hold(3, {0: 3}, 2)  # rank 1 never said anything: it may be starting an engine


def test_with_disjoint_gpus_it_is_always_the_engines_turn(tmp_path):
    turns = EngineTurns(make_run(tmp_path, "disjoint"), 0, 0)
    assert turns.may_take() and not turns.ended(0)
    turns.over(5)
    assert not turns.ended(5)


def test_a_rank_waits_for_the_leader_and_for_a_version(tmp_path):
    run = make_run(tmp_path)
    turns = EngineTurns(run, 0, run.new_epoch("rollout"))
    turns.over(-1)
    assert not turns.may_take()  # nothing is published
    publish(run, 1)
    assert turns.may_take()
    assert not EngineTurns(run, 0, 1).may_take()  # has not heard from the leader


def test_a_rank_that_starts_in_the_trainers_turn_takes_no_memory(tmp_path):
    run = make_run(tmp_path)
    publish(run, 4)
    write_ack(run, Ack(0, run.new_epoch("rollout"), 0, 4, "d", released=4))
    again = EngineTurns(run, 0, run.new_epoch("rollout"))  # the whole step was started again meanwhile
    again.over(-1)
    assert not again.may_take()
    publish(run, 5)
    assert again.may_take()


def test_a_complete_batch_is_acknowledged_without_an_engine(tmp_path):
    run = make_run(tmp_path)
    ranks = [EngineTurns(run, r, run.new_epoch("rollout") if r == 0 else 1) for r in (0, 1)]
    publish(run, 2)
    assert not all_released(run, WeightStore(run))
    for turns in ranks:
        turns.over(2)
        assert not turns.may_take()
    assert all_released(run, WeightStore(run)) and read_ack(run, 0) == Ack(0, 1, 0, -1, "", released=2)


def test_what_was_released_stays_in_every_later_acknowledgement(tmp_path):
    run = make_run(tmp_path)
    turns = EngineTurns(run, 1, run.new_epoch("rollout"))
    turns.acknowledge(Ack(1, 1, 0, 3, "d"), released=3)
    turns.acknowledge(Ack(1, 1, 1, 4, "e"))
    assert read_ack(run, 1) == Ack(1, 1, 1, 4, "e", released=3)
    run.new_epoch("rollout")
    with pytest.raises(StaleEpochError):
        turns.acknowledge(Ack(1, 1, 1, 4, "e"), released=4)


class World:
    """Both sides line by line, as miles.trainer.loop and miles.rollout.worker have the lines; memory is a flag each, files are real."""

    def __init__(self, root):
        self.run = make_run(root)
        self.store = WeightStore(self.run)
        self.ranks = self.run.config.cluster.rollout.ranks
        self.trainer, self.trainer_holds, self.trained = self.trainer_lines(), False, 0
        self.over = -1  # what the leader says
        self.start_rollout()

    def trainer_lines(self):
        while not all_released(self.run, self.store):
            yield
        while True:
            self.trainer_holds = True
            yield
            self.trained += 1
            yield
            self.trainer_holds = False
            yield
            publish(self.run, (self.store.newest() or 0) + 1)
            yield
            while not all_released(self.run, self.store):
                yield

    def rank_lines(self, rank):
        turns = self.turns[rank]
        while True:
            while not turns.may_take():
                yield
            self.holds[rank] = True
            yield
            version = self.store.newest()
            yield
            while not turns.ended(version):
                yield
            self.holds[rank] = False
            yield
            turns.acknowledge(Ack(rank, turns._epoch, 0, version, ""), released=version)
            yield

    def start_rollout(self):
        epoch = self.run.new_epoch("rollout")
        self.turns = [EngineTurns(self.run, r, epoch) for r in range(self.ranks)]
        self.holds = [False] * self.ranks
        self.rollout = [self.rank_lines(r) for r in range(self.ranks)]

    def do(self, event):
        match event:
            case "trainer":
                next(self.trainer)
            case "kill trainer":
                self.trainer, self.trainer_holds = self.trainer_lines(), False
            case "kill rollout":
                self.start_rollout()
            case "batch complete":
                self.over = self.store.newest() or -1
            case ("tell", rank):
                self.turns[rank].over(self.over)
            case ("kill engine", rank):
                self.holds[rank], self.rollout[rank] = False, self.rank_lines(rank)
            case ("rank", rank):
                next(self.rollout[rank])
        assert not (self.trainer_holds and any(self.holds)), f"both have memory after {event}"


EVENTS = st.sampled_from(["trainer", "trainer", "kill trainer", "kill rollout", "batch complete",
                          *(("tell", r) for r in (0, 1)), *(("rank", r) for r in (0, 1) for _ in range(3)), *(("kill engine", r) for r in (0, 1))])


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=60))
def test_memory_is_never_held_by_both_and_the_run_goes_on_wherever_processes_are_killed(events):
    with tempfile.TemporaryDirectory() as root:
        world = World(root)
        for event in events:
            world.do(event)
        before = world.trained
        for _ in range(80):
            for event in ("trainer", ("tell", 0), ("tell", 1), ("rank", 0), ("rank", 1), "batch complete"):
                world.do(event)
        assert world.trained >= before + 2
