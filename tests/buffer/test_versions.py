"""How far weight versions lie apart, across restarts of the trainer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.buffer import BufferView, BufferWriter, Frontier, Lineage, TrainerQueue, cut, write_part
from miles.config import load_config
from miles.rundir import RunDir
from tests.buffer.test_buffer import trajectory


def test_a_version_published_again_after_a_restart_is_where_its_weights_were():
    tree = Lineage([(5, 3)])  # 1 - 5, then from the weights of 3: 6, 7, ...
    assert [tree.distance(6, v) for v in (1, 2, 3, 6)] == [2, 1, 0, 0]
    assert [tree.distance(6, v) for v in (4, 5)] == [1, 2]  # undone
    assert [tree.distance(8, v) for v in (1, 3, 4, 5, 6, 7, 8)] == [4, 2, 3, 4, 2, 1, 0]
    assert tree.distance(5, 8) == tree.distance(8, 5)
    assert tree.staleness(8, [3, 5]) == 4 and tree.staleness(8, [5, 6]) == 4  # the farthest is neither always the lowest nor the highest
    assert tree.staleness(7, [2, 4, 6]) == 2


def test_starts_that_published_nothing_leave_no_version_and_several_restarts_add_up():
    tree = Lineage([(5, 3), (5, 3), (5, 2), (8, 7), (9, 1)])  # 6 = 2, 7, 8; 9 = 7; 10 = 1
    assert [tree.distance(6, v) for v in (1, 2, 3)] == [1, 0, 1]
    assert (tree.distance(9, 7), tree.distance(9, 8), tree.distance(9, 2), tree.distance(9, 5)) == (0, 1, 1, 4)
    assert (tree.distance(10, 1), tree.distance(10, 9), tree.distance(11, 5)) == (0, 2, 5)


def test_tokens_are_counted_back_along_the_weights_and_given_ones_stay():
    versions = np.array([-1, 3, 5, 6, 7], np.int32)
    assert Lineage([(5, 3)]).counted_back(8, versions).tolist() == [-1, 6, 4, 6, 7]
    assert Lineage().counted_back(8, versions).tolist() == versions.tolist()


@settings(max_examples=200)
@given(data=st.data())
def test_distances_are_those_of_the_tree(data):
    """Against a walk over all edges: version -> (neighbour, distance)."""
    edges, newest, tree = {1: []}, 1, Lineage()
    tree.used(1)

    def join(a, b, d):
        edges.setdefault(a, []).append((b, d))
        edges[b].append((a, d))

    for _ in range(data.draw(st.integers(0, 12))):
        steps = data.draw(st.integers(0, 3))
        if data.draw(st.booleans()):
            start = data.draw(st.integers(1, newest))
            tree.restore(start, newest)
            if steps:
                join(newest + 1, start, 0)
                newest, steps = newest + 1, steps - 1
        elif tree.branches and tree.branches[-1][0] == newest:
            continue  # that start has published nothing: its first version is not a further one
        for _ in range(steps):
            join(newest + 1, newest, 1)
            newest += 1
    at = data.draw(st.integers(1, newest))
    walk, found = [(at, 0)], {at: 0}
    while walk:
        v, d = walk.pop()
        for w, step in edges[v]:
            if w not in found:
                found[w] = d + step
                walk.append((w, d + step))
    assert {v: tree.distance(at, v) for v in edges} == found


@pytest.fixture
def run(tmp_path):
    more = ("trainer.groups_per_step=2", "buffer.max_staleness=2", "buffer.capacity_groups=50", "buffer.on_stale=drop")
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", *more)))


class Trainer:
    """Steps over what is ready. Version 1 is that of the start; each step publishes the next. `restore`: the frontier of its checkpoint."""

    def __init__(self, run, rollout, newest=0, restore: Frontier | None = None):
        self.run, self.rollout, self.step = run, rollout, restore.step if restore else 0
        self.queue = TrainerQueue(run, run.new_epoch("trainer"), self.step, restore, newest)
        self.version = self.queue.newest + 1

    def train(self, *, put=True, behind=0):
        """A step over two groups; those of `put` are sampled now, by weights `behind` versions ago."""
        if put:
            put_group(self.rollout, max(1, self.version - behind))
            put_group(self.rollout, max(1, self.version - behind))
        self.queue.poll()
        taken = self.queue.take(2, self.version, self.step + 1)
        self.step += 1
        self.queue.trained([g.group_id for g in taken.groups], self.version, self.step)
        self.version += 1
        return taken

    def cut(self):
        return cut(self.queue.state, self.step, self.version, 1, 1)


def put_group(rollout, version):
    run, writer, epoch, ids = rollout
    group = next(ids)
    writer.start(group, "t")
    for sample in range(2):
        write_part(run, epoch, [trajectory(group, sample, version)])
    writer.seal(group, [0, 1])


@pytest.fixture
def rollout(run):
    epoch = run.new_epoch("rollout")
    return run, BufferWriter(run, epoch), epoch, iter(range(1000))


def test_after_a_restart_from_an_older_checkpoint_groups_are_as_old_as_their_weights(run, rollout):
    """Checkpoint of step 3 (its weights are version 4), killed after step 10: version 11 is out. Each group was sampled one version before it was trained."""
    first = Trainer(run, rollout)
    for _ in range(3):
        first.train(behind=1)
    kept = first.cut()
    for _ in range(7):
        first.train(behind=1)
    assert (kept.version, first.version) == (4, 11)

    second = Trainer(run, rollout, newest=11, restore=kept)
    assert second.version == 12  # the weights of 4
    state = second.queue.state
    oldest = {g.group_id: g.oldest_version for g in state.ready_in_order()}
    assert [state.staleness(12, g) for g in state.ready_in_order()] == [abs(4 - v) for v in oldest.values()]
    taken = [second.train(put=False) for _ in range(2)]
    assert [[g.oldest_version for g in t.groups] for t in taken] == [[3, 3], [4, 4]]
    assert [sorted({g.oldest_version for g in t.stale}) for t in taken] == [[7, 8, 9], [6]]  # undone, and more than two away from what is trained


def test_groups_of_the_checkpoint_s_weights_are_not_dropped_however_many_versions_were_published_after_it(run, rollout):
    """Steps are undone that are more than max_staleness."""
    first = Trainer(run, rollout)
    first.train()
    first.train()
    kept = first.cut()  # version 3
    for _ in range(2):
        put_group(rollout, 2)
        put_group(rollout, 3)
        first.train(put=False)
    put_group(rollout, 3)
    put_group(rollout, 3)
    second = Trainer(run, rollout, newest=40, restore=kept)  # many more were published
    assert (kept.version, second.version) == (3, 41)
    seen = [second.train(put=False) for _ in range(3)]
    assert [t.stale for t in seen] == [(), (), ()] and second.queue.state.dropped_by_reason() == {}


def test_killed_between_restore_and_its_first_version_the_next_start_counts_as_if_that_had_not_been(run, rollout):
    first = Trainer(run, rollout)
    first.train()
    kept = first.cut()  # version 2
    first.train()
    for _ in range(3):
        again = Trainer(run, rollout, newest=first.version, restore=kept)  # nothing published
    assert (again.version, again.queue.state.lineage.distance(again.version, 2)) == (4, 0)
    anew = Trainer(run, rollout, newest=4)  # the checkpoint is lost: the weights of the first version
    assert (anew.version, anew.queue.state.lineage.distance(5, 1), anew.queue.state.lineage.distance(5, 4)) == (5, 0, 1)
    lost = Trainer(run, rollout, newest=0)  # and all files of versions
    assert lost.version == 5, "no number is used twice"


def test_a_late_record_of_a_fenced_trainer_leaves_the_tree_as_it_is(run, rollout):
    first = Trainer(run, rollout)
    first.train()
    kept = first.cut()
    put_group(rollout, 2)
    view = BufferView(run)
    second = Trainer(run, rollout, newest=2, restore=kept)
    view.poll()
    before = list(view.state.lineage.branches)
    first.queue._journal.append({"kind": "taken", "groups": [2], "step": 2, "version": 2})
    view.poll()
    assert view.state.lineage.branches == before == second.queue.state.lineage.branches == [(2, 2)]
