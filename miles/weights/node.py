"""What the ranks of a run on one node share: memory, and for each kind of it a lock and a record of what lies where.

    /dev/shm/miles-node-UID-KEY/    of one run (or of its successors in the same pid namespace); each rank holds it as long as it lives
        copy.0, patches.0           one file each (`Shared`): the lock, and as its content the record

The bytes are in no file: `Memory` is anonymous, and others open it through /proc/PID/fd. It ends with the last rank that has it open, however that ended, so
that a node whose ranks were all killed holds nothing but two records of some kilobytes; the next start on this node removes them. A record is believed as
far as the memory that it names can be opened, under the name that it gives, and the mark of the manifest is that of the version asked for.

The locks are those of one kernel on its own memory, which lets go of them with the process that held them. They say nothing about the shared file system, whose
locks nothing relies on.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import itertools
import mmap
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from miles.core import EnvironmentFault
from miles.rundir import RunDir
from miles.rundir.publish import explain_os_errors

BEAT_S = 1.0
"""How often the holder of a lock shows that it runs."""
PATIENCE_S = 30.0
"""A holder that has not shown it for so long is left behind."""
POLL_S = 0.02
FIRST_POLL_S = 0.001  # a patch is read in a few milliseconds

EXCLUSIVE, SHARED = fcntl.LOCK_EX, fcntl.LOCK_SH
"""Who changes what lies in memory; who reads it, or has an engine read it."""


class Place(msgspec.Struct, frozen=True):
    """Where a version lies on this node."""

    version: int  # -1: what lies there is being changed
    mark: str  # of the version's manifest
    memory: str
    pid: int
    fd: int


class Memory:
    """Anonymous memory of this node. Its name is given once, so that a number that now belongs to something else is noticed."""

    def __init__(self, name: str, fd: int):
        self.name, self.fd = name, fd

    @classmethod
    def new(cls, size: int = 0) -> Memory:
        """Raises EnvironmentFault: no room."""
        name = f"miles-weights-{secrets.token_hex(8)}"
        memory = cls(name, os.memfd_create(name))
        try:
            if size:
                os.posix_fallocate(memory.fd, 0, size)  # a page that is not there would be a SIGBUS later
        except OSError as e:
            memory.close()
            raise EnvironmentFault(f"no room for {size / 1e9:.3g} GB of weights in the memory of this node: {e}", "room for one copy of the model",
                                   "give the rollout step more memory") from e
        return memory

    @classmethod
    def at(cls, place: Place) -> Memory | None:
        """Where the process that wrote the record has ended, or let go of it, whoever else has it open is looked for. None: nobody has, or it was given back."""
        name = f"/memfd:{place.memory} (deleted)"
        for link in itertools.chain((f"/proc/{place.pid}/fd/{place.fd}",), glob.iglob("/proc/[0-9]*/fd/*")):
            with contextlib.suppress(OSError):
                if os.readlink(link) == name:
                    memory = cls(place.memory, os.open(link, os.O_RDWR | os.O_NONBLOCK))
                    if os.readlink(memory.path) == name and os.fstat(memory.fd).st_size:  # the number may have become another's between the two
                        return memory
                    memory.close()
        return None

    @property
    def path(self) -> str:
        """Where every process of this user finds it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def place(self, version: int, mark: str) -> Place:
        return Place(version, mark, self.name, os.getpid(), self.fd)

    def map(self) -> mmap.mmap:
        """All of it, to read and write."""
        return mmap.mmap(self.fd, 0)

    def empty(self) -> None:
        """Give its pages back now, whoever has it open. Nobody may look at them any more."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        os.close(self.fd)


class NodeFolder:
    """The folder of this run on this node, made by the first rank and removed by the last."""

    def __init__(self, parent: Path, run: RunDir):
        self._over = threading.Event()
        prefix = f"miles-node-{os.getuid()}-"
        for other in parent.glob(f"{prefix}*"):
            _remove_unused(other)
        who = f"{run.token} {os.readlink('/proc/self/ns/pid')}"  # /proc/PID means nothing in another namespace
        self.path = parent / f"{prefix}{hashlib.sha256(who.encode()).hexdigest()[:16]}"
        while True:
            with explain_os_errors(self.path):
                self.path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._fd, fcntl.LOCK_SH)  # waits for one that is removing it
                if _lies_at(self._fd, self.path):
                    return
                os.close(self._fd)

    def shared(self, kind: str) -> Shared:
        return Shared(self.path, kind, self._over)

    def give_up(self) -> None:
        """Whoever waits for a lock in it stops waiting."""
        self._over.set()

    def close(self) -> None:
        os.close(self._fd)
        _remove_unused(self.path)


@contextlib.contextmanager
def _folder_kept(folder: Path) -> Iterator[None]:
    """Not FileNotFoundError, which says of a version that it is gone."""
    try:
        yield
    except FileNotFoundError as e:
        raise EnvironmentFault(f"{folder} was removed under a rank that uses it", "the folder, for as long as ranks of the run live on this node",
                               "nothing: the rank makes it again when it starts anew; keep /dev/shm from being cleaned while jobs run") from e


def _remove_unused(folder: Path) -> None:
    """Unless a rank that lives holds it."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _lies_at(fd, folder):
                shutil.rmtree(folder)
        finally:
            os.close(fd)


def _lies_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


class Shared:
    """A lock and what it guards: the record of where versions lie.

    A rank that is frozen while it holds the lock would hold up the others for ever. It is left behind instead: those that wait make the file of the next number,
    whose record is empty, and all go on with that. When the frozen one wakes, it goes on with its own memory and with a record that nobody reads, and finds the
    new file the next time. The sign of life is that the file's time is another one; what it says is not read.
    """

    def __init__(self, folder: Path, kind: str, over: threading.Event):
        """over: set when nobody waits for the lock here any more."""
        self._folder, self._kind, self._over = folder, kind, over
        self._fd: int | None = None
        self._released = threading.Event()
        self._heart: threading.Thread | None = None

    def attempts(self) -> Iterator[None]:
        """Yields at once and then every few milliseconds, the sooner the shorter it has waited, to try `take` and whatever else there is to look at. Raises EnvironmentFault once this is given up."""
        sign, waited, looked, pause = None, 0.0, time.monotonic(), FIRST_POLL_S
        while not self._over.is_set():
            yield
            newest, now = self._newest(), time.monotonic()
            waited, looked = waited + min(now - looked, BEAT_S), now  # time in which this rank did not run itself says nothing of the other
            with _folder_kept(self._folder):
                found = newest, self._path(newest).stat().st_mtime_ns
            if sign != found:
                sign, waited = found, 0.0
            elif waited > PATIENCE_S:
                print(f"{self._path(newest)}: whoever holds it has not run for {PATIENCE_S:g} s; going on without it, from a keyframe", flush=True)
                self._path(newest + 1).touch(mode=0o600)
            time.sleep(pause)
            pause = min(POLL_S, 2 * pause)
        raise EnvironmentFault(f"waiting for {self._folder} was given up", "a rank that goes on", "nothing: it ends, or its engine is started again")

    def _newest(self) -> int:
        return max((int(p.suffix[1:]) for p in self._folder.glob(f"{self._kind}.*")), default=0)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._kind}.{number}"

    def take(self, mode: int) -> bool:
        """Take the lock, in the place of what is held of it, unless others have it. mode: EXCLUSIVE or SHARED."""
        self.release()
        newest = self._newest()
        with _folder_kept(self._folder), explain_os_errors(self._folder):
            fd = os.open(self._path(newest), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
            taken = self._newest() == newest
        except BlockingIOError:
            taken = False
        if not taken:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def keep(self) -> None:
        """Show from now on that this holder runs. One that only looks in while it waits does not: it would speak for the one that it waits for."""
        self._released.clear()
        self._heart = threading.Thread(target=self._beat, args=(self._fd,), name="lock", daemon=True)
        self._heart.start()

    def _beat(self, fd: int) -> None:
        while True:
            os.utime(fd)
            if self._released.wait(BEAT_S):
                return

    def release(self) -> None:
        if self._heart is not None:
            self._released.set()
            self._heart.join()
            self._heart = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def read(self) -> list[Place]:
        """What the record says. The lock is held."""
        try:
            return msgspec.json.decode(os.pread(self._fd, os.fstat(self._fd).st_size, 0), type=list[Place])
        except msgspec.MsgspecError:  # nothing yet, or its writer was killed
            return []

    def write(self, places: list[Place]) -> None:
        """The lock is held exclusively."""
        with explain_os_errors(self._folder):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, msgspec.json.encode(places), 0)
