"""When a rank counts as frozen: over simulated clocks, and a process that is really stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.cluster import rank
from miles.cluster.silence import LOOK_S, Silence

BEATING = """
import os, sys, time
for n in range(1, int(sys.argv[2])):
    os.pwrite(int(sys.argv[1]), n.to_bytes(8, "little"), 0)
    time.sleep(0.02)
sys.exit(7)
"""


def play(looks):
    """Silence after looks of (seconds since the one before, sign)."""
    silence, now = Silence(b"", 100.0), 100.0
    for passed, sign in looks:
        now += passed
        silence = silence.look(sign, now)
    return silence.seconds


def test_silence_lasts_from_the_newest_sign_and_also_before_the_first():
    assert play([(2.0, b"")] * 5) == 10.0
    assert play([(2.0, b"1")] * 5) == 8.0  # the first look brought it
    assert play([(2.0, b"1")] * 5 + [(2.0, b"2")]) == 0.0


def test_a_parent_that_did_not_run_itself_has_heard_nothing():
    """The whole job was suspended for a day, or the machine slept: the rank has had no time either."""
    assert play([(2.0, b"1"), (2.0, b"1"), (86400.0, b"1"), (2.0, b"1")]) == 2.0 + 2 * LOOK_S + 2.0
    assert play([(2.0, b"1"), (86400.0, b"2")]) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1e5), st.sampled_from([b"1", b"2", b"3"])), max_size=40))
def test_no_clock_makes_silence_longer_than_the_time_since_the_sign_or_than_the_looks(looks):
    seconds = play(looks)
    since = []  # of the looks that found the newest sign again
    for i in reversed(range(len(looks))):
        if looks[i][1] != (looks[i - 1][1] if i else b""):
            break
        since.append(looks[i][0])
    assert seconds <= sum(since) + 1e-6 and seconds <= 2 * LOOK_S * len(since) + 1e-6
    assert not all(p <= 2 * LOOK_S for p in since) or seconds == pytest.approx(sum(since))


@pytest.fixture
def child(monkeypatch):
    monkeypatch.setattr(rank, "LOOK_S", 0.05)
    pulse, children = os.memfd_create("pulse", 0), []

    def start(beats):
        children.append(subprocess.Popen([sys.executable, "-c", BEATING, str(pulse), str(beats)], pass_fds=[pulse]))
        deadline = time.monotonic() + 20
        while not os.pread(pulse, 8, 0):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return children[-1], pulse

    yield start
    for process in children:
        process.kill()
        process.wait()
    os.close(pulse)


def test_a_rank_that_is_stopped_is_killed_and_its_state_is_told(child):
    process, pulse = child(10**6)
    process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    assert rank.watch(process, pulse, 1.0) == (-signal.SIGKILL, "T (stopped)")
    assert 1.0 <= time.monotonic() - start < 15 and process.returncode == -signal.SIGKILL


def test_a_rank_that_lives_is_left_alone_until_it_ends(child):
    process, pulse = child(100)  # two seconds
    assert rank.watch(process, pulse, 1.0) == (7, "")
