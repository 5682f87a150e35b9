import signal
import threading
import time

import pytest

from miles.weights import parallel


def test_each_job_is_done_once_and_none_is_begun_after_one_that_failed(monkeypatch):
    monkeypatch.setattr(parallel, "thread_count", lambda: 2)
    assert sorted(parallel.each(lambda a, b: a + b, [(i, 100) for i in range(50)])) == list(range(100, 150))
    assert parallel.each(int, []) == []
    begun, failed = [], threading.Event()

    def job(number):
        begun.append(number)
        if number == 1:
            failed.set()
            raise ValueError(number)
        failed.wait(10)
        time.sleep(0.2)  # so that the failure is seen

    with pytest.raises(ValueError, match="1"):
        parallel.each(job, [(i,) for i in range(100)])
    assert sorted(begun) == [0, 1]


def test_small_blocks_are_given_to_threads_together_and_large_ones_alone(monkeypatch):
    monkeypatch.setattr(parallel, "BATCH_BYTES", 10)
    assert [[size for size, in batch] for batch in parallel._batches(((s,) for s in (4, 4, 4, 12, 3, 0, 7, 5)), lambda size: size)] == [[4, 4, 4], [12], [3, 0, 7], [5]]


def test_results_come_in_the_order_of_the_jobs_whoever_is_first():
    def job(number):
        time.sleep(0.02 * (number % 3 == 0))
        return number

    assert list(parallel.in_order(job, ((i,) for i in range(30)), lambda number: parallel.BATCH_BYTES // 2)) == list(range(30))


def test_whoever_is_interrupted_while_jobs_are_done_leaves_none_under_way():
    """By Ctrl-C, as the main thread of a tool is."""
    begun, ended = [], []

    def job(number):
        begun.append(number)
        if number == 0:
            signal.raise_signal(signal.SIGINT)  # its handler runs in the main thread
        time.sleep(0.3)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        parallel.each(job, [(i,) for i in range(100)])
    assert sorted(begun) == sorted(ended) and len(begun) < 100
