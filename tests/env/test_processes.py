"""What a tree of processes uses, from looks at it."""

import os
import subprocess
from pathlib import Path

import pytest

from miles.env.processes import (
    CpuMeter,
    Process,
    below,
    memory_bytes,
    proportional_bytes,
    read,
)


def process(pid=1, cpu_s=0.0, reaped_s=0.0, running=False, started=5, rss=0):
    return Process(pid, started, running, cpu_s, reaped_s, rss)


def total(*looks, cpus=2):
    meter = CpuMeter(cpus)
    for since_s, processes in looks:
        meter.look(processes, since_s)
    return meter.total_s


def test_living_processes_and_the_children_they_waited_for_count():
    assert total((0, [process(1, 1.0, 4.0), process(2, 0.5)])) == 5.5


def test_a_process_that_vanished_unwaited_still_counts_with_what_was_seen_of_it():
    assert total((0, [process(1, 1.0), process(2, 3.0)]), (0.2, [process(1, 1.5)])) == 4.5


def test_a_pid_used_again_is_another_process():
    assert total((0, [process(2, 3.0)]), (0.2, [process(2, 0.25, started=6)])) == 3.25


def test_processes_too_short_to_be_seen_twice_count_a_quarter_by_sampling():
    looks = [(1.0, [process(pid, 0.0, running=True)]) for pid in range(40)]
    assert total(*looks) == 10.0


def test_sampling_counts_no_more_than_the_cpus_there_are():
    assert total((1.0, [process(pid, 0.0, running=True) for pid in range(9)]), cpus=2) == 0.5


def test_the_tree_below_a_process_is_found_and_ends_with_it():
    child = subprocess.Popen(["sh", "-c", "sleep 20 & sleep 20 & wait"])
    try:
        while sum(Path(f"/proc/{p.pid}/comm").read_text() == "sleep\n" and p.rss > 0 for p in below(child.pid)) < 2:
            pass
        found = below(child.pid)
        assert {read(p.pid).started for p in found} == {p.started for p in found}
        assert child.pid in {p.pid for p in below(os.getpid())}
        assert 0 < proportional_bytes(found) < sum(p.rss for p in found)
        assert memory_bytes(found, 1 << 40) == sum(p.rss for p in found)
        for p in found:
            os.kill(p.pid, 9)
    finally:
        child.kill()
        child.wait()
    assert read(child.pid) is None and below(child.pid) == []


@pytest.mark.parametrize("name", ["a b", "a) S 1 1", "(("])
def test_a_name_cannot_forge_a_line(name, tmp_path):
    (tmp_path / name).symlink_to("/bin/sleep")
    child = subprocess.Popen([tmp_path / name, "20"])
    try:
        while (found := read(child.pid)) is None or found.rss == 0:
            pass
        assert (found.pid, found.reaped_s) == (child.pid, 0.0)
    finally:
        child.kill()
        child.wait()
