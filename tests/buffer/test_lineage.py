"""The buffer with both its ends under kill -9 at any file operation: on the lineage of the final weights every step trains a group of its own, whole.

The machine drives the real writer and queue as leader and trainer do. A kill lets some file operations of a turn through, the last of them perhaps in
part, and none after it, not even those of clean-up; then the process is started again with the next epoch.
"""

import contextlib
import os
import shutil
import tempfile
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_buffer import trajectory

from miles.buffer import BufferView, BufferWriter, GroupReader, Status, TrainerQueue, retention, storage, write_part
from miles.buffer.segments import segments
from miles.buffer.storage import groups_dir, parts_dir
from miles.config import load_config
from miles.core import EnvironmentFault, StaleEpochError
from miles.report.read import read_lineage
from miles.rundir import RunDir
from tests.buffer.parts import group_of, state_of

CALLS = ("open", "writev", "fsync", "rename", "unlink", "mkdir")
SAMPLES = 2


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(number):
    """The `number`-th of the calls, and all after it, do not happen; a write arrives by half. None: nobody is killed."""
    real, count = {name: getattr(os, name) for name in CALLS}, iter(range(10**6))

    def dying(name):
        def call(*args, **kw):
            n = next(count)
            if n == number and name == "writev":
                data = b"".join(args[1])
                real["writev"](args[0], [data[: len(data) // 2]])
            if n >= number:
                raise Killed
            return real[name](*args, **kw)

        return call

    if number is not None:
        for name in CALLS:
            setattr(os, name, dying(name))
    try:
        yield
    finally:
        for name, call in real.items():
            setattr(os, name, call)


class Runs(RuleBasedStateMachine):
    deaths = st.none() | st.integers(0, 40)

    @initialize(keep=st.sampled_from([0.0, 1.0]), segment=st.sampled_from([1, 2000]))
    def begin(self, keep, segment):
        self.folder = tempfile.mkdtemp()
        self.limits = storage.PARTS_BYTES, storage.SEALED_BYTES
        storage.PARTS_BYTES = storage.SEALED_BYTES = segment
        self.run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={self.folder}", "buffer.max_staleness=100", f"buffer.keep_trained_gb={keep}")))
        self.saved = self.step = 0
        self.sampled = {}  # (group, sample) -> rewards that it had, each time that it was played
        self.writer = self.queue = None
        self.opened = set()
        self.start_leader()
        self.start_trainer(None)

    # -- the leader ----------------------------------------------------------------------------------------------------------
    def start_leader(self):
        if self.writer is not None:
            self.opened.add(self.writer)
            self.zombie_writer = self.writer
        self.epoch = self.run.new_epoch("rollout")
        self.view = BufferView(self.run)
        self.view.poll()
        self.writer = BufferWriter(self.run, self.epoch)
        self.parts = self.writer.finished_parts([g.group_id for g in self.view.state.with_status(Status.OPEN)])

    @rule(death=deaths, turns=st.integers(1, 8))
    def make(self, death, turns):
        """Each turn: the next sample of the open group, its seal, or a new group."""
        try:
            with killed_at(death):
                for _ in range(turns):
                    self.turn()
        except Killed:
            self.start_leader()

    def turn(self):
        self.view.poll()
        open_groups = self.view.state.with_status(Status.OPEN)
        if not open_groups:
            self.writer.start(self.view.state.next_group_id(), "t")
            return
        group = open_groups[0].group_id
        there = self.parts.setdefault(group, [])
        missing = [s for s in range(SAMPLES) if s not in there]
        if not missing:
            self.writer.seal(group, there)
            return
        rewards = self.sampled.setdefault((group, missing[0]), [])
        rewards.append(len(rewards) + 1.0)
        written = write_part(self.run, self.epoch, [trajectory(group, missing[0], reward=rewards[-1])])
        if missing[0]:  # of the other it is not known where it is: its rank died
            self.writer.told(group, missing[0], *written)
        there.append(missing[0])

    # -- the trainer ---------------------------------------------------------------------------------------------------------
    def start_trainer(self, death):
        if self.queue is not None:
            self.opened.add(self.queue)
            self.zombie_queue = self.queue
            self.reader.close()
        self.step = self.saved
        self.reader = GroupReader(self.run.buffer_dir)
        try:
            with killed_at(death):
                self.queue = TrainerQueue(self.run, self.run.new_epoch("trainer"), self.saved)
        except Killed:
            self.start_trainer(None)

    @rule(death=deaths, save=st.booleans(), again=deaths)
    def train(self, death, save, again):
        try:
            with killed_at(death):
                self.train_step(save)
        except Killed:
            self.start_trainer(again)

    def train_step(self, save):
        self.queue.poll()
        taken = self.queue.take(1, version=self.step, step=self.step + 1)
        if taken is None:
            return
        group = taken.groups[0].group_id
        found = self.reader.group(taken.groups[0].sealed).trajectories  # whole, whatever died while it was made
        assert [t.sample for t in found] == list(range(SAMPLES))
        assert all(t.reward in self.sampled[group, t.sample] for t in found)
        self.queue.trained([group], self.step, self.step + 1)
        self.step += 1
        if save:
            self.saved = self.step
            self.queue.retire(self.saved)

    # -- processes of older epochs wake up -----------------------------------------------------------------------------------
    @rule()
    def zombies_cannot_write(self):
        for call in (lambda: self.zombie_writer.start(99, "t"), lambda: self.zombie_queue.trained([0], 1, 1), lambda: self.zombie_queue.retire(99)):
            with contextlib.suppress(AttributeError), pytest.raises(StaleEpochError):
                call()

    @rule()
    def a_zombie_past_its_check_seals_what_is_sealed(self):
        """It changes nothing."""
        before, zombie = state_of(self.run), getattr(self, "zombie_writer", None)
        sealed = [g for g in zombie._parts.groups if before.groups[g].sealed is not None] if zombie else []
        for group in sealed:
            checked = zombie._check
            zombie._check = zombie._sealed._fence = lambda: None
            with contextlib.suppress(EnvironmentFault):  # its journal takes no more: it was killed while it wrote
                zombie.seal(group, sorted(zombie._parts.groups[group]))
            zombie._check = zombie._sealed._fence = checked
        after = state_of(self.run)
        assert {g: replace(i, ready_order=0) for g, i in after.groups.items()} == {g: replace(i, ready_order=0) for g, i in before.groups.items()}
        assert [g.group_id for g in after.ready_in_order()] == [g.group_id for g in before.ready_in_order()]

    # -- what always holds ---------------------------------------------------------------------------------------------------
    @invariant()
    def the_lineage_trains_every_group_once(self):
        lineage = read_lineage(self.run)
        assert lineage.trained_twice == []
        assert sorted(lineage.steps) in (list(range(1, self.step + 1)), list(range(1, self.step + 2)))  # one more: its trainer died with the record written
        view = BufferView(self.run)
        view.poll()
        assert {g.group_id for g in view.state.with_status(Status.TRAINED)} == set(lineage.trained_groups)
        assert view.state.dropped_by_reason() == {}

    @invariant()
    def what_waits_is_there(self):
        view = BufferView(self.run)
        view.poll()
        for g in view.state.with_status(Status.READY) + view.state.with_status(Status.TAKEN):
            assert len(group_of(self.run, g.group_id).trajectories) == SAMPLES

    def nothing_stays_that_nobody_needs(self):
        self.queue.retire(self.saved)
        for folder, groups_in in ((parts_dir(self.run.buffer_dir), retention._groups_of_parts), (groups_dir(self.run.buffer_dir), retention._groups_sealed)):
            names = segments(folder)
            for name in names:
                newest = name.source.epoch == self.epoch and name.number == max(n.number for n in names if n.writer == name.writer and n.source == name.source)
                assert newest or any(self.queue.state.groups[g].status is not Status.TRAINED for g in groups_in(folder, name)), name

    def teardown(self):
        if not hasattr(self, "run"):
            return
        try:
            self.start_leader()
            self.start_trainer(None)
            goal = self.step + 2
            for _ in range(40):  # nothing is stuck: without further deaths the run goes on
                self.turn()
                self.train_step(save=True)
            assert self.step >= goal
            self.the_lineage_trains_every_group_once()
            if self.run.config.buffer.keep_trained_gb == 0:
                self.nothing_stays_that_nobody_needs()
        finally:
            storage.PARTS_BYTES, storage.SEALED_BYTES = self.limits
            if storage._writer is not None:
                storage._writer[1].close()
            for end in self.opened | {self.writer, self.queue, self.reader}:
                end.close()
            shutil.rmtree(self.folder)


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
