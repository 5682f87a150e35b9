"""What a request means for a linear history."""

import numpy as np
import pytest

from miles.core import StructureError, Turn
from miles.session import Checkpoint, History
from miles.session.history import check_messages
from tests.session.conftest import user


def answered(history, *appended, reply="ok", finish="stop"):
    ids = np.array([1], dtype=np.int32)
    turn = Turn(ids, ids, np.zeros(1, np.float32), ids, finish)
    return history.add(Checkpoint(tuple(appended), {"role": "assistant", "content": reply}, turn))


ONE = answered(History(), user("a"))
TWO = answered(ONE, user("b"))
OK = {"role": "assistant", "content": "ok"}


def cause(history, request):
    with pytest.raises(StructureError) as e:
        history.match(request)
    return e.value.cause


def test_a_first_request_starts_the_history():
    kept, appended = History().match([user("a")])
    assert kept == History() and appended == (user("a"),)


def test_a_continuation_keeps_everything_and_names_what_is_new():
    kept, appended = TWO.match([user("a"), OK, user("b"), OK, user("c"), user("d")])
    assert kept == TWO and appended == (user("c"), user("d"))


def test_a_retry_of_the_last_turn_rolls_back_one_checkpoint():
    kept, appended = TWO.match([user("a"), OK, user("b")])
    assert kept == ONE and appended == (user("b"),)
    kept, appended = TWO.match([user("a"), OK, user("b2")])
    assert kept == ONE and appended == (user("b2"),)


def test_a_retry_of_the_first_turn_rolls_back_to_empty():
    kept, appended = ONE.match([user("a")])
    assert kept == History() and appended == (user("a"),)


def test_going_back_two_turns_is_refused():
    assert cause(TWO, [user("a")]) == "history:mismatch"
    assert cause(TWO, [user("x"), OK, user("b")]) == "history:mismatch"


def test_a_changed_or_foreign_reply_is_refused():
    assert cause(ONE, [user("a"), {"role": "assistant", "content": "ok!"}, user("b")]) == "history:foreign-reply"
    assert cause(ONE, [user("a"), OK, {"role": "assistant", "content": "mine"}, user("b")]) == "history:foreign-reply"


def test_nothing_appended_is_refused():
    assert cause(TWO, [user("a"), OK, user("b"), OK]) == "history:foreign-reply"  # a retry whose appended message would be our own reply
    assert cause(History(), []) == "history:mismatch"


def test_a_turn_cut_by_length_can_be_retried_but_not_continued():
    cut = answered(ONE, user("b"), finish="length")
    assert cause(cut, [user("a"), OK, user("b"), OK, user("c")]) == "history:truncated"
    assert cut.match([user("a"), OK, user("b")])[0] == ONE


def test_keys_without_a_value_do_not_count():
    kept, _ = ONE.match([user("a"), {**OK, "tool_calls": None}, user("b")])
    assert kept == ONE


def test_a_history_is_never_changed_in_place():
    before = TWO.checkpoints
    TWO.match([user("a"), OK, user("b")])
    assert TWO.checkpoints is before and len(before) == 2


@pytest.mark.parametrize("bad", [None, [], "x", [{"role": "user"}], [{"role": "robot", "content": "x"}], [{"role": "user", "content": [1]}], ["x"]])
def test_malformed_messages_are_refused(bad):
    with pytest.raises(StructureError) as e:
        check_messages(bad)
    assert e.value.cause == "history:message"
