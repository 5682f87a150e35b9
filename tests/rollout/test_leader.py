"""The rollout leader over a real run directory: its workers here are a function, and its world hands it their messages."""

import asyncio
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from miles.buffer import Status, TrainerQueue, write_part
from miles.config import load_config
from miles.core import NO_VERSION, Trajectory
from miles.log import RunLog
from miles.rollout import leader as leader_module
from miles.rollout.leader import Leader, rules_from_config
from miles.rundir import RunDir

NEWEST = 5


def trajectory(group, sample, reward):
    mask = np.array([0, 1], np.uint8)
    return Trajectory(group_id=group, sample=sample, task_id="t", tokens=np.arange(2, dtype=np.int32), loss_mask=mask, logprobs=np.zeros(2, np.float32),
                      versions=np.where(mask, 2, NO_VERSION).astype(np.int32), routes=None, reward=reward, finish_reason="done", turns=1, exact=True)


class Rollout:
    """A leader whose samples end at once: those of odd groups with equal rewards."""

    def __init__(self, run, size=1):
        self.run, self.epoch, self.posted = run, run.new_epoch("rollout"), []
        world = SimpleNamespace(size=size, leader=True, post_all=lambda message: None, post=lambda rank, message: self.posted.append(message))
        self.log = RunLog(run.log_path(1, "rollout", 0, self.epoch), role="rollout", rank=0, attempt=1, epoch=self.epoch)
        self.leader = Leader(run, self.epoch, world, self.log, {"a": 60.0, "b": 30.0}, lambda: NEWEST)
        self.leader.receive(0, {"kind": "held", "samples": []})
        self.leader.receive(0, {"kind": "up", "version": NEWEST, "moved": [], "url": "http://engine"})

    def play(self, turns, lose=()):
        for _ in range(turns):
            asyncio.run(self.leader.tick())
            todo, self.posted[:] = list(self.posted), []
            for m in todo:
                group, sample = m["group"], m["sample"]
                if (group, sample) not in lose:
                    write_part(self.run, self.epoch, [trajectory(group, sample, 1.0 if group % 2 else float(sample % 2))])
                    self.leader.receive(0, {"kind": "finished", "group": group, "sample": sample, "cause": None})
        return self.leader._view.state

    def stop(self):
        self.leader.close()
        self.log.close()


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", "buffer.filter=equal_rewards", "buffer.on_filtered=retry",
                                                                 "buffer.capacity_groups=4", "trainer.groups_per_step=2")))
    made.new_attempt()
    return made


def test_filtered_groups_make_room_at_once_and_their_prompts_are_sampled_once_more(run):
    rollout = Rollout(run)
    state = rollout.play(20)
    rollout.stop()
    assert len(state.with_status(Status.READY)) == 4 and all(g.group_id % 2 == 0 for g in state.with_status(Status.READY))
    assert set(state.dropped_by_reason()) == {"filter:equal_rewards"}
    again = [g for g in state.groups.values() if g.retry_of is not None]
    assert again and all(state.groups[g.retry_of].dropped and state.groups[g.retry_of].task_id == g.task_id for g in again)
    assert len({g.retry_of for g in again}) == len(again)


def test_the_log_has_the_staleness_of_what_waits(run):
    rollout = Rollout(run)
    rollout.play(20)
    rollout.leader._log_queue()
    rollout.stop()
    with h5py.File(run.log_path(1, "rollout", 0, 1), "r") as f:
        rows = f["tables/queue"][...]
    assert np.isnan(rows["waiting_age_max"][0])  # nothing waited yet
    assert (rows["ready_groups"][-1], rows["waiting_age_mean"][-1], rows["waiting_age_max"][-1]) == (4, NEWEST - 2, NEWEST - 2)


def test_a_leader_that_finds_groups_waiting_logs_on_when_none_waits_any_more(run):
    """The first row of a table fixes its columns: an age that is a whole number must not make a column of integers."""
    first = Rollout(run)
    first.play(20)
    first.stop()
    second = Rollout(run)
    asyncio.run(second.leader.tick())  # logs a row
    queue = TrainerQueue(run, run.new_epoch("trainer"), 0)
    for group in queue.state.with_status(Status.READY):
        queue.drop(group.group_id, "digest")
    second.leader._view.poll()
    second.leader._log_queue()
    second.stop()
    with h5py.File(run.log_path(1, "rollout", 0, 2), "r") as f:
        ages = f["tables/queue"][...]["waiting_age_max"]
    assert ages[0] == NEWEST - 2 and np.isnan(ages[-1])


def test_a_new_leader_plays_only_the_samples_that_are_not_on_disk(run):
    first = Rollout(run)
    first.play(3, lose={(0, 3)})
    first.stop()  # killed while sample 3 of group 0 was running
    second = Rollout(run)
    asyncio.run(second.leader.tick())
    assert [m["sample"] for m in second.posted if m["group"] == 0] == [3]
    state = second.play(3)
    second.stop()
    assert state.groups[0].status is Status.READY and state.groups[0].samples == run.config.rollout.group_size


def test_on_shared_gpus_every_rank_hears_that_the_batch_is_complete(tmp_path):
    run = RunDir.create(load_config("configs/tiny_colocated.toml", (f"run.root={tmp_path}",)))
    run.new_attempt()
    rollout, told = Rollout(run), []
    rollout.leader._world.post_all = lambda message: told.append(message["over"])
    rollout.play(6)
    assert told[0] == -1 and told[-1] == NEWEST
    assert rollout.leader._view.state.counts()["ready"] == run.config.trainer.groups_per_step
    rollout.stop()


def test_a_notice_ends_the_turn_of_the_engines_on_shared_gpus_alone(tmp_path, run):
    for made, over in ((RunDir.create(load_config("configs/tiny_colocated.toml", (f"run.root={tmp_path}/c",))), NEWEST), (run, -1)):
        made.new_attempt()
        rollout, told = Rollout(made), []
        rollout.leader._world.post_all = lambda message, told=told: told.append(message["over"])
        asyncio.run(rollout.leader.tick())
        rollout.leader.end_turn()
        asyncio.run(rollout.leader.tick())
        assert told[-1] == over
        rollout.stop()


def test_a_sample_may_take_its_turns_a_command_the_longest_tests_and_some_slack(run):
    c = run.config
    rules = rules_from_config(c, tests_s=90.0)
    assert (rules.sample_s, rules.silent_s) == (c.rollout.deadline_s + c.tasks.command_timeout_s + 90.0 + 300.0, 60.0)


def test_a_sample_that_is_not_answered_in_time_is_logged_and_started_again_but_not_for_time_in_which_the_leader_was_stopped(run, monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(leader_module.time, "monotonic", lambda: now.s)
    rollout = Rollout(run)
    asyncio.run(rollout.leader.tick())
    first = rollout.posted.pop(0)
    limit = int(rollout.leader._scheduler.rules.sample_s)
    now.s += 10.0 * limit
    asyncio.run(rollout.leader.tick())  # one look: it counts as one second at most
    assert all(m["sample"] != first["sample"] or m["group"] != first["group"] for m in rollout.posted)
    for _ in range(limit):
        now.s += 1.0
        rollout.leader.receive(0, {"kind": "up", "version": NEWEST, "moved": [], "url": "http://engine"})
        asyncio.run(rollout.leader.tick())
        for m in (m for m in rollout.posted if m["group"] != first["group"]):  # other groups go on
            rollout.leader.receive(0, {"kind": "finished", "group": m["group"], "sample": m["sample"], "cause": "x"})
        rollout.posted[:] = [m for m in rollout.posted if m["group"] == first["group"]]
    rollout.leader.receive(0, {"kind": "up", "version": NEWEST, "moved": [], "url": "http://engine"})
    asyncio.run(rollout.leader.tick())
    assert [m for m in rollout.posted if m["sample"] == first["sample"] and m["group"] == first["group"]] == [first]
    rollout.stop()
    with h5py.File(run.log_path(1, "rollout", 0, 1), "r") as f:
        rows = f["tables/trajectories"][...]
    assert (b"retried:overdue", first["group"], first["sample"], 0) in set(zip(rows["status"], rows["group_id"], rows["sample"], rows["rank"]))


def test_a_new_leader_waits_for_every_rank_to_say_what_it_holds(run):
    first = Rollout(run)
    first.play(3, lose={(0, 3)})
    first.stop()
    second = Rollout(run, size=2)
    asyncio.run(second.leader.tick())
    assert second.posted == []
    second.leader.receive(1, {"kind": "held", "samples": [(0, 3, 2), (0, 0, 1)]})
    asyncio.run(second.leader.tick())
    assert second.posted[0] == {"kind": "release", "samples": [(0, 0)]}
    assert [m["held_by"] for m in second.posted[1:] if (m["group"], m["sample"]) == (0, 3)] == [1]
    second.stop()


def test_a_sample_whose_part_cannot_be_read_is_counted(run):
    rollout = Rollout(run)
    rollout.play(1, lose={(0, 3)})
    rollout.leader.receive(0, {"kind": "finished", "group": 0, "sample": 3, "cause": None, "part": ["e000001.gone.1.0000.seg", 0]})
    state = rollout.play(1)
    rollout.stop()
    assert state.groups[0].samples == run.config.rollout.group_size - 1
    with h5py.File(run.log_path(1, "rollout", 0, 1), "r") as f:
        rows = f["tables/trajectories"][...]
    assert [tuple(r) for r in rows[["group_id", "sample", "rank", "status"]]] == [(0, 3, -1, b"dropped:part")]


def test_an_engine_that_takes_no_new_version_is_counted_and_named_once(run, capsys):
    rollout = Rollout(run)
    for now in range(0, 700, 10):
        rollout.leader._scheduler.expire(float(now))
        for rank, version in ((0, NEWEST), (1, 0)):
            rollout.leader.receive(rank, {"kind": "up", "version": version, "moved": [], "url": "http://engine"})
        rollout.leader._say_behind()
    asyncio.run(rollout.leader.tick())
    rollout.stop()
    said = capsys.readouterr().out
    assert said.count("gets no samples") == 1 and "rank 1 gets no samples: its engine serves v0" in said and "weights.ack_timeout_s" in said
    with h5py.File(run.log_path(1, "rollout", 0, 1), "r") as f:
        assert f["tables/queue"][...]["behind_engines"].tolist() == [1]
