"""What a request means for a linear history."""

import numpy as np
import pytest

from miles.core import StructureError, Turn
from miles.session import Checkpoint, History
from miles.session.history import check_messages
from miles.session.replay import strict
from tests.session.conftest import user


def answered(history, *appended, reply="ok", finish="stop"):
    ids = np.array([1], dtype=np.int32)
    turn = Turn(ids, ids, np.zeros(1, np.float32), ids, finish)
    message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
    return history.add(Checkpoint(tuple(appended), message, turn))


EMPTY = History()
ONE = answered(EMPTY, user("a"))
TWO = answered(ONE, user("b"))
OK = {"role": "assistant", "content": "ok"}


def cause(history, request, same=strict):
    with pytest.raises(StructureError) as e:
        history.match(request, same)
    return e.value.cause


def test_a_first_request_starts_the_history():
    assert EMPTY.match([user("a")]) == (EMPTY, (user("a"),), "")


def test_a_continuation_keeps_everything_and_names_what_is_new():
    assert TWO.match([user("a"), OK, user("b"), OK, user("c"), user("d")]) == (TWO, (user("c"), user("d")), "")


def test_a_retry_of_the_last_turn_rolls_back_one_checkpoint():
    assert TWO.match([user("a"), OK, user("b")]) == (ONE, (user("b"),), "retry")
    assert TWO.match([user("a"), OK, user("b2")]) == (ONE, (user("b2"),), "retry")


def test_a_retry_of_the_first_turn_rolls_back_to_empty():
    assert ONE.match([user("a")]) == (EMPTY, (user("a"),), "retry")


def test_going_back_two_turns_is_refused():
    assert cause(TWO, [user("a")]) == "history:rewind"
    assert cause(TWO, [user("x"), OK, user("b")]) == "history:content"


def test_a_changed_or_foreign_reply_is_refused():
    assert cause(ONE, [user("a"), {"role": "assistant", "content": "ok!"}, user("b")]) == "history:content"
    assert cause(ONE, [user("a"), OK, {"role": "assistant", "content": "mine"}, user("b")]) == "history:foreign-reply"


def test_replies_in_the_first_request_are_examples():
    examples = [user("1+1"), {"role": "assistant", "content": "2"}, user("a")]
    assert EMPTY.match(examples) == (EMPTY, tuple(examples), "")
    one = answered(EMPTY, *examples)
    assert one.match([*examples, OK, user("b")]).appended == (user("b"),)
    assert one.match(examples).cause == "retry"
    assert one.match([*examples[:2], user("other words")]).kept == EMPTY
    # what was sampled here must never come back as text: a retry cannot bring other replies than the first turn had
    assert cause(one, [user("1+1"), {"role": "assistant", "content": "3"}, user("a")]) == "history:content"
    assert cause(ONE, [user("a"), {"role": "assistant", "content": "2"}, user("b")]) == "history:content"
    assert cause(EMPTY, [user("a"), OK]) == "history:foreign-reply"


@pytest.mark.parametrize(("given", "meant"), [
    ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]}, user("a\nb")),
    ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
    ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
    ({"role": "assistant", "content": "x", "refusal": None, "annotations": [], "function_call": None}, {"role": "assistant", "content": "x"}),
])
def test_what_clients_write_in_other_ways_has_one_form(given, meant):
    before = repr(given)
    assert check_messages([given]) == [meant] and repr(given) == before


def test_parts_that_are_no_text_are_refused():
    for part in ({"type": "image_url", "image_url": {"url": "data:"}}, 1, {"type": "text"}):
        with pytest.raises(StructureError) as e:
            check_messages([{"role": "user", "content": [part]}])
        assert e.value.cause == "request:content-part"


def test_nothing_appended_is_refused():
    assert cause(TWO, [user("a"), OK, user("b"), OK]) == "history:foreign-reply"  # a retry whose appended message would be our own reply
    assert cause(EMPTY, []) == "history:rewind"


def test_a_turn_cut_by_length_can_be_retried_but_not_continued():
    cut = answered(ONE, user("b"), finish="length")
    assert cause(cut, [user("a"), OK, user("b"), OK, user("c")]) == "history:truncated"
    assert cut.match([user("a"), OK, user("b")]).kept == ONE


def test_a_refusal_says_which_message_differs_and_how():
    with pytest.raises(StructureError, match=r"messages\[2\] is .*'b2'.*the session has .*'b'.*\(content differs\)"):
        TWO.match([user("a"), OK, user("b2"), OK, user("c")])


def test_keys_without_a_value_do_not_count():
    assert ONE.match([user("a"), {**OK, "tool_calls": None}, user("b")]).kept == ONE


def test_a_history_is_never_changed_in_place():
    before = TWO.nodes
    TWO.match([user("a"), OK, user("b")])
    assert TWO.nodes is before and len(before) == 2


@pytest.mark.parametrize("bad", [None, [], "x", [{"role": "user"}], [{"role": "robot", "content": "x"}], ["x"],
                                 [{"role": "user", "content": None, "tool_calls": [{"function": {"name": "f"}}]}],
                                 [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]])
def test_malformed_messages_are_refused(bad):
    with pytest.raises(StructureError) as e:
        check_messages(bad)
    assert e.value.cause == "history:message"
