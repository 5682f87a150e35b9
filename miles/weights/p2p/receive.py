"""A rollout rank's side of a transfer.

    tick, now and then:   connect to the trainer's ranks when they call
                          "plan"   what will come, once; makes the image
                          "begin"  receive one transfer in a thread; the engine goes on with what it has
                          when that ended: tell the trainer's leader, with the digest of what came

The image holds a version only between the end of a transfer and the beginning of the next (`holds`). While an engine reads it (`reading`) none begins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from mpi4py import MPI

from miles.comm import Abandoned, PeerPort, Peers, World
from miles.core import EnvironmentFault, Role
from miles.rundir import RunDir
from miles.weights.p2p.chunks import message_bytes, unpack
from miles.weights.p2p.image import Image
from miles.weights.p2p.plan import Box, Tensor
from miles.weights.store import Manifest

POSTED = 2  # chunks of a source that may arrive while others are verified
IDLE_S = 0.0005
LOOK_S = 0.5  # how often the trainer's call is looked for

Pieces = list[tuple[str, Box]]


class Receiver:
    """One rollout rank. Made on all ranks at the same time; of one thread, but for the transfer itself."""

    def __init__(self, run: RunDir, world: World, epoch: int, make_folder: Callable[[], Path]):
        """make_folder: a new folder in shared memory."""
        self._run, self._rank, self._make_folder = run, world.rank, make_folder
        self._port = PeerPort(run, world, Role.ROLLOUT, epoch)
        self._looked = 0.0
        self._peers: Peers | None = None
        self._chunks: dict[int, list[Pieces]] = {}  # source -> what it sends, in order
        self._no_image = ""
        self._transfer: _Transfer | None = None
        self._filled: tuple[str, int, str] | None = None  # link, serial, digest of what is in the image
        self._reading = False
        self._abandoned = Abandoned()
        self.image: Image | None = None

    def tick(self) -> None:
        """Called every few milliseconds. Raises MilesError when a handshake hangs."""
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            self._connect()
        if self._transfer is not None and self._transfer.ended:
            transfer, self._transfer = self._transfer, None
            if not transfer.why:
                self._filled = (self._peers.pair, transfer.serial, transfer.digest)
            self._say("done", transfer.serial, transfer.why, transfer.digest)
        if self._peers is not None:
            for _, message in self._peers.mail.poll():
                if message["kind"] == "plan":
                    self._prepare(message)
                else:
                    self._begin(message["serial"])

    def holds(self, manifest: Manifest) -> bool:
        """Whether the image is the version of this manifest, to the byte."""
        stated = manifest.extra["p2p"]
        mine = (stated["link"], stated["serial"], stated["receivers"][self._rank]) if self._rank < len(stated["receivers"]) else None
        return self._transfer is None and self._filled is not None and self._filled == mine

    @contextlib.contextmanager
    def reading(self) -> Iterator[Image]:
        """While an engine loads the image. Only what `holds` may be read."""
        self._reading = True
        try:
            yield self.image
        finally:
            self._reading = False

    def close(self) -> None:
        if self.image is not None:
            self.image.close()

    # -- messages ------------------------------------------------------------------------------------------------------------
    def _connect(self) -> None:
        try:
            found = self._port.connect()
        except EnvironmentFault as e:
            print(f"rank {self._rank}: {e.found}", flush=True)  # the trainer says so too, and sends weights another way
            return
        if found is not None:
            self._stop_transfer()
            self._peers = found

    def _prepare(self, message: dict[str, Any]) -> None:
        described = {n: (Tensor(tuple(shape), dtype), Box(*box)) for n, (shape, dtype, box) in message["tensors"].items()}
        self._chunks = {}
        for source, pieces in message["chunks"]:
            self._chunks.setdefault(source, []).append([(name, Box(*box)) for name, box in pieces])
        tensors, held = {n: t for n, (t, _) in described.items()}, {n: b for n, (_, b) in described.items()}
        if self.image is not None and self.image.fits(tensors, held):
            return
        self.close()
        self.image, self._filled, self._no_image = None, None, ""
        try:
            self.image = Image(self._make_folder(), tensors, held)
        except EnvironmentFault as e:
            self._no_image = e.found

    def _begin(self, serial: int) -> None:
        self._stop_transfer()
        why = self._no_image or ("its engine is loading weights" if self._reading else "")
        if not why:
            self._filled = None
            self._transfer = _Transfer(self._peers, serial, self._chunks, self.image, self._run.config.weights.ack_timeout_s, self._abandoned)
        self._say("ready", serial, why)

    def _say(self, kind: str, serial: int, why: str, digest: str = "") -> None:
        self._peers.mail.post([0], {"kind": kind, "serial": serial, "why": why, "digest": digest})

    def _stop_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.stop()
            self._transfer = None


class _Transfer:
    """All chunks of one version, received, verified and written in a thread. `why` is empty after one that went well."""

    def __init__(self, peers: Peers, serial: int, chunks: dict[int, list[Pieces]], image: Image, limit_s: float, abandoned: Abandoned):
        self._peers, self.serial, self._chunks, self._image, self._abandoned = peers, serial, chunks, image, abandoned
        self._deadline, self._stopped = time.monotonic() + limit_s, threading.Event()
        self.why, self.digest = "", ""
        self._posted = {source: [] for source in chunks}  # (request, memory) of chunks that may arrive, in order
        self._next = dict.fromkeys(chunks, 0)  # chunk to post next
        self._got: dict[int, list[bytes]] = {source: [] for source in chunks}
        self._free = {source: self._buffers(source) for source in chunks}
        for source in chunks:
            self._post(source)
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        wrong: list[str] = []
        try:
            while any(self._posted.values()):
                if not self._look(wrong):
                    if self._stopped.is_set() or time.monotonic() > self._deadline:
                        self.why = "not everything arrived within weights.ack_timeout_s"
                        break
                    time.sleep(IDLE_S)
        except MPI.Exception as e:
            self.why = str(e).splitlines()[0]
        except BaseException as e:  # the trainer must hear of it, whatever it is
            self.why = repr(e)
            raise
        finally:
            for request, memory in (r for posted in self._posted.values() for r in posted):
                self._abandoned.add(request, memory, cancel=True)
        if wrong and not self.why:
            self.why = f"{len(wrong)} tensors came with other bytes than were sent: {', '.join(sorted(set(wrong))[:3])}"
        self.digest = xxhash.xxh3_128_hexdigest(b"".join(d for source in sorted(self._got) for d in self._got[source]))

    def _look(self, wrong: list[str]) -> bool:
        """Take what has arrived. Returns whether anything had."""
        busy = False
        for source, posted in self._posted.items():
            while posted and posted[0][0].Test():
                _, memory = posted.pop(0)
                pieces = self._chunks[source][len(self._got[source])]
                digests, bad = unpack(memory, pieces, self._image)
                self._got[source].append(digests)
                wrong += bad
                self._free[source].append(memory)
                self._post(source)
                busy = True
        return busy

    def _post(self, source: int) -> None:
        chunks = self._chunks[source]
        while self._free[source] and self._next[source] < len(chunks):
            memory = self._free[source].pop()
            self._posted[source].append((self._peers.receive(memory, source, self.serial), memory))
            self._next[source] += 1

    def _buffers(self, source: int) -> list[np.ndarray]:
        chunks = self._chunks[source]
        longest = max(message_bytes([self._image.bytes_of(n, b) for n, b in pieces]) for pieces in chunks)
        return [np.empty(longest, np.uint8) for _ in range(min(POSTED, len(chunks)))]
