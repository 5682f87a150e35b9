"""Branching histories: what a request goes on from, which conversations are kept, and that a shared sampled span is trained once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core import StructureError, Turn
from miles.session import Checkpoint, History, assemble, assemble_leaves
from miles.session.history import ROOT
from miles.session.replay import loose, strict
from tests.session.conftest import user


def say(history, request, reply, given, sampled, same=strict, finish="stop"):
    """Answer a request: `given` new tokens, then `sampled` ones. Returns the history and why it branched."""
    kept, appended, cause = history.match(request, same)
    before = kept.last.tokens if kept.last else np.zeros(0, np.int32)
    inputs = np.array([*before, *given], np.int32)
    start = max(len(before) - 1, 0)
    every = np.array([*inputs, *sampled])[:-1]
    turn = Turn(inputs, np.array(sampled, np.int32), np.array([-t / 100 for t in sampled], np.float32), np.full(len(sampled), len(history.nodes), np.int32), finish,
                routes=(every[start:, None, None] % 8).astype(np.uint8), routes_start=start)
    message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
    return kept.add(Checkpoint(appended, message, turn)), cause


def said(text):
    return {"role": "assistant", "content": text}


def test_two_conversations_share_their_first_turn():
    h, _ = say(History(branching=True), [user("q")], "a", [1, 2], [10, 11])
    h, one = say(h, [user("q"), said("a"), user("left")], "b", [3], [12])
    h, two = say(h, [user("q"), said("a"), user("right")], "c", [4, 5], [13, 14])
    assert (one, two) == ("", "content") and [n.parent for n in h.nodes] == [ROOT, 0, 0] and h.leaves() == (1, 2)
    left, right = (leaf.arrays for leaf in assemble_leaves(h))
    assert left.tokens.tolist() == [1, 2, 10, 11, 3, 12] and left.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert right.tokens.tolist() == [1, 2, 10, 11, 4, 5, 13, 14] and right.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert right.versions.tolist() == [-1, -1, -1, -1, -1, -1, 2, 2]
    assert right.logprobs.tolist() == np.array([0, 0, 0, 0, 0, 0, -0.13, -0.14], np.float32).tolist()
    assert right.routes[:, 0, 0].tolist() == [1, 2, 2, 3, 4, 5, 5]  # routes are replayed for given tokens too


def test_a_folded_context_starts_a_sequence_of_its_own():
    h, _ = say(History(branching=True), [user("q")], "a", [1], [10])
    h, cause = say(h, [user("summary of what was"), user("go on")], "b", [2, 3], [11])
    assert cause == "content" and [leaf.arrays.tokens.tolist() for leaf in assemble_leaves(h)] == [[1, 10], [2, 3, 11]]


def test_the_same_question_again_replaces_an_answer_that_was_not_taken():
    h, _ = say(History(branching=True), [user("q")], "a", [1], [10])
    h, cause = say(h, [user("q")], "b", [1], [11])
    assert cause == "rewind" and h.leaves() == (1,)
    h, _ = say(h, [user("q"), said("a"), user("r")], "c", [2], [12])  # the first answer was taken after all
    assert h.leaves() == (1, 2) and h.nodes[2].parent == 0


def test_going_back_any_number_of_turns_branches():
    h = History(branching=True)
    request = []
    for i in range(4):
        request = [*request, user(f"q{i}")]
        h, _ = say(h, request, f"a{i}", [i + 1], [10 + i])
        request = [*request, said(f"a{i}")]
    h, cause = say(h, [*request[:2], user("other")], "z", [9], [20])
    assert cause == "content" and h.nodes[-1].parent == 0 and h.leaves() == (3, 4)


CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]}
AGAIN = {**CALL, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
RESULT = {"role": "tool", "content": "out", "tool_call_id": "c"}


def test_a_changed_reply_branches_as_given_text_or_is_refused_by_the_linear_policy():
    h, _ = say(History(branching=True), [user("q")], CALL, [1], [10])
    for same, cause, parent in ((strict, "arguments", ROOT), (loose, "", 0)):
        kept, appended, why = h.match([user("q"), AGAIN, RESULT], same)
        assert (kept.head, why, appended) == (parent, cause, (user("q"), AGAIN, RESULT) if same is strict else (RESULT,))
    with pytest.raises(StructureError) as e:
        History(h.nodes, h.head).match([user("q"), AGAIN, RESULT])
    assert e.value.cause == "history:arguments"


def test_a_reply_that_was_not_sampled_here_is_given_text():
    h, _ = say(History(branching=True), [user("q")], "a", [1], [10])
    assert h.match([user("q"), said("a"), user("r"), said("example"), user("s")]) == (h, (user("r"), said("example"), user("s")), "")
    kept, appended, cause = h.match([user("q"), said("a"), said("more"), user("s")])  # no template writes two replies in a row behind a sampled one
    assert (kept.head, cause) == (ROOT, "foreign-reply") and len(appended) == 4
    with pytest.raises(StructureError) as e:
        h.match([user("q"), said("a")])
    assert e.value.cause == "history:nothing-appended"


def test_merging_stops_at_a_truncated_turn():
    h, _ = say(History(branching=True), [user("q")], "a", [1], [10])
    h, _ = say(h, [user("q"), said("a"), user("r")], "cu", [2], [11, 12], finish="length")
    h, cause = say(h, [user("q"), said("a"), user("r"), said("cu"), user("go on")], "b", [2, 11, 12, 99, 3], [13])
    assert cause == "truncated" and h.nodes[2].parent == 0 and h.leaves() == (1, 2)
    cut, after = (leaf.arrays for leaf in assemble_leaves(h))
    assert cut.tokens[cut.loss_mask == 1].tolist() == [10, 11, 12] and after.tokens[after.loss_mask == 1].tolist() == [13]


ids = st.lists(st.integers(1, 40), min_size=1, max_size=4)
moves = st.lists(st.tuples(st.integers(0, 20), ids, ids, st.sampled_from(["stop", "stop", "stop", "length"]), st.booleans()), min_size=1, max_size=14)


@settings(deadline=None, max_examples=200)
@given(moves)
def test_random_trees_train_every_kept_sampled_token_once(moves):
    """A harness that goes on from any earlier turn, folds to nothing, or asks again; `conversations[i]` is what turn i ended with."""
    h, conversations = History(branching=True), []
    for n, (origin, prompt, sampled, finish, again) in enumerate(moves):
        origin = origin % (n + 1) - 1  # ROOT or an earlier turn
        if again and origin != ROOT:  # the same request as that turn's
            parent, request = h.nodes[origin].parent, conversations[origin][:-1]
        else:
            parent, request = origin, [*(conversations[origin] if origin != ROOT else []), user(f"u{n}")]
        kept, appended, _ = h.match(request)
        if parent == ROOT or all(h.nodes[i].turn.finish_reason == "stop" for i in h.path(parent)):
            assert kept.head == parent, "it goes on from the very turn"
        assert [*kept.messages, *appended] == request
        h, _ = say(h, request, f"r{n}", prompt, sampled, finish=finish)
        conversations.append([*request, said(f"r{n}")])
        assert h.messages == conversations[-1]
    leaves = h.leaves()
    assembled = [leaf.arrays for leaf in assemble_leaves(h)]
    trained = set()
    for leaf, a in zip(leaves, assembled, strict=True):
        whole = assemble([h.nodes[i].turn for i in h.path(leaf)])
        assert a.tokens.tolist() == h.nodes[leaf].tokens.tolist() == whole.tokens.tolist()
        assert a.routes.tolist() == whole.routes.tolist()
        new = [i for i in h.path(leaf) if i not in trained]
        assert a.tokens[a.loss_mask == 1].tolist() == [int(t) for i in new for t in h.nodes[i].turn.output_ids]
        assert set(a.versions[a.loss_mask == 1].tolist()) == set(new) and (a.versions[a.loss_mask == 0] == -1).all() and (a.logprobs[a.loss_mask == 0] == 0).all()
        trained.update(h.path(leaf))
    superseded = set(range(len(h.nodes))) - trained
    assert all(any(m.parent == h.nodes[i].parent and m.appended == h.nodes[i].appended for m in h.nodes[i + 1:]) for i in superseded)


@settings(deadline=None, max_examples=200)
@given(moves)
def test_a_linear_history_takes_what_goes_on_from_its_last_turn_or_repeats_it_and_nothing_else(moves):
    h, request = History(), []
    for n, (origin, prompt, sampled, finish, again) in enumerate(moves):
        depth = len(h.nodes)
        back = origin % (depth + 1)
        messages = [m for c in h.nodes[: depth - back] for m in c.messages]
        request = [*messages, *(h.nodes[depth - back].appended if again and back else [user(f"u{n}")])]
        cut = back == 0 and depth and h.nodes[-1].turn.finish_reason != "stop"
        if back > 1 or cut:
            before = h
            with pytest.raises(StructureError) as e:
                h.match(request)
            assert h is before and (e.value.cause == "history:truncated") == bool(cut)
            continue
        h, cause = say(h, request, f"r{n}", prompt, sampled, finish=finish)
        assert len(h.nodes) == depth - back + 1 and cause == ("retry" if back else "") and h.leaves() == (len(h.nodes) - 1,)
    if h.nodes:
        (only,) = (leaf.arrays for leaf in assemble_leaves(h))
        assert only.tokens.tolist() == assemble(h.turns).tokens.tolist() and only.loss_mask.tolist() == assemble(h.turns).loss_mask.tolist()
