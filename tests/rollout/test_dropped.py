"""A trajectory that is refused leaves a file from which the refusal can be made again."""

from types import SimpleNamespace

import numpy as np
import pytest

from miles.core import StructureError, Turn
from miles.rollout.worker import KEEP_DROPPED, Worker
from miles.session import assemble, read_turns


def test_the_first_refusals_of_a_rank_are_kept_and_can_be_made_again(tmp_path):
    def turn(inputs):
        return Turn(np.array(inputs, np.int32), np.array([9], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    turns = (turn([1, 2]), turn([1, 3, 9, 4]))
    with pytest.raises(StructureError) as refused:
        assemble(turns)
    worker = Worker.__new__(Worker)  # without its engine
    worker._dropped, worker._kept_dropped = tmp_path / "dropped", 0
    for i in range(KEEP_DROPPED + 5):
        session = SimpleNamespace(turns=turns, routing_key=f"g{i}", history=SimpleNamespace(messages=[{"role": "user", "content": "é"}]))
        worker._keep_dropped(session, SimpleNamespace(name="task"), refused.value)
    assert len(list((tmp_path / "dropped").iterdir())) == KEEP_DROPPED
    with pytest.raises(StructureError) as again:
        assemble(read_turns(tmp_path / "dropped" / "g0.assembly-prefix.json"))
    assert str(again.value) == str(refused.value)
