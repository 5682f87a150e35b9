"""`OpenFiles`: files of a folder that stay open to be read, so that a record costs no operation that names a file.

An NFS client looks anew at a file when it is opened, and may show less of one that it has open than was appended elsewhere. Records verify themselves: where one
does not in a file that was open already, the file is opened anew and the record read once more, before it is called damaged or gone.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from miles.core import StructureError

T = TypeVar("T")
UNREADABLE = (StructureError, OSError)  # what a missing, torn or damaged file raises
MOST = 256  # open at once


class OpenFiles:
    """Safe to use from several threads. A file that was removed since is closed when the next one is opened, so that its bytes can go."""

    def __init__(self, folder: Path):
        self._folder, self._lock = folder, threading.Lock()
        self._open: OrderedDict[str, _File] = OrderedDict()  # the longest unused first

    def read(self, name: str, read: Callable[[int], T]) -> T:
        """`read(fd)` of the file `name`. Raises what it raises with a file that was just opened, and FileNotFoundError."""
        with self._lock:
            if (kept := self._open.get(name)) is not None:
                self._open.move_to_end(name)
        if kept is not None:
            try:
                return read(kept.fd)
            except UNREADABLE:
                self._forget(name, kept)
        file = self._get(name)  # held while it is read
        return read(file.fd)

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _get(self, name: str) -> _File:
        with self._lock:  # also while it is opened: of threads that ask for the same file one opens it
            if name not in self._open:
                file = _File(self._folder / name)
                gone = [n for n, f in self._open.items() if f.removed]
                gone += list(self._open)[: max(0, len(self._open) + 1 - MOST)]
                for n in gone:
                    self._open.pop(n, None)
                self._open[name] = file
            return self._open[name]

    def _forget(self, name: str, file: _File) -> None:
        with self._lock:
            if self._open.get(name) is file:  # no other thread has opened it anew
                del self._open[name]


class _File:
    """A descriptor that is closed when nobody holds it any more: a thread may still read what another has put away."""

    fd = -1

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_RDONLY)

    @property
    def removed(self) -> bool:
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:  # NFS: a stale handle
            return True

    def __del__(self):
        if self.fd >= 0:
            os.close(self.fd)
