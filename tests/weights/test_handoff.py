import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from miles.weights.handoff import Handoff, _together


@dataclass(frozen=True)
class Thing:
    number: int
    size: int


@pytest.fixture
def other():
    with ThreadPoolExecutor(1) as thread:
        yield thread


def test_all_come_in_order_and_the_user_ends_with_what_it_makes_of_them(other):
    handoff = Handoff(10)
    used = other.submit(handoff.use, list)
    things = [Thing(i, i % 4) for i in range(200)]
    handoff.feed(iter(things))
    assert used.result(10) == things


def test_small_ones_are_handed_over_together():
    """100 bytes or more at a time; the last may be fewer."""
    things = [Thing(i, size) for i, size in enumerate((40, 0, 60, 99, 1, 500, 0, 7))]
    assert [(size, [t.size for t in some]) for size, some in _together(things, 100)] == [(100, [40, 0, 60]), (100, [99, 1]), (500, [500]), (7, [0, 7])]
    assert [len(some) for _, some in _together(things, 0)] == [1] * 8


def test_no_more_is_made_while_what_is_not_used_has_the_most_bytes_it_may(other):
    """Limit 10, things of 4 bytes: two are on their way, a third is made and waits."""
    handoff, made, gate = Handoff(10), [], threading.Semaphore(0)

    def make():
        for i in range(6):
            made.append(i)
            yield Thing(i, 4)

    def take(things):
        return [gate.acquire() and t.number for t in things]

    used, maker = other.submit(handoff.use, take), threading.Thread(target=handoff.feed, args=(make(),), daemon=True)
    maker.start()
    try:
        for taken in range(4):
            deadline = time.monotonic() + 10
            while len(made) < taken + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            maker.join(0.05)  # nothing more comes, however long one waits
            assert made == list(range(taken + 3)) and maker.is_alive()
            gate.release()
    finally:
        gate.release(6)
    assert used.result(10) == list(range(6))
    maker.join(10)


def test_one_that_is_larger_than_the_limit_goes_alone(other):
    handoff = Handoff(3)
    used = other.submit(handoff.use, lambda things: [t.size for t in things])
    handoff.feed(iter([Thing(0, 2), Thing(1, 50), Thing(2, 50), Thing(3, 1)]))
    assert used.result(10) == [2, 50, 50, 1]


def test_what_goes_wrong_in_making_is_raised_at_both_ends(other):
    handoff = Handoff(10)
    used = other.submit(handoff.use, list)

    def make():
        yield Thing(0, 1)
        raise OSError("a rank is gone")

    with pytest.raises(OSError, match="a rank is gone"):
        handoff.feed(make())
    with pytest.raises(OSError, match="a rank is gone"):
        used.result(10)


@pytest.mark.parametrize("after", [0, 3])
def test_what_goes_wrong_in_using_is_raised_at_both_ends_also_when_the_maker_waits_for_room(other, after):
    handoff = Handoff(2)

    def take(things):
        for _ in range(after):
            next(things)
        raise OSError("no space")

    used = other.submit(handoff.use, take)
    with pytest.raises(OSError, match="no space"):
        handoff.feed(Thing(i, 1) for i in range(100))
    with pytest.raises(OSError, match="no space"):
        used.result(10)
