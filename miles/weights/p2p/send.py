"""The trainer ranks' side of a transfer. Every method is collective over the trainer's world and comes to one outcome on all of its ranks.

    connected to the rollout epoch that the leader names?  no -> accept; each rank plans; the leader sends every receiver what will come
    leader tells the receivers that transfer n begins, and hears that each has room and no engine that reads now
    each rank packs its chunks, a few ahead, and sends each to its receivers
    leader hears from every receiver that all arrived as it was sent

A transfer that fails is tried once more under another number; after that nothing is tried until one of the two sides has restarted.
Receives, not one-sided writes: miles.comm.peers says what was tried.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import xxhash
from mpi4py import MPI

from miles.comm import Abandoned, PeerPort, Peers, World
from miles.core import EnvironmentFault, Role
from miles.rundir import RunDir
from miles.weights.p2p.chunks import DIGEST_BYTES, message_bytes, pack
from miles.weights.p2p.filled import Filled
from miles.weights.p2p.plan import Chunk, Held, Tensor, plan
from miles.weights.p2p.receivers import whole
from miles.weights.p2p.source import Source

AHEAD = 2  # chunks that a rank has packed and not yet sent
IDLE_S = 0.0005
LOOK_S = 0.5  # how often a rank that waits looks whether the receivers have been restarted
TRIES = 2
GONE = "the rollout ranks were restarted"


class Sender:
    """One trainer rank. Made on all ranks at the same time."""

    def __init__(self, run: RunDir, world: World, epoch: int, source: Source, held: Callable[[Mapping[str, Tensor], int], list[Held]] | None = None):
        """held: what the receivers hold, given their number; whole tensors, each, unless told otherwise."""
        self._run, self._world, self._source = run, world, source
        self._held = held or (lambda tensors, count: [whole(tensors)] * count)
        self._port = PeerPort(run, world, Role.TRAINER, epoch)
        self._peers: Peers | None = None
        self._rollout_epoch = 0  # that `_peers` leads to
        self._given_up = 0  # rollout epoch with which transfers have failed
        self._chunks: list[Chunk] = []
        self._serial = 0
        self._abandoned = Abandoned()

    def fill(self, rollout_epoch: int | None) -> Filled | str:
        """Send all weights to all ranks of a rollout epoch (the leader's word, ignored elsewhere; None: to nobody). Returns what went wrong where they did not all arrive."""
        epoch = int(self._world.broadcast_bytes(str(rollout_epoch or 0).encode() if self._world.leader else None))
        if not epoch:
            return ""
        if epoch == self._given_up:
            return "point to point has failed with these engines before"
        why = self._connect(epoch)
        for _ in range(0 if why else TRIES):
            found = self._transfer()
            if isinstance(found, Filled):
                return found
            why = f"{why}; again: {found}" if why else found
            if found == GONE:
                return why
        self._given_up = epoch
        return why

    # -- connection ----------------------------------------------------------------------------------------------------------
    def _connect(self, epoch: int) -> str:
        """Empty when the peers are there."""
        if self._peers is not None and self._rollout_epoch == epoch:
            return ""
        self._peers, why = None, ""
        try:
            peers = self._port.accept(epoch)
        except EnvironmentFault as e:
            why = e.found
        if why := self._agree(why):
            return why
        self._peers, self._rollout_epoch = peers, epoch
        receivers = self._held(self._source.tensors, peers.size)
        self._chunks = plan(self._source.arch, self._source.places, self._source.tensors, receivers)
        if self._world.leader:
            for number, held in enumerate(receivers):
                peers.mail.post([number], {"kind": "plan", "tensors": {n: [*self._source.tensors[n], held[n]] for n in held},
                                           "chunks": [(c.source, [(p.name, p.box) for p in c.pieces]) for c in self._chunks if number in c.receivers]})
        return ""

    # -- one transfer --------------------------------------------------------------------------------------------------------
    def _transfer(self) -> Filled | str:
        self._serial += 1
        watch = _Watch(self._run, self._rollout_epoch, self._run.config.weights.ack_timeout_s, self._peers, self._serial)
        why = ""
        if self._world.leader:
            self._peers.mail.post(range(self._peers.size), {"kind": "begin", "serial": self._serial})
            why = watch.wait_for(watch.ready)
        if why := self._agree(why):
            return why
        why, digests = self._send(watch)
        if self._world.leader:
            why = why or watch.wait_for(watch.done)
        everyone = [msgspec.msgpack.decode(m) for m in self._world.gather_bytes(msgspec.msgpack.encode([why, digests]))]
        if whys := [w for w, _ in everyone if w]:
            return whys[0]
        return self._verdict(watch.done, [d for _, d in everyone])

    def _send(self, watch: _Watch) -> tuple[str, bytes]:
        mine = deque(c for c in self._chunks if c.source == self._world.rank)
        longest = max((message_bytes(self._sizes(c)) for c in mine), default=0)
        free = [np.empty(longest, np.uint8) for _ in range(AHEAD)]
        flight: deque[tuple[list[MPI.Request], np.ndarray]] = deque()
        digests, why = [], ""
        try:
            while (mine or flight) and not why:
                if mine and free:
                    chunk, buffer = mine.popleft(), free.pop()
                    digests.append(pack(chunk.pieces, self._source.tensors, self._source.shards, buffer))
                    message = buffer[:message_bytes(self._sizes(chunk))]
                    flight.append(([self._peers.send(message, r, self._serial) for r in chunk.receivers], buffer))
                    continue
                done = [i for i, (requests, _) in enumerate(flight) if MPI.Request.Testall(requests)]
                free += [flight[i][1] for i in done]
                flight = deque(f for i, f in enumerate(flight) if i not in done)
                if not done:
                    time.sleep(IDLE_S)
                    why = watch.broken()
        except MPI.Exception as e:
            why = str(e).splitlines()[0]
        for requests, buffer in flight:
            for request in requests:
                self._abandoned.add(request, buffer)
        return why, b"".join(digests)

    def _verdict(self, done: dict[int, str], digests: list[bytes]) -> Filled | str:
        """All ranks know all digests, the leader what each receiver computed: they must be the same."""
        marks = [xxhash.xxh3_128() for _ in range(self._peers.size)]
        by_tensor = {name: xxhash.xxh3_128() for name in self._source.tensors}
        at, sent = [0] * len(digests), 0
        for chunk in self._chunks:
            mine = digests[chunk.source]
            for piece in chunk.pieces:
                start = at[chunk.source]
                by_tensor[piece.name].update(mine[start:start + DIGEST_BYTES])
                at[chunk.source] = start + DIGEST_BYTES
            for receiver in chunk.receivers:
                marks[receiver].update(mine[at[chunk.source] - DIGEST_BYTES * len(chunk.pieces):at[chunk.source]])
                sent += chunk.size
        expected = tuple(m.hexdigest() for m in marks)
        different = [r for r, digest in done.items() if digest != expected[r]]
        if why := self._agree(f"receiver {different[0]} has other bytes than were sent" if different else ""):
            return why
        tensors = {n: {"shape": list(t.shape), "dtype": t.dtype, "digest": by_tensor[n].hexdigest()} for n, t in self._source.tensors.items()}
        return Filled(self._peers.pair, self._serial, expected, tensors, sent)

    def _agree(self, why: str) -> str:
        """The first rank's fault, on every rank."""
        return next((w for w in (m.decode() for m in self._world.gather_bytes(why.encode())) if w), "")

    def _sizes(self, chunk: Chunk) -> list[int]:
        return [p.box.size * self._source.tensors[p.name].itemsize for p in chunk.pieces]


class _Watch:
    """What the receivers say of a transfer (heard by the leader alone), and why it cannot end well."""

    def __init__(self, run: RunDir, rollout_epoch: int, limit_s: float, peers: Peers, serial: int):
        self._run, self._epoch, self._peers, self._serial = run, rollout_epoch, peers, serial
        self._looked = time.monotonic()
        self._deadline = self._looked + limit_s
        self.ready: dict[int, str] = {}
        self.done: dict[int, str] = {}  # digest over what it has got

    def broken(self) -> str:
        """The first fault. Empty while there is hope."""
        for rank, message in self._peers.mail.poll():
            if message["serial"] == self._serial:
                if message["why"]:
                    return f"receiver {rank}: {message['why']}"
                (self.ready if message["kind"] == "ready" else self.done)[rank] = message["digest"]
        now = time.monotonic()
        if now > self._deadline:
            return "not all weights arrived within weights.ack_timeout_s"
        if now - self._looked > LOOK_S:
            self._looked = now
            if self._run.current_epoch(Role.ROLLOUT) != self._epoch:
                return GONE
        return ""

    def wait_for(self, heard: dict[int, str]) -> str:
        """Until every receiver has said it."""
        while len(heard) < self._peers.size:
            if why := self.broken():
                return why
            time.sleep(IDLE_S)
        return ""
