"""The line of a conversation's tokens: arrays that grow in place, and their JSON text."""

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.session.tokens import TokenLine

NONE = np.zeros(0, dtype=np.int32)


def ids(raw: msgspec.Raw) -> list[int]:
    return msgspec.json.decode(raw)


def test_the_text_is_that_of_the_tokens():
    line = TokenLine()
    first = line.extend(NONE, [5, 70000])
    assert bytes(line.json(first)) == b"[5,70000]"
    assert bytes(line.json(line.extend(first, [0]))) == b"[5,70000,0]"


def test_a_rollback_forgets_the_text_of_what_is_gone():
    line = TokenLine()
    first = line.extend(NONE, [5, 6])
    line.json(line.extend(first, [7, 8]))
    other = line.extend(first, [9])
    assert bytes(line.json(other)) == b"[5,6,9]" and other.tolist() == [5, 6, 9]


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 150_000), max_size=9), st.booleans()), max_size=40))
def test_arrays_and_text_are_those_of_plain_lists_whichever_way_a_conversation_goes(steps):
    """Each step goes on from one of the last few states, or from tokens of an array of its own, and asks for the text or does not."""
    line, known = TokenLine(), [(NONE, [])]
    for back, new, ask in steps:
        base, plain = known[-1 - min(back, len(known) - 1)]
        base = base.copy() if back == 5 else base
        grown, plain = line.extend(base, new), [*plain, *new]
        if ask:
            assert ids(line.json(grown)) == plain
        known.append((grown, plain))
    assert all(array.tolist() == plain for array, plain in known)
