"""Output of commands as text that is safe to show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.env.output import FLOOD_BYTES, Output, printable


def shown(*chunks, limit=10):
    output = Output(limit)
    for chunk in chunks:
        output.add(chunk)
    return output.text()


def test_short_output_is_kept_whole():
    assert shown(b"0123456789") == ("0123456789", False)


def test_beginning_and_end_of_long_output_are_kept_and_the_rest_is_counted():
    assert shown(b"abcdefghijklmnop") == ("abcde\n[6 characters left out]\nlmnop", True)
    assert shown(b"abcd\n", b"x" * 1000, b"error") == ("abcd\n[1000 characters left out]\nerror", True)


def test_characters_are_counted_not_bytes():
    assert shown("😀".encode() * 20) == ("😀" * 5 + "\n[10 characters left out]\n" + "😀" * 5, True)


def test_invalid_utf8_is_replaced_also_across_chunks():
    assert shown(b"a\xff\xfeb") == ("a\ufffd\ufffdb", False)
    assert shown(b"\xf0\x9f", b"\x98\x80", b"\xe2\x82") == ("😀\ufffd", False)


@pytest.mark.parametrize(("raw", "clean"), [
    ("\x1b[31mred\x1b[0m", "red"), ("\x1b]0;title\x07x", "x"), ("\x1b]8;;http://a\x1b\\y", "y"), ("\x1b(B\x1b=\x1bMz", "z"), ("a\0b\x07\x08c", "a\ufffdb\ufffd\ufffdc"),
    ("a\r\nb\rc", "a\nb\nc"), ("tab\tline\n", "tab\tline\n"), ("\x1b", "\ufffd"),
])
def test_terminal_control_is_taken_out(raw, clean):
    assert printable(raw) == clean


REMARK = b"bash: [2: 1 (255)] tcsetattr: Inappropriate ioctl for device\n"


@pytest.mark.parametrize("cut", range(len(REMARK)))
def test_what_the_shell_says_of_its_missing_terminal_is_neither_shown_nor_counted(cut):
    assert shown(b"a\n" + REMARK[:cut], REMARK[cut:] + b"fine", limit=6) == ("a\nfine", False)
    assert shown(b"a\n" + REMARK[:-1], limit=6) == ("a\n", False)
    assert shown(b"bash: [x", b"y", limit=20) == ("bash: [xy", False)


@given(st.binary(max_size=300), st.integers(1, 40), st.lists(st.integers(0, 300), max_size=5))
def test_how_output_is_split_into_chunks_changes_nothing(data, limit, cuts):
    cuts = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    assert shown(*(data[a:b] for a, b in zip(cuts, cuts[1:], strict=False)), limit=limit) == shown(data, limit=limit)


@given(st.text(max_size=200), st.integers(1, 60))
def test_what_is_shown_is_bounded_and_says_what_is_missing(text, limit):
    said, cut = shown(text.encode("utf-8", "replace"), limit=limit)
    assert cut == (len(text) > limit)
    assert len(said) <= limit + (len("\n[ characters left out]\n") + 5 if cut else 0)
    assert all(c in "\n\t" or c >= " " for c in said)


def test_a_flood_is_seen():
    output = Output(10)
    output.add(b"x" * FLOOD_BYTES)
    assert not output.flooded
    output.add(b"x")
    assert output.flooded
