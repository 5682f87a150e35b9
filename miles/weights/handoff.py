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


class Sized(Protocol):
    @property
    def size(self) -> int: ...


class Handoff:
    """At most `limit` bytes are on their way: made, and not used yet. One thing may be, however large it is. For one `feed` and one `use`, in two threads."""

    def __init__(self, limit: int):
        self._limit, self._bytes, self._way = limit, 0, deque[Sized]()
        self._fed, self._error = False, None  # of the other end
        self._changed = threading.Condition()

    def feed(self, things: Iterable[Sized]) -> None:
        """Hand over all of them, which are made meanwhile. Waits while there is no room. Raises what making one raises, and what `use` has raised."""
        try:
            for thing in things:
                with self._changed:
                    while not self._changed.wait_for(lambda size=thing.size: self._error is not None or not self._way or self._bytes + size <= self._limit, WAIT_S):
                        pass  # in between the main thread shows that it lives (miles.comm.pulse)
                    self._check()
                    self._way.append(thing)
                    self._bytes += thing.size
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
                thing = self._way[0]
            yield thing
            with self._changed:  # it is used
                self._bytes -= self._way.popleft().size
                self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._fed, self._error = True, self._error or error
            self._changed.notify_all()
