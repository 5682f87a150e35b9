"""Sessions on disk: what a server wrote is what its successor continues, whatever happened in between."""

import asyncio
import errno
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core import EnvironmentFault, StaleEpochError
from miles.core.at_work import signs
from miles.session import SessionStore, store
from miles.session.store import (
    Answered,
    Closed,
    Opened,
    frame,
    open_sessions,
    read_frames,
)
from tests.session.conftest import user


def opened(i):
    return Opened(f"s{i}", f"k{i}", 3, 100.0 + i)


def turn(i, kept=0, parent=-1, ids=(1, 2)):
    return Answered(f"s{i}", kept, parent, [user("a")], {"role": "assistant", "content": "b"}, np.array(ids, np.int32).tobytes(), b"", b"", b"", "stop")


def live(folder, rank=0, epoch=99):
    """What a successor finds; leaves the folder as a successor would."""
    return SessionStore(folder, rank, epoch).restored


def test_what_was_appended_is_found_by_the_next_epoch_of_the_rank(tmp_path):
    async def scenario():
        first = SessionStore(tmp_path / "s", 0, 1)
        await first.append(opened(1), turn(1))
        await first.append(opened(2))
        await first.append(turn(1, kept=1, parent=0), Closed("s2"))
        other = SessionStore(tmp_path / "s", 1, 1)
        await other.append(opened(9))

    asyncio.run(scenario())
    assert live(tmp_path / "s", 0) == {"s1": (opened(1), [turn(1), turn(1, kept=1, parent=0)])}
    assert list(live(tmp_path / "s", 1)) == ["s9"]
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["r000.e0099.000001.log", "r001.e0099.000001.log"], "older files are gone"


def test_a_linear_retry_drops_the_turns_after_it():
    records = [opened(1), turn(1), turn(1, kept=1, parent=0), turn(1, kept=1, parent=0, ids=(7,))]
    assert open_sessions(records)["s1"][1] == [turn(1), turn(1, kept=1, parent=0, ids=(7,))]


@settings(max_examples=60)
@given(cut=st.integers(0, 10_000), flip=st.integers(0, 10_000))
def test_a_torn_or_damaged_file_gives_its_whole_beginning_and_nothing_else(cut, flip):
    records = [opened(1), turn(1), turn(1, kept=1, parent=0), Closed("s1"), opened(2)]
    frames = [frame(r) for r in records]
    data = b"".join(frames)
    ends = np.cumsum([len(f) for f in frames])
    short = data[: cut % (len(data) + 1)]
    assert list(read_frames(short)) == records[: int((ends <= len(short)).sum())]
    at = flip % len(data)
    damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1:]
    assert list(read_frames(damaged)) == records[: int((ends <= at).sum())]


def test_turns_that_arrive_during_a_write_become_durable_together(tmp_path, monkeypatch):
    syncs, real = [], os.fdatasync

    def slow_fsync(fd):
        syncs.append(fd)
        return real(fd)

    async def scenario():
        s = SessionStore(tmp_path / "s", 0, 1)
        monkeypatch.setattr(store.os, "fdatasync", slow_fsync)
        await asyncio.gather(*(s.append(opened(i)) for i in range(100)))

    asyncio.run(scenario())
    assert len(syncs) <= 2 and len(live(tmp_path / "s")) == 100


def test_a_full_disk_refuses_the_turn_and_later_ones_are_kept(tmp_path, monkeypatch):
    """Half of the frame is on disk when the write fails: it must not hide what comes after."""
    real, full = os.pwrite, [True]

    def pwrite(fd, data, at):
        if full[0]:
            full[0] = False
            real(fd, data[: len(data) // 2], at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    async def scenario():
        s = SessionStore(tmp_path / "s", 0, 1)
        monkeypatch.setattr(store.os, "pwrite", pwrite)
        with pytest.raises(EnvironmentFault, match="free space"):
            await s.append(opened(1))
        await s.append(opened(2))

    asyncio.run(scenario())
    assert list(live(tmp_path / "s")) == ["s2"]


def test_a_process_of_an_older_epoch_answers_no_more(tmp_path):
    def fence():
        if current != 1:
            raise StaleEpochError("epoch 1", "epoch 2")

    async def scenario():
        nonlocal current
        s = SessionStore(tmp_path / "s", 0, 1, fence)
        await s.append(opened(1))
        current = 2
        with pytest.raises(StaleEpochError):
            await s.append(turn(1))

    current = 1
    asyncio.run(scenario())
    with pytest.raises(StaleEpochError):
        SessionStore(tmp_path / "s", 0, 1, fence)


def test_a_long_file_is_replaced_by_one_of_the_open_sessions(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROTATE_BYTES", 4000)

    async def scenario():
        s = SessionStore(tmp_path / "s", 0, 1)
        await s.append(opened(0), turn(0))
        for i in range(1, 200):
            await s.append(opened(i), turn(i), Closed(f"s{i}"))

    asyncio.run(scenario())
    (path,) = (tmp_path / "s").iterdir()
    assert path.stat().st_size < 4000 + 300 and int(path.stem.rpartition(".")[2]) > 5
    assert live(tmp_path / "s") == {"s0": (opened(0), [turn(0)])}


@pytest.mark.parametrize("point", ["write", "publish_file", "open"])
def test_killed_while_the_file_is_replaced_nothing_is_lost(tmp_path, monkeypatch, point):
    async def scenario():
        s = SessionStore(tmp_path / "s", 0, 1)
        await s.append(opened(1), turn(1))

    class Killed(BaseException):
        pass

    def die(*_args, **_kw):
        raise Killed

    asyncio.run(scenario())
    with monkeypatch.context() as m:
        if point == "write":
            m.setattr(store, "frame", die)
        elif point == "publish_file":
            m.setattr(store, "publish_file", die)
        else:
            m.setattr(store.os, "open", die)
        with pytest.raises(Killed):
            SessionStore(tmp_path / "s", 0, 2)
    assert live(tmp_path / "s") == {"s1": (opened(1), [turn(1)])}


def test_its_thread_says_that_it_is_at_work_while_it_writes(tmp_path, monkeypatch):
    real, seen = os.fdatasync, []
    monkeypatch.setattr(os, "fdatasync", lambda fd: (seen.append([what for what, _ in signs().values()]), real(fd)))

    async def scenario():
        sessions = SessionStore(tmp_path / "s", 0, 1)
        await sessions.append(opened(1))
        sessions.close()

    asyncio.run(scenario())
    assert seen == [[f"writing sessions to {tmp_path}/s/r000.e0001.000001.log"]] and not signs()
