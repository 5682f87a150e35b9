"""A sample that is refused leaves a file from which the refusal can be made again."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from miles.core import StructureError, Turn
from miles.rollout.worker import KEEP_DROPPED, Worker
from miles.session import Checkpoint, History, assemble_leaves, read_history


def checkpoint(question, inputs):
    turn = Turn(np.array(inputs, np.int32), np.array([9], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    return Checkpoint(({"role": "user", "content": question},), {"role": "assistant", "content": "é"}, turn)


def keep(tmp_path, history, error, count):
    """The first file that a rank without its engine writes when this history is refused `count` times."""
    worker = Worker.__new__(Worker)
    worker._dropped, worker._kept_dropped = tmp_path / "dropped", 0
    for i in range(count):
        worker._keep_dropped(SimpleNamespace(history=history, routing_key=f"g{i}"), SimpleNamespace(name="task"), error)
    return tmp_path / "dropped" / f"g0.{error.cause.replace(':', '-')}.json"


def test_the_first_refusals_of_a_rank_are_kept_and_can_be_made_again(tmp_path):
    history = History().add(checkpoint("a", [1, 2])).add(checkpoint("b", [1, 3, 9, 4]))
    with pytest.raises(StructureError) as refused:
        assemble_leaves(history)
    path = keep(tmp_path, history, refused.value, KEEP_DROPPED + 5)
    assert len(list(path.parent.iterdir())) == KEEP_DROPPED
    with pytest.raises(StructureError) as again:
        assemble_leaves(read_history(path))
    assert str(again.value) == str(refused.value)


def test_the_refusal_of_one_branch_is_made_again_from_the_tree(tmp_path):
    """Turn 0 is continued by 1 and by 2; the same question as that of 1 is asked again by 3; only 2 does not hold the tokens it goes on from."""
    first = History(branching=True).add(checkpoint("q", [1, 2]))
    history = first.add(checkpoint("left", [1, 2, 9, 4]))
    for question, inputs in (("right", [1, 2, 8, 5]), ("left", [1, 2, 9, 4])):
        history = replace(history, head=0).add(checkpoint(question, inputs))
    with pytest.raises(StructureError) as refused:
        assemble_leaves(history)
    again = read_history(keep(tmp_path, history, refused.value, 1))
    assert [n.parent for n in again.nodes] == [-1, 0, 0, 0] and (again.head, again.branching) == (3, True)
    assert again.leaves() == history.leaves() == (2, 3) and again.messages == history.messages
    assert [n.turn.input_ids.tolist() for n in again.nodes] == [n.turn.input_ids.tolist() for n in history.nodes]
    with pytest.raises(StructureError) as refused_again:
        assemble_leaves(again)
    assert str(refused_again.value) == str(refused.value)
