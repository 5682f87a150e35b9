"""Turns to one training sequence: every token accounted for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core import StructureError, Turn
from miles.session import (
    Checkpoint,
    History,
    assemble,
    assemble_leaves,
    is_exact,
    read_history,
    reproducer,
    to_trajectories,
)
from tests.session.conftest import user


def turn(inputs, outputs, *, version=1, start=0, finish="stop", versions=None, routes=True):
    p, n = len(inputs), len(outputs)
    every = np.array([*inputs, *outputs])[: p + n - 1]
    return Turn(
        input_ids=np.array(inputs, dtype=np.int32), output_ids=np.array(outputs, dtype=np.int32),
        logprobs=np.array([-t / 100 for t in outputs], dtype=np.float32), versions=np.array(versions or [version] * n, dtype=np.int32),
        finish_reason=finish, cached_tokens=0, routes=(every[start:, None, None] % 8).astype(np.uint8) if routes else None, routes_start=start,
    )


def linear(turns):
    """A linear history of these turns."""
    history = History()
    for k, t in enumerate(turns):
        history = history.add(Checkpoint((user(f"q{k}"),), {"role": "assistant", "content": "é"}, t))
    return history


def test_two_turns_by_hand():
    turns = [turn([1, 2, 3], [10, 11]), turn([1, 2, 3, 10, 11, 4], [12, 11], version=2, start=4)]
    a = assemble(turns)
    assert a.tokens.tolist() == [1, 2, 3, 10, 11, 4, 12, 11]
    assert a.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert a.versions.tolist() == [-1, -1, -1, 1, 1, -1, 2, 2]
    assert a.logprobs.tolist() == np.array([0, 0, 0, -0.10, -0.11, 0, -0.12, -0.11], dtype=np.float32).tolist()
    # row t = experts that processed token t: the stop token 11 at position 4 was processed by the second turn; the last token by none
    assert a.routes[:, 0, 0].tolist() == [1, 2, 3, 2, 3, 4, 4] and a.routes.dtype == np.uint8


@pytest.mark.parametrize(("turns", "cause"), [
    ([], "assembly:empty"),
    ([turn([1, 2], [3]), turn([1, 2, 4, 5], [6], start=2)], "assembly:prefix"),  # another token where 3 was sampled
    ([turn([1, 2], [3]), turn([1, 2, 3], [6], start=2)], "assembly:prefix"),  # nothing appended
    ([turn([1, 2], [3]), turn([1, 2], [6])], "assembly:prefix"),
    ([turn([1, 2], [])], "assembly:length"),
    ([turn([1, 2], [3, 4], versions=[1])], "assembly:length"),
    ([turn([1, 2], [3]), turn([1, 2, 3, 5], [6], start=1)], "assembly:routes"),
    ([turn([1, 2], [3]), turn([1, 2, 3, 5], [6], start=3)], "assembly:routes"),
    ([turn([1, 2], [3]), turn([1, 2, 3, 5], [6], routes=False)], "assembly:routes"),
])
def test_a_structural_mismatch_is_refused_with_its_cause(turns, cause):
    with pytest.raises(StructureError) as e:
        assemble(turns)
    assert e.value.cause == cause


ids = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@st.composite
def histories(draw):
    turns, before = [], []
    for k in range(draw(st.integers(1, 6))):
        inputs, outputs = before + draw(ids), draw(ids)
        turns.append(turn(inputs, outputs, start=max(len(before) - 1, 0), version=k))
        before = inputs + outputs
    return turns


@settings(deadline=None)
@given(histories())
def test_assembled_tokens_are_the_engines_tokens_exactly(turns):
    a = assemble(turns)
    assert a.tokens.tolist() == [*turns[-1].input_ids, *turns[-1].output_ids]
    assert a.tokens[a.loss_mask == 1].tolist() == [t for x in turns for t in x.output_ids]
    assert a.logprobs[a.loss_mask == 1].tolist() == [p for x in turns for p in x.logprobs]
    assert a.routes[:, 0, 0].tolist() == [t % 8 for t in a.tokens[:-1]]
    assert len(a.loss_mask) == len(a.logprobs) == len(a.versions) == len(a.tokens) == len(a.routes) + 1


@settings(deadline=None)
@given(histories(), st.data())
def test_any_changed_earlier_token_is_found(turns, data):
    if len(turns) < 2:
        return
    k = data.draw(st.integers(1, len(turns) - 1))
    at = data.draw(st.integers(0, len(turns[k - 1].input_ids) + len(turns[k - 1].output_ids) - 1))
    turns[k].input_ids[at] += 1
    with pytest.raises(StructureError) as e:
        assemble(turns)
    assert e.value.cause == "assembly:prefix"


@settings(deadline=None)
@given(histories(), st.data())
def test_a_refused_session_can_be_made_again_from_its_file(tmp_path_factory, turns, data):
    k = data.draw(st.integers(0, len(turns) - 1))
    turns[k].input_ids[data.draw(st.integers(0, len(turns[k].input_ids) - 1))] += data.draw(st.integers(0, 1))
    turns[k] = replace(turns[k], versions=turns[k].versions[data.draw(st.integers(0, 1)):])
    path = tmp_path_factory.mktemp("dropped") / "x.json"
    history = linear(turns)
    path.write_bytes(reproducer(history, StructureError("found", cause="assembly:prefix"), task="t"))
    again = read_history(path)
    assert again.messages == history.messages
    for a, b in zip(turns, again.turns, strict=True):
        for name in ("input_ids", "output_ids", "logprobs", "versions"):
            assert getattr(a, name).tolist() == getattr(b, name).tolist() and getattr(a, name).dtype == getattr(b, name).dtype
        assert (a.finish_reason, a.routes.shape, a.routes_start) == (b.finish_reason, b.routes.shape, b.routes_start)
    assert _refusal(history) == _refusal(again)


def test_a_file_of_a_dropped_session_is_small():
    before, turns = [], []
    for k in range(50):
        inputs = [*before, *range(100, 120)]
        turns.append(turn(inputs, [7] * 20, start=max(len(before) - 1, 0), version=k))
        before = [*inputs, *[7] * 20]
    data = reproducer(linear(turns), StructureError("found", cause="c"))
    assert len(data) < 60 * len(before)  # bytes per token of the conversation, though its inputs together have 25 times as many tokens
    assert sum(len(t.input_ids) for t in turns) > 20 * len(before)


def _refusal(history):
    try:
        assemble_leaves(history)
    except StructureError as e:
        return str(e)
    return ""


def test_exact_means_one_version_from_the_opening_to_the_last_token():
    assert is_exact([turn([1], [2, 3], version=4), turn([1, 2, 3, 5], [6], version=4)], 4)
    assert not is_exact([turn([1], [2, 3], versions=[4, 5])], 4), "an update between two tokens"
    assert not is_exact([turn([1], [2, 3], version=4), turn([1, 2, 3, 5], [6], version=5)], 4), "an update between two turns"
    assert not is_exact([turn([1], [2, 3], version=5)], 4), "opened before the update: its cache namespace holds older prefixes"


def test_a_trajectory_carries_the_sums():
    one = Checkpoint((user("q"),), {"role": "assistant", "content": "a"}, turn([1, 2, 3], [10, 11]), cacheable_tokens=4, reused_tokens=3)
    (t,) = to_trajectories(History().add(one), group_id=3, sample=1, task_id="t", reward=0.5, finish_reason="done", opened_at=1, seconds=2.0, meta={"a": 1})
    assert (t.leaf, t.turns, t.prompt_tokens, t.cacheable_tokens, t.exact, t.meta) == (0, 1, 3, 4, True, {"a": 1, "reused_tokens": 3})


@pytest.mark.parametrize("branching", [False, True])
def test_a_session_without_a_turn_has_nothing_to_train(branching):
    with pytest.raises(StructureError) as e:
        assemble_leaves(History(branching=branching))
    assert e.value.cause == "assembly:empty"
