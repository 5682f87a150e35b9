"""`Handoff`: things on their way from the thread that makes them to the one that uses them, in order, with a bound on their bytes.

Either end may fail: the other one is told, and raises the same.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

Result = TypeVar("Result")
WAIT_S = 1.0
AT_ONCE = 1 / 16
"""Of the limit: small things are handed over by so many bytes, since waking the user for each takes longer than making it."""


class Sized(Protocol):
    @property
    def size(self) -> int: ...


class Handoff:
    """At most `limit` bytes are on their way: made, and not used yet; beside them what comes next is collected. One thing may be, however large it is. For one
    `feed` and one `use`, in two threads."""

    def __init__(self, limit: int):
        self._limit, self._bytes, self._way = limit, 0, deque[tuple[int, list[Sized]]]()
        self._fed, self._error = False, None  # of the other end
        self._changed = threading.Condition()

    def feed(self, things: Iterable[Sized]) -> None:
        """Hand over all of them, which are made meanwhile. Waits while there is no room. Raises what making one raises, and what `use` has raised."""
        try:
            for size, some in _together(things, int(AT_ONCE * self._limit)):
                with self._changed:
                    while not self._changed.wait_for(lambda size=size: self._error is not None or not self._way or self._bytes + size <= self._limit, WAIT_S):
                        pass  # in between the main thread shows that it lives (miles.comm.pulse)
                    self._check()
                    self._way.append((size, some))
                    self._bytes += size
                    self._changed.notify_all()
        except BaseException as e:
            self._end(e)
            raise
        self._end(None)

    def use(self, function: Callable[[Iterator[Sized]], Result]) -> Result:
        """What `function` returns of all that is fed. Raises what it raises, and what `feed` has raised."""
        try:
            return function(self._things())
        except BaseException as e:
            self._end(e)
            raise

    def _things(self) -> Iterator[Sized]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or self._fed or self._way)
                self._check()
                if not self._way:
                    return
                size, some = self._way[0]
            yield from some
            with self._changed:  # they are used
                self._way.popleft()
                self._bytes -= size
                self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._fed, self._error = True, self._error or error
            self._changed.notify_all()


def _together(things: Iterable[Sized], least: int) -> Iterator[tuple[int, list[Sized]]]:
    """(their bytes, some of the things), in order: `least` bytes or more, but at the end."""
    size, some = 0, []
    for thing in things:
        some.append(thing)
        size += thing.size
        if size >= least:
            yield size, some
            size, some = 0, []
    if some:
        yield size, some
