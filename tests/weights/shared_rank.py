"""A rank of a node, in a process of its own, that does what it is told through a pipe and says what it found. For test_shared_weights.py."""

import itertools
import os
import signal
import sys
from pathlib import Path

from miles.rundir import RunDir
from miles.weights import follow, node, shared, store
from miles.weights.digest import digest
from miles.weights.node import EXCLUSIVE, NodeFolder
from miles.weights.shared import NodeCopy, NodePatches
from miles.weights.store import WeightStore, combined_digest

LINES_OF = {module.__file__ for module in (follow, node, shared, store)}


def die_at_line(number: int) -> None:
    """kill -9 before the `number`-th line that is executed of what moves the copy forward."""
    count = itertools.count()

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in LINES_OF:
            return None
        if event == "line" and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def found(copy: NodeCopy, manifest) -> tuple[int, bool, str]:
    """Version, whether this rank pulled it, digest of the copy as it lies there."""
    return manifest.version, copy.pulled, combined_digest({n: digest(t) for n, t in copy.state.items()})


def main(run: str, parent: str, pipe, die_at: int | None = None, patience: float = 30.0) -> None:
    node.PATIENCE_S, node.BEAT_S = patience, min(1.0, patience / 20)
    weights, folder = WeightStore(RunDir(run)), NodeFolder(Path(parent), RunDir(run))
    locks = {kind: folder.shared(kind) for kind in ("copy", "patches")}
    copy, patches = NodeCopy(weights, locks["copy"]), NodePatches(weights, locks["patches"])
    if die_at is not None:
        die_at_line(die_at)
    while (order := pipe.recv()) != "end":
        what, *of = order
        if what == "advance":  # and hold it
            pipe.send(found(copy, copy.advance(*of)))
        elif what == "die in the middle":  # of changing it
            copy._follower._settle = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            copy.advance(*of)
        elif what == "look":  # again at what is held
            pipe.send(combined_digest({n: digest(t) for n, t in copy.state.items()}))
        elif what == "release":
            pipe.send(copy.release())
        elif what == "follow":  # what is newest, until it is this
            at = -1
            while at < of[0]:
                if (newest := weights.newest()) is not None and newest > at:
                    at, *rest = found(copy, copy.advance(newest))
                    copy.release()
                    pipe.send((at, *rest))
        elif what == "fetch":
            memories = patches.fetch([weights.manifest(v) for v in of[0]])
            pipe.send((patches.pulled, [os.pread(m.fd, 1 << 30, 0) for m in memories]))
        elif what == "stop while it holds":
            assert locks["copy"].take(EXCLUSIVE)
            locks["copy"].keep()
            os.kill(os.getpid(), signal.SIGSTOP)
            locks["copy"].release()
            pipe.send("awake")
    copy.forget()
    patches.forget()
    folder.close()
    pipe.send("ended")
