"""Transfers past the page cache that end early."""

import mmap
import os
import random

import pytest

from miles.core import EnvironmentFault
from miles.optim.direct import TRIES, open_file, read_block, write_block
from miles.optim.layout import PAGE

PAGES = 9
SIZE = PAGES * PAGE


def short(call, lengths):
    """`call`, an os.preadv or os.pwritev of one buffer, which moves at most as many bytes as `lengths` says, and takes what O_DIRECT takes."""
    asked = []

    def transfer(fd, buffers, offset):
        assert offset % PAGE == 0 and len(buffers[0]) % PAGE == 0
        asked.append(offset)
        most = next(lengths)
        whole = most // PAGE * PAGE
        moved = call(fd, [buffers[0][:whole]], offset) if whole else 0
        if moved < most <= len(buffers[0]) and most > whole:  # the rest of a page cannot be asked for: it is moved past O_DIRECT
            rest = memoryview(buffers[0])[whole:most]
            other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            moved += call(other, [rest], offset + whole)
            os.close(other)
        return moved

    return transfer, asked


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(bytes(3 * SIZE))
    fd = open_file(path)
    yield path, fd
    os.close(fd)


def block(data=b""):
    buffer = mmap.mmap(-1, SIZE)
    buffer[:len(data)] = data
    return memoryview(buffer)


def test_a_transfer_that_ends_within_a_page_goes_on_at_the_beginning_of_that_page(file, monkeypatch):
    path, fd = file
    data = random.Random(0).randbytes(SIZE)
    transfer, asked = short(os.pwritev, iter([2 * PAGE + 512, 100, PAGE, SIZE]))
    with monkeypatch.context() as m:
        m.setattr("miles.optim.direct.os.pwritev", transfer)
        write_block(fd, path, block(data), SIZE)
    assert [(a - SIZE) // PAGE for a in asked] == [0, 2, 2, 3]
    assert path.read_bytes() == bytes(SIZE) + data + bytes(SIZE)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_written_and_read_in_random_parts_is_what_it_was(file, monkeypatch, seed):
    path, fd = file
    rng = random.Random(seed)
    data, back = rng.randbytes(SIZE), block()
    lengths = iter(lambda: rng.randrange(PAGE // 2, 3 * PAGE) if rng.random() < 0.8 else PAGE, None)
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(f"miles.optim.direct.os.{name}", short(getattr(os, name), lengths)[0])
    monkeypatch.setattr("miles.optim.direct.TRIES", 1000)  # half of the parts may be shorter than a page
    write_block(fd, path, block(data), SIZE)
    read_block(fd, path, back, SIZE)
    assert back == data


@pytest.mark.parametrize(("call", "what", "move"), [("preadv", "read", read_block), ("pwritev", "write", write_block)])
def test_a_disk_that_moves_no_page_is_given_up_with_what_it_moved(file, monkeypatch, call, what, move):
    path, fd = file
    transfer, asked = short(getattr(os, call), iter([PAGE, 7, 7, 7]))
    monkeypatch.setattr(f"miles.optim.direct.os.{call}", transfer)
    with pytest.raises(EnvironmentFault, match=f"a {what} of {SIZE - PAGE} bytes at {SIZE + PAGE} of .*state moved 7 bytes, {TRIES} times in a row"):
        move(fd, path, block(), SIZE)
    assert len(asked) == 1 + TRIES


def test_a_file_that_ends_is_told_from_a_disk_that_stops(file):
    path, fd = file
    os.truncate(path, SIZE + PAGE + 10)
    with pytest.raises(EnvironmentFault, match=f"ends at byte {SIZE + PAGE + 10}, within a block that begins at {SIZE}"):
        read_block(fd, path, block(), SIZE)
