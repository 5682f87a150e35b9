"""Work on blocks of tensors in the threads of this process.

What is done to a block takes less than a millisecond, without Python's lock, and handing a task from one thread to another takes some hundredths of one, with it.
So a thread is given more than one small block at a time.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

BATCH_BYTES = 8 << 20
"""Of blocks, that a thread is given at a time where results are wanted in order."""
WAIT_S = 1.0


@functools.cache
def threads() -> ThreadPoolExecutor:
    """One per core that this process may use. Tasks in it never wait for each other."""
    return ThreadPoolExecutor(thread_count(), thread_name_prefix="weights")


def thread_count() -> int:
    return min(16, len(os.sched_getaffinity(0)))


def in_order(function: Callable, jobs: Iterable[tuple], size: Callable[..., int]) -> Iterator[Any]:
    """Results of `function` over `jobs`, in order, with few enough in flight that only some blocks are held. size: bytes of a job, which is done in a batch."""
    flight: deque[Future] = deque()
    most = thread_count() + 2  # asked once: it is a call to the system
    try:
        for batch in _batches(jobs, size):
            flight.append(threads().submit(lambda mine: [function(*job) for job in mine], batch))
            if len(flight) > most:
                yield from flight.popleft().result()
        while flight:
            yield from flight.popleft().result()
    finally:
        wait(flight)


def _batches(jobs: Iterable[tuple], size: Callable[..., int]) -> Iterator[list[tuple]]:
    batch, held = [], 0
    for job in jobs:
        batch.append(job)
        held += size(*job)
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def each(function: Callable, jobs: Sequence[tuple]) -> list[Any]:
    """Results of `function` over `jobs`, in any order. Threads take one job after the other, and nobody else is woken for each. Once one fails, or the caller is
    interrupted, none is begun, and none is under way when this raises."""
    rest = iter(jobs)  # of which each step is one under Python's lock

    def work() -> list[Any]:
        try:
            return [function(*job) for job in rest]
        except BaseException:
            deque(rest, maxlen=0)
            raise

    flight = [threads().submit(work) for _ in range(min(thread_count(), len(jobs)))]
    try:
        while wait(flight, WAIT_S).not_done:
            pass  # in between the main thread shows that it lives (miles.comm.pulse)
    finally:
        deque(rest, maxlen=0)
        wait(flight)
    return [result for future in flight for result in future.result()]
