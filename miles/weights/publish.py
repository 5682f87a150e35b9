"""`Publisher`: the trainer leader's side. Gives each set of weights a number and sends it by the configured transport.

`disk` writes a delta against the version before, and a keyframe at the start of each trainer epoch and every `keyframe_every` versions.
`broadcast` sends over a process group when every engine serves the version before; otherwise (first version, an engine that restarted, a
broken group) it falls back to a keyframe on disk and says so in what it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from miles.core import EnvironmentFault, Role
from miles.rundir import RunDir
from miles.weights.acks import Ack, read_acks
from miles.weights.broadcast import BroadcastGroup
from miles.weights.patch import State, Tensors
from miles.weights.store import Manifest, WeightStore

Checksum = Callable[[State], str]


@dataclass(frozen=True)
class Published:
    version: int
    transport: str  # disk | broadcast
    bytes: int
    seconds: float
    note: str = ""  # why a broadcast fell back to disk


class Publisher:
    """Holds the last published state on the host, once: the base of the next delta, and what a late engine is sent."""

    def __init__(self, run: RunDir, epoch: int, store: WeightStore, wake: Callable[[], None], engine_checksum: Checksum, after: int = 0):
        """`after`: a version that was published for certain, whatever is left of the files."""
        self._run, self._epoch, self._store, self._wake, self._checksum = run, epoch, store, wake, engine_checksum
        self._config = run.config.weights
        self._state: State | None = None
        self._step = 0
        self._since_keyframe = 0
        self._group: BroadcastGroup | None = None
        self._members: tuple = ()
        self._groups_made = 0
        self.version = max(store.newest() or 0, after)  # numbers go on where any earlier epoch stopped

    def publish(self, step: int, tensors: Tensors) -> Published:
        """Publish these tensors (Hugging Face names, CPU, each the caller's to give away) as the next version. They may be a generator: beside the state
        that is held there is only what it makes at a time."""
        start, note = time.monotonic(), ""
        if self._config.transport == "broadcast":
            try:
                group = self._ready_group()
                if group is not None:
                    self._hold(tensors)
                    m = self._broadcast(step, group)
                    return self._done(step, m, "broadcast", sum(t.nbytes for t in self._state.values()), start, "")
                note = "an engine does not serve the version before"
            except EnvironmentFault as e:
                note = e.found
                self._leave_group()
        m = self._disk(step, tensors)
        return self._done(step, m, "disk", m.file_size, start, note)

    def serve_late(self) -> Published | None:
        """Broadcast mode: an engine that (re)started waits for a version that files lead to. Publish the current weights again, as a keyframe."""
        if self._config.transport != "broadcast" or self._state is None or self._store.manifest(self.version).encoding != "broadcast":
            return None
        if all(a.version >= 0 for a in self._acks().values()):
            return None
        start = time.monotonic()
        m = self._disk(self._step, ())
        return self._done(self._step, m, "disk", m.file_size, start, "a late engine")

    def _hold(self, tensors: Tensors) -> None:
        """Make the state that is held these tensors, in its own memory where it fits. Nothing left of `tensors`: it is held already."""
        held, named = self._state or {}, set()
        for name, tensor in tensors:
            named.add(name)
            before = held.get(name)
            if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
                before.copy_(tensor)
            else:
                held[name] = tensor
        self._state = {n: t for n, t in held.items() if n in named} if named else held

    # -- transports ----------------------------------------------------------------------------------------------------------
    def _disk(self, step: int, tensors: Tensors) -> Manifest:
        delta = self._config.transport == "disk" and self._state is not None and self._since_keyframe + 1 < self._config.keyframe_every
        version, extra = self.version + 1, lambda: {"checksum": self._checksum(self._state)}
        if delta:
            try:
                m = self._store.publish_delta(version, step, tensors, self._state, self._epoch, base=self.version, extra=extra)
            except BaseException:
                self._state = None  # half of the new one
                raise
        else:
            self._hold(tensors)
            m = self._store.publish(version, step, self._state, self._epoch, extra=extra)
        self._since_keyframe = self._since_keyframe + 1 if delta else 0
        self._store.retire(self._config.keep_keyframes)
        self._wake()
        return m

    def _ready_group(self) -> BroadcastGroup | None:
        """The group over the engines that live now, made anew when they are others; None unless all of them serve the version before."""
        acks, expected = self._acks(), self._run.config.cluster.rollout.ranks
        if self._state is None or len(acks) != expected or any(a.version != self.version or a.error for a in acks.values()):
            return None
        members = tuple((a.rank, a.epoch, a.incarnation) for a in acks.values())
        if members != self._members:
            self._leave_group()
            self._groups_made += 1
            self._group = BroadcastGroup(f"miles-{self._epoch}-{self._groups_made}", expected * self._run.config.engine.tp, self._config.ack_timeout_s)
            self._members = members
        return self._group

    def _broadcast(self, step: int, group: BroadcastGroup) -> Manifest:
        """Send the state that is held."""
        tp = self._run.config.engine.tp
        extra = {"checksum": self._checksum(self._state), "group": {
            "name": group.name, "address": group.address, "port": group.port, "world": group.world, "tp": tp,
            "members": {str(rank): 1 + i * tp for i, (rank, _, _) in enumerate(self._members)},
        }}
        m = self._store.publish_broadcast(self.version + 1, step, self._state, self._epoch, base=self.version, extra=lambda: extra)
        self.version = m.version  # the number is used up, also when the sending fails
        self._wake()
        if not group.joined:
            group.join()
        group.send(self._state)
        return m

    def _done(self, step, m: Manifest, transport: str, size: int, start: float, note: str) -> Published:
        self.version, self._step = m.version, step
        return Published(m.version, transport, size, time.monotonic() - start, note)

    def _acks(self) -> dict[int, Ack]:
        return read_acks(self._run, self._run.current_epoch(Role.ROLLOUT))

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, ()
