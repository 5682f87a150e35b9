"""Bytes that wait in a file: what comes back is what was put there, or an error."""

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.core import EnvironmentFault
from miles.optim import PausedFile
from miles.optim.direct import read_digested, write_block, write_digested

CHUNK = 8192
SIZES = (5000, 1, 20000, 0, 3)  # 25,004 bytes: four chunks, of which the last has 428 and is written as a page


def paused(path, sizes=SIZES):
    return PausedFile(path, sizes, pinned=False, chunk=CHUNK)


def contents(seed, sizes=SIZES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]


def zeros(sizes=SIZES):
    return [torch.zeros(n, dtype=torch.uint8) for n in sizes]


def flip(path, position):
    with path.open("r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module", autouse=True)
def two_buffers():
    """Fewer than there are chunks, so that each is used again."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr("miles.optim.paused.BUFFERS", 2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("paused")


@given(sizes=st.lists(st.integers(0, 30000), max_size=8), seed=st.integers(0, 1000))
def test_what_comes_back_is_what_was_put_there_last(folder, sizes, seed):
    there = paused(folder / "file", sizes)
    for turn in range(2):
        values, back = contents(seed + turn, sizes), zeros(sizes)
        there.put(values)
        there.get(back)
        assert all(torch.equal(a, b) for a, b in zip(values, back, strict=True))


def test_tensors_lie_one_behind_the_other_in_a_file_of_whole_pages_reserved_at_the_start(tmp_path):
    there, values = paused(tmp_path / "new" / "file"), contents(0)
    assert (tmp_path / "new" / "file").stat().st_size == 7 * 4096 and (tmp_path / "new" / "file").stat().st_blocks * 512 >= 7 * 4096
    there.put(values)
    assert (tmp_path / "new" / "file").read_bytes()[:25004] == torch.cat(values).numpy().tobytes()


def test_as_many_chunks_as_there_are_buffers_are_in_host_memory_whatever_the_size(tmp_path):
    assert paused(tmp_path / "large", (100 * CHUNK,)).buffer_bytes == 2 * CHUNK
    assert paused(tmp_path / "small", (100,)).buffer_bytes == 4096
    assert paused(tmp_path / "none", ()).buffer_bytes == 0


def test_a_chunk_is_written_while_the_next_is_copied_and_its_buffer_is_left_alone_till_then(tmp_path, monkeypatch):
    there, values, back = paused(tmp_path / "file"), contents(0), zeros()
    copied = [threading.Event() for _ in range(4)]
    ready = iter(copied)
    monkeypatch.setattr(there, "_synchronize", lambda: next(ready).set())

    def write(fd, path, view, offset):
        if offset == 0:
            assert copied[1].wait(10), "the second chunk waited for the first to be written"
            assert not copied[2].wait(0.2), "the third took the buffer that the first is being written from"
        return write_digested(fd, path, view, offset)

    monkeypatch.setattr("miles.optim.paused.write_digested", write)
    there.put(values)
    monkeypatch.undo()
    there.get(back)
    assert all(torch.equal(a, b) for a, b in zip(values, back, strict=True))


def test_a_chunk_is_read_while_the_one_before_is_copied(tmp_path, monkeypatch):
    there, values, back = paused(tmp_path / "file"), contents(0), zeros()
    there.put(values)
    begun = {i * CHUNK: threading.Event() for i in range(4)}
    following = iter([*list(begun.values())[1:], None])

    def read(fd, path, view, offset):
        begun[offset].set()
        return read_digested(fd, path, view, offset)

    monkeypatch.setattr("miles.optim.paused.read_digested", read)
    monkeypatch.setattr(there, "_synchronize", lambda: (event := next(following)) is None or event.wait(10) or pytest.fail("the next chunk was not being read"))
    there.get(back)
    assert all(torch.equal(a, b) for a, b in zip(values, back, strict=True))


@pytest.mark.parametrize(("position", "chunk"), [(0, 0), (CHUNK - 1, 0), (CHUNK, 1), (3 * CHUNK - 1, 2), (25003, 3)])
def test_a_flipped_bit_is_an_error_and_none_of_its_chunk_reaches_a_tensor(tmp_path, position, chunk):
    there, values, back = paused(tmp_path / "file"), contents(0), zeros()
    there.put(values)
    flip(tmp_path / "file", position)
    end = min((chunk + 1) * CHUNK, 7 * 4096)
    with pytest.raises(EnvironmentFault, match=rf"bytes {chunk * CHUNK} to {end} of .*file have digest \w{{32}}(?s:.*)\w{{32}}, as they were written(?s:.*)checkpoint"):
        there.get(back)
    got, want = torch.cat(back), torch.cat(values)
    assert torch.equal(got[:chunk * CHUNK], want[:chunk * CHUNK]) and not got[chunk * CHUNK:].any()


def test_bytes_of_the_turn_before_are_no_answer(tmp_path, monkeypatch):
    """A disk that says that it has written a chunk, and has not."""
    there = paused(tmp_path / "file")
    there.put(contents(0))
    with monkeypatch.context() as m:
        m.setattr("miles.optim.direct.write_block", lambda fd, path, view, offset: None if offset == CHUNK else write_block(fd, path, view, offset))
        there.put(contents(1))
    with pytest.raises(EnvironmentFault, match="bytes 8192 to 16384"):
        there.get(zeros())


def test_a_file_that_ends_early_is_an_error(tmp_path):
    there = paused(tmp_path / "file")
    there.put(contents(0))
    os.truncate(tmp_path / "file", CHUNK)
    with pytest.raises(EnvironmentFault, match="file ends at byte 8192, within a block that begins at 8192"):
        there.get(zeros())


def test_a_disk_that_fails_in_the_middle_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    there, whole = paused(tmp_path / "file"), os.pwritev

    def fails(fd, buffers, offset):
        if offset == 2 * CHUNK:
            raise OSError(5, "Input/output error")
        return whole(fd, buffers, offset)

    monkeypatch.setattr("miles.optim.direct.os.pwritev", fails)
    with pytest.raises(EnvironmentFault, match="file, state of the trainer: Input/output error(?s:.*)set trainer.optimizer.state_dir"):
        there.put(contents(0))


def test_a_disk_without_room_says_so_at_the_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("miles.optim.direct.os.posix_fallocate", full)
    with pytest.raises(EnvironmentFault, match="file: no space for 2.87e-05 GB(?s:.*)every other trainer rank of the node(?s:.*)trainer.paused_state = 'host'"):
        paused(tmp_path / "file")
