"""Files that stay open: they are read anew where what is open shows less, they are closed when they are removed, and they are never too many."""

import errno
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_buffer import put, queue, run, writer  # noqa: F401  (fixtures)

from miles.buffer import GroupReader, files, write_part
from miles.buffer.files import OpenFiles
from miles.core import StructureError
from tests.buffer.test_buffer import trajectory

opened: list[str] = []  # names of files and folders that were opened, listed or removed while somebody looks
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir") else None)


def first_line(fd):
    """Raises like a record that does not verify."""
    data = os.pread(fd, 100, 0)
    if not data.endswith(b"\n"):
        raise StructureError(repr(data), "a whole line", "", cause="digest")
    return data


def is_open(path):
    return any(os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith(str(path)) for fd in os.listdir("/proc/self/fd"))


def test_a_file_is_opened_once(tmp_path):
    (tmp_path / "a").write_bytes(b"x\n")
    kept = OpenFiles(tmp_path)
    opened.clear()
    assert [kept.read("a", first_line) for _ in range(3)] == [b"x\n"] * 3
    assert opened.count(str(tmp_path / "a")) == 1
    kept.close()
    assert not is_open(tmp_path / "a")


def test_what_does_not_verify_in_an_open_file_is_read_once_more_from_the_file_opened_anew(tmp_path):
    """As an NFS client shows it: the open file stays as it was."""
    (tmp_path / "a").write_bytes(b"x\n")
    kept = OpenFiles(tmp_path)
    kept.read("a", first_line)
    (tmp_path / "b").write_bytes(b"xyz\n")
    os.rename(tmp_path / "b", tmp_path / "a")
    stale = [True]

    def read(fd):
        if stale and stale.pop():
            raise OSError(errno.ESTALE, "stale handle")
        return first_line(fd)

    assert kept.read("a", read) == b"xyz\n"
    (tmp_path / "a").write_bytes(b"torn")
    opened.clear()
    with pytest.raises(StructureError):
        kept.read("a", first_line)
    assert opened.count(str(tmp_path / "a")) == 1, "once, and then it is damaged"
    (tmp_path / "a").unlink()
    with pytest.raises(FileNotFoundError):
        kept.read("a", lambda fd: first_line(fd) if not opened else os.stat(tmp_path / "a"))
    kept.close()


def test_a_removed_file_is_closed_when_another_is_opened_and_is_whole_until_then(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(b"x\n")
    kept = OpenFiles(tmp_path)
    kept.read("a", first_line)
    (tmp_path / "a").unlink()
    assert kept.read("a", first_line) == b"x\n" and is_open(tmp_path / "a")
    kept.read("b", first_line)
    assert not is_open(tmp_path / "a") and is_open(tmp_path / "b")
    kept.close()


def test_of_too_many_the_longest_unused_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST", 2)
    for name in "abc":
        (tmp_path / name).write_bytes(b"x\n")
    kept = OpenFiles(tmp_path)
    for name in "abac":
        kept.read(name, first_line)
    assert [is_open(tmp_path / name) for name in "abc"] == [True, False, True]
    kept.close()


def test_a_file_that_is_read_stays_open_whatever_others_do(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST", 1)
    for name in "abcd":
        (tmp_path / name).write_bytes(name.encode() + b"\n")
    kept = OpenFiles(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: (n, kept.read(n, first_line)), "abcd" * 200))
    assert all(data == name.encode() + b"\n" for name, data in found)
    kept.close()


def test_a_group_costs_few_operations_that_name_a_file(run, writer):  # noqa: F811
    """In the middle of a run, its samples' writers having said where they are: each end checks its epoch before it appends, and the trainer looks at the journals."""
    q = queue(run)
    with GroupReader(run.buffer_dir) as reader:
        for group in range(3):
            opened.clear()
            writer.start(group, "t")
            for s in range(2):
                writer.told(group, s, *write_part(run, 1, [trajectory(group, s)]))
            writer.seal(group, [0, 1])
            made = [name for name in opened if name.startswith(str(run.path))]
            opened.clear()
            q.poll()
            (taken,) = q.take(1, 1, group + 1).groups
            assert len(reader.group(taken.sealed).trajectories) == 2
            q.trained([group], 1, group + 1)
            used = [name for name in opened if name.startswith(str(run.path))]
    epoch, journals = str(run.path / "epochs"), run.buffer_dir / "journal"
    assert made == [f"{epoch}/rollout"] * 2
    assert used == [str(journals), str(journals / "rollout.e000001.log"), *[f"{epoch}/trainer"] * 2]
