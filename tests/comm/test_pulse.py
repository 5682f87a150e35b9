"""Signs of life of real processes: what stops them, and what does not."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from miles.comm.pulse import Threads
from miles.core.at_work import at_work, signs

PROGRAM = """
import asyncio, ctypes, os, sys, threading, time, uvloop
import miles.comm.pulse as pulse
from miles.core.at_work import at_work

def poll():
    while True:
        time.sleep(0.002)

pulse.BEAT_S = 0.02
pulse.show_life(int(sys.argv[1]), 1.0)
"""
LIVING = {
    "computes": "while True: sum(range(1000))",
    "polls": "poll()",
    "waits for events": "uvloop.run(asyncio.sleep(600))",
}
HUNG = {
    "the main thread is in a call, another works": "threading.Thread(target=poll, daemon=True).start(); ctypes.CDLL(None).sleep(600)",
    "another thread is in a call and keeps the interpreter": "threading.Thread(target=ctypes.PyDLL(None).sleep, args=(600,), daemon=True).start(); poll()",
}


BESIDE = """
def beside(function):
    def work():
        with at_work("writing what is lost"):
            function()
    threading.Thread(target=work, daemon=True).start()
    poll()

def computes():
    while True:
        time.sleep(0.1)

def hangs():
    time.sleep(0.3)
    os.read(os.pipe()[0], 1)

"""


class Process:
    def __init__(self, body: str):
        self.fd = os.memfd_create("pulse", 0)
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM + body, str(self.fd)], pass_fds=[self.fd], stderr=subprocess.PIPE, text=True)

    def number(self) -> bytes:
        return os.pread(self.fd, 8, 0)

    def lives(self) -> bool:
        """A new number comes, within 20 seconds."""
        before, deadline = self.number(), time.monotonic() + 20
        while self.number() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.number() != before

    def is_silent(self) -> bool:
        """For half a second, in which 25 numbers were due, there is none, at some time within 20 seconds."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            before = self.number()
            time.sleep(0.5)
            if self.number() == before:
                return True
        return False


@pytest.fixture
def start():
    started = []

    def begin(body):
        started.append(Process(body))
        assert started[-1].lives()  # the first number of all
        return started[-1]

    yield begin
    for p in started:
        p.process.kill()
        p.process.communicate()
        os.close(p.fd)


@pytest.mark.parametrize("what", LIVING)
def test_a_process_lives_as_long_as_its_main_thread_runs_python(start, what):
    p = start(LIVING[what])
    assert p.lives() and p.lives()
    p.process.send_signal(signal.SIGSTOP)
    assert p.is_silent()
    p.process.send_signal(signal.SIGCONT)
    assert p.lives()


@pytest.mark.parametrize("what", HUNG)
def test_a_process_is_silent_when_its_main_thread_does_not_come_back_to_python(start, what):
    p = start(HUNG[what])
    assert p.is_silent() and p.process.poll() is None


def test_a_thread_that_hangs_at_its_work_ends_a_process_whose_main_thread_lives(start):
    p = start(BESIDE + "beside(hangs)")
    _, said = p.process.communicate(timeout=30)
    assert p.process.returncode == 1 and "a thread hangs: writing what is lost" in said and "cluster.frozen_s (1 s)" in said
    assert "in hangs" in said, "where it hangs"


@pytest.mark.parametrize("body", ["beside(computes)", "threading.Thread(target=hangs, daemon=True).start(); poll()"], ids=["works slowly", "is not at work"])
def test_a_thread_that_works_or_waits_for_work_does_not(start, body):
    p = start(BESIDE + body)
    with pytest.raises(subprocess.TimeoutExpired):
        p.process.wait(3)
    assert p.lives()


def test_a_thread_is_silent_since_it_used_the_processor_or_began_something_else():
    threads = Threads()
    assert [threads.look({1: ("a", sign)}, 3) for sign in (b"1", b"1", b"1", b"2", b"2", b"2")] == [None] * 6  # found again twice, and twice
    assert threads.look({1: ("b", b"2"), 2: ("a", b"2")}, 3) == (1, "b")  # the other is new
    assert threads.look({2: ("a", b"2")}, 3) is None
    assert threads.look({1: ("b", b"2"), 2: ("a", b"2")}, 3) is None, "it was not at work in between"
    assert threads.look({1: ("b", b"2"), 2: ("a", b"2")}, 3) == (2, "a")


def test_what_a_thread_is_at_ends_with_the_block_and_gives_way_to_the_one_around_it():
    def mine():
        return signs().get(threading.get_ident(), (None,))[0]

    with at_work("outer"):
        with pytest.raises(ValueError), at_work("inner"):
            assert mine() == "inner"
            raise ValueError
        first = signs()[threading.get_ident()]
        sum(range(100_000))
        assert mine() == "outer" and signs()[threading.get_ident()] != first
    assert mine() is None


def test_what_a_rank_starts_is_not_deaf_to_the_interrupt_that_its_parent_ignores():
    """The model's commands are stopped by SIGINT. The rank itself is not ended by one."""
    body = """
import os, signal, subprocess
from miles.comm.entry import run_rank

def main():
    os.kill(os.getpid(), signal.SIGINT)
    return 10 + (subprocess.run(["sh", "-c", "kill -INT $$"]).returncode == -signal.SIGINT)

run_rank(main)
"""
    done = subprocess.run([sys.executable, "-c", body], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), timeout=60)
    assert done.returncode == 11
