"""`Publisher`: the trainer leader's side. Gives each set of weights a number and sends it by the configured transport.

`disk` writes a delta against the version before, and a keyframe at the start of each trainer epoch and every `keyframe_every` versions.
`broadcast` sends over a process group when every engine serves the version before; otherwise (first version, an engine that restarted, a
broken group) it falls back to a keyframe on disk and says so in what it returns.
`p2p` is two steps. All trainer ranks fill the memory of all rollout ranks (miles.weights.p2p), under the same condition; then `publish_filled` makes what they
have a version. Where they could not, the caller gathers, and `publish` goes by broadcast, or else by disk.
A rank that refuses the newest version, because a file of it is damaged or gone, is given the same weights as a keyframe under a new number, whatever the transport.
`auto` tries each of these (miles.weights.choose) on versions before which every engine serves the one before, and waits there until every engine serves
the new one.

On disk the trainer waits for what needs its weights, and the rest is done by a thread beside its next step:

    begin    keyframe: gather into the state that is held          delta: gather, compare with that state, encode; it becomes the new one
    beside   write it (nobody changes it before the next `begin`)  write the encoded blocks, of which `WAITING_BYTES` may wait, else the gathering waits
             sync, manifest, rename into place, wake the engines; then, whatever way it went, retire old versions

There is one version on its way at most: each `begin` waits for the one before. Not beside, but in `begin`: what goes over a wire (collectives of two threads on
one device wait for each other for ever), what `auto` measures, and everything in synchronous mode, where the next batch is made with this version (and
on shared GPUs its appearance gives the engines the memory).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from miles.core import ConfigError, EnvironmentFault, Role, StructureError
from miles.core.at_work import at_work
from miles.rundir import RunDir
from miles.weights.acks import Ack, read_acks, serving
from miles.weights.allocator import give_back
from miles.weights.broadcast import BroadcastGroup
from miles.weights.choose import Figure, choose, ways
from miles.weights.digest import BLOCK_BYTES
from miles.weights.handoff import Handoff
from miles.weights.p2p.filled import Filled
from miles.weights.patch import State, Tensors
from miles.weights.store import FILES, Manifest, WeightStore

POLL_S = 0.02
WAIT_S = 1.0
REPAIRS = 3
"""Keyframes in a row that are published for a rank that refuses each: what is wrong is then on its side, and every version makes the groups in the buffer older."""
WAITING_BYTES = 4 * BLOCK_BYTES
"""Of encoded blocks that are not written yet: a second of the file system's where few elements change, and where most do (a block is then about as large
as what it encodes) little beside the bucket that is gathered and the blocks in work."""
GIVEN_BACK = BLOCK_BYTES
"""Of this size memory that is freed goes back to the system: tensors that were gathered, and blocks most of whose elements change. What a step allocates in smaller pieces is kept."""
NOT_SERVED = "an engine does not serve the version before"
Checksum = Callable[[State], str]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Published:
    version: int
    transport: str  # disk | broadcast | p2p
    bytes: int  # that left the trainer; what is broadcast counts once
    seconds: float  # from the first look at the weights until it was there
    note: str = ""  # why it did not go the way it should


class Publisher:
    """Holds the last state that was gathered on the host, once: the base of the next delta, and what a late engine is sent. After a version that was not
    gathered (p2p) it holds none."""

    def __init__(self, run: RunDir, epoch: int, store: WeightStore, wake: Callable[[], None], engine_checksum: Checksum, after: int | None = None,
                 checksum_of: dict[str, Any] | None = None, adapters: dict[str, Any] | None = None, adapters_before: dict[str, Any] | None = None):
        """`after`: numbers go on behind this one, which is the highest ever used; behind the newest on disk by default. (Should there be a file of a fenced predecessor
        under the next number, publishing fails and the trainer starts anew.) checksum_of: how an engine's checksum follows from the bytes of a
        version, if it does: a rank that has the bytes takes it itself; for a broadcast, which it has not, `engine_checksum` says it. adapters: what those go with
        that are published in place of weights (miles.weights.merged); before: what those of the checkpoint went with. Raises ConfigError: other weights than those that this run began with."""
        give_back(GIVEN_BACK)
        self._run, self._epoch, self._store, self._wake, self._checksum, self._checksum_of = run, epoch, store, wake, engine_checksum, checksum_of
        self._adapters = {"adapters": adapters} if adapters else {}
        self._config = run.config.weights
        self._state: State | None = None
        self._step = 0
        self._last: Manifest | None = None  # of the newest version, where this publisher published one
        self._repairs: Counter[int] = Counter()  # rank -> keyframes that were published because it refused the version before, since it served one
        self._given_up: set[int] = set()  # ranks of which it was said that they have used up their repairs
        self._since_keyframe = 0
        self._on_files = False  # files lead to the newest version
        self._group: BroadcastGroup | None = None
        self._members: tuple = ()
        self._groups_made = 0
        self._ways, self._figures = ways(run.config), list[Figure]()
        self._trial = False  # all engines served the version before when this one began
        self._beside, self._thread = run.config.run.mode == "async", ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._writing: Future[Published] | None = None
        self._retiring: Future[None] | None = None
        self.version = (store.newest() or 0) if after is None else after  # the newest, there or on its way; numbers go on where any earlier epoch stopped
        if adapters:
            self._check_base(adapters, adapters_before)

    def _check_base(self, adapters: dict[str, Any], before: dict[str, Any] | None) -> None:
        """What is frozen comes from the model folder at every start: it must be what the adapters of a checkpoint were trained with."""
        try:
            before = before or self._store.manifest(self._store.newest() or 0).extra["adapters"]
        except (FileNotFoundError, StructureError):
            return  # no checkpoint, so adapters are new
        if before != adapters:
            raise ConfigError(f"the weights of {self._run.config.model.path} have the digest {adapters['base']}", f"{before['base']}, that of the weights that this run began with",
                              "restore the model folder; to train adapters of another model, start a new run")

    def begin(self, step: int, tensors: Tensors, gathered: Callable[[], None] = lambda: None, note: str = "") -> Future[Published]:
        """Publish these tensors (Hugging Face names, CPU, each the caller's to give away) as the next version. They may be a generator: beside the state
        that is held there is only what it makes at a time. `gathered` is called when all are there, before anybody sees the version. note: why they were not
        sent point to point, where they should have been.

        What is left when this returns needs nothing of the caller's. Its error is the future's, and the next call's that waits for it."""
        self.settle()
        start, way = time.monotonic(), self._way
        self._trial = self._all_serve(self._acks())
        if way != "disk":
            try:
                group = self._ready_group()
                if group is not None:
                    self._hold(tensors)
                    gathered()
                    m = self._broadcast(step, group)
                    return self._done(step, m, "broadcast", sum(t.nbytes for t in self._state.values()), start, note)
                note = note or NOT_SERVED
            except EnvironmentFault as e:
                note = f"{note}; {e.found}" if note else e.found
                self._leave_group()
        return self._measured(self._disk(step, tensors, gathered, start, note), start)

    def publish(self, step: int, tensors: Tensors, gathered: Callable[[], None] = lambda: None, note: str = "") -> Published:
        """`begin`, and wait."""
        publication = self.begin(step, tensors, gathered, note)
        self.settle()
        return publication.result()

    def settle(self) -> None:
        """Wait until the version that was begun is there, and those that nobody needs are gone. Raises, once, what kept it from that: its number is used up
        then, and the next is a keyframe."""
        writing, self._writing = self._writing, None
        if writing is not None:
            there(writing)
        retiring, self._retiring = self._retiring, None
        if retiring is not None:
            there(retiring)

    def fillable(self) -> int | None:
        """The rollout epoch whose ranks are to be sent the next version point to point: all of them serve the version before."""
        return self._run.current_epoch(Role.ROLLOUT) if self._way == "p2p" and self.version and self._all_serve(self._acks()) else None

    def publish_filled(self, step: int, filled: Filled, seconds: float) -> Future[Published]:
        """Publish what the rollout ranks were filled with. seconds: that took."""
        self.settle()
        start, self._trial = time.monotonic(), True
        extra = {"p2p": {"link": filled.link, "serial": filled.serial, "receivers": filled.receivers}, "checksum_of": self._checksum_of}
        m = self._store.publish_filled(self.version + 1, step, filled.tensors, self._epoch, base=self.version, extra=lambda: extra)
        self._wake()
        self._state, self._on_files = None, False
        return self._done(step, m, "p2p", filled.bytes, start - seconds, "")

    @property
    def holds(self) -> bool:
        """Whether the newest weights are held here, whole."""
        return self._state is not None

    def late(self) -> bool:
        """Whether the newest weights have to be published again, none being on their way: its folder is gone; a rank has refused it; or an engine that
        (re)started waits for a version that files lead to. It can load a version that its rank was filled with, unless that went wrong once. Raises
        EnvironmentFault when every rank refuses whatever is published."""
        if self._writing is not None and not self._writing.done():
            return False
        m = self._last
        if m is None:
            return False
        acks = self._acks()
        if self._refusing(acks) or (self._store.newest() or 0) < m.version:
            return True
        if len(acks) == self._run.config.cluster.rollout.ranks and all(a.refused == m.version for a in acks.values()):
            raise EnvironmentFault(f"every rank refuses v{m.version}, as it did the {REPAIRS} keyframes before; rank {min(acks)}: {acks[min(acks)].error}",
                                   "a version that engines can take", f"find out what is wrong with {self._run.weights_dir} on the rollout nodes, or with what is exported")
        self._say_given_up(acks)
        if m.encoding in FILES:
            return False
        if m.encoding == "p2p" and m.extra["p2p"]["link"] == f"{self._run.current_epoch(Role.ROLLOUT)}.{self._epoch}":
            return any(a.version < 0 and a.error for a in acks.values())
        return any(a.version < 0 for a in acks.values())

    def serve_late(self) -> Published | None:
        """Publish the current weights again, as a keyframe, when they are held and an engine is late."""
        return self.again("a late engine") if self.holds and self.late() else None

    def again(self, note: str) -> Published:
        """Publish what was published last under a new number, on disk."""
        self.settle()
        publication = self._disk(self._step, None, lambda: None, time.monotonic(), note)
        self.settle()
        return publication.result()

    def _hold(self, tensors: Tensors) -> None:
        """Make the state that is held these tensors, in its own memory where it fits."""
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
    def _disk(self, step: int, tensors: Tensors | None, gathered: Callable[[], None], start: float, note: str) -> Future[Published]:
        """tensors: None for a keyframe of the state that is held."""
        refusing = self._refusing(self._acks())
        delta = (tensors is not None and self._way == "disk" and self._on_files and self.holds and not refusing
                 and self._since_keyframe + 1 < self._config.keyframe_every)
        version, base, extra = self.version + 1, self.version, {"checksum_of": self._checksum_of, **self._adapters}
        self._on_files = False  # until it is there
        if delta:
            handoff = Handoff(WAITING_BYTES)
            writing = self._thread.submit(self._write, start, note, lambda: handoff.use(
                lambda encoded: self._store.publish_delta(version, step, encoded, self._epoch, base=base, extra=lambda: extra)))
            try:
                handoff.feed(_then(self._store.encode_delta(base, tensors, self._state), gathered))
            except BaseException:
                self._state = None  # half of the new one
                _await(writing)
                raise
        else:
            if tensors is not None:
                self._hold(tensors)
            gathered()
            state = self._state
            writing = self._thread.submit(self._write, start, note, lambda: self._store.publish(version, step, state, self._epoch, extra=lambda: extra))
            self._repairs.update(a.rank for a in refusing)
        self._since_keyframe = self._since_keyframe + 1 if delta else 0
        self.version, self._step, self._writing = version, step, writing
        if not self._beside:
            _await(writing)
        return writing

    def _write(self, start: float, note: str, publish: Callable[[], Manifest]) -> Published:
        """In the thread beside the trainer's."""
        with at_work(f"writing a version to {self._run.weights_dir}"):
            self._last = m = publish()
            self._on_files = True
            self._wake()
        self._retiring = self._thread.submit(self._retire)
        return Published(m.version, "disk", m.file_size, time.monotonic() - start, note)

    def _retire(self) -> None:
        """In that thread too, when the engines have been woken."""
        with at_work(f"removing old versions from {self._run.weights_dir}"):
            self._store.retire(self._config.keep_keyframes, serving(self._run))

    def _ready_group(self) -> BroadcastGroup | None:
        """The group over the engines that live now, made anew when they are others; None unless all of them serve the version before."""
        acks, expected = self._acks(), self._run.config.cluster.rollout.ranks
        if not self._all_serve(acks) or (self._state is None and self._config.transport == "broadcast"):  # each trainer epoch starts with a keyframe
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
        self.version, self._on_files = m.version, False  # the number is used up, also when the sending fails
        self._wake()
        if not group.joined:
            group.join()
        group.send(self._state)
        return m

    def _done(self, step, m: Manifest, transport: str, size: int, start: float, note: str) -> Future[Published]:
        self.version, self._step, self._last = m.version, step, m
        self._retiring = self._thread.submit(self._retire)
        return self._measured(_known(Published(m.version, transport, size, time.monotonic() - start, note)), start)

    @property
    def _way(self) -> str:
        return choose(self._ways, self._figures)[0]

    def _measured(self, publication: Future[Published], start: float) -> Future[Published]:
        """With a choice still to be made: how long it takes until every engine serves this version, which the note says."""
        way, decided = choose(self._ways, self._figures)
        trial, self._trial = self._trial, False
        if decided or not trial:
            return publication
        published = there(publication)
        while (served := self._all_serve(acks := self._acks())) is False and not self._refusing(acks) and time.monotonic() - start < self._config.ack_timeout_s:
            time.sleep(POLL_S)
        seconds = time.monotonic() - start
        self._figures.append((way, seconds if served and published.transport == way else None))
        said = f"auto: {way} {seconds:.2f} s" if self._figures[-1][1] is not None else f"auto: {way} failed"
        way, decided = choose(self._ways, self._figures)
        said += f"; from now on {way}" if decided else ""
        return _known(replace(published, note=f"{published.note}; {said}" if published.note else said))

    def _acks(self) -> dict[int, Ack]:
        return read_acks(self._run, self._run.current_epoch(Role.ROLLOUT))

    def _refusing(self, acks: dict[int, Ack]) -> list[Ack]:
        """Of ranks that refuse the newest version, those that a keyframe may help."""
        for a in acks.values():
            if a.version >= 0 and a.refused < 0:
                del self._repairs[a.rank]
        return [a for a in acks.values() if a.refused == self.version and self._repairs[a.rank] < REPAIRS]

    def _say_given_up(self, acks: dict[int, Ack]) -> None:
        """Once for each rank that gets no more keyframes of its own: the schedule leaves it out, and nothing else would tell."""
        refusing = {a.rank for a in acks.values() if a.refused == self.version}
        for rank in sorted(refusing - self._given_up):
            print(f"rank {rank} refuses v{self.version}, as it did the {REPAIRS} keyframes before: {acks[rank].error}; the run goes on without its engine until it "
                  f"takes a version: find out what is wrong with {self._run.weights_dir} or the model folder on its node", flush=True)
        self._given_up = {r for r in self._given_up | refusing if self._repairs[r] >= REPAIRS}

    def _all_serve(self, acks: dict[int, Ack]) -> bool:
        """Whether every engine serves the newest version."""
        return len(acks) == self._run.config.cluster.rollout.ranks and all(a.version == self.version and not a.error for a in acks.values())

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, ()


def there(publication: Future[Result]) -> Result:
    """Wait until it is done, bit by bit: in between the main thread shows that it lives (miles.comm.pulse). Raises what kept it from that."""
    _await(publication)
    return publication.result()


def _await(publication: Future) -> None:
    while not wait([publication], timeout=WAIT_S).done:
        pass


def _known(published: Published) -> Future[Published]:
    future: Future[Published] = Future()
    future.set_result(published)
    return future


def _then(things: Iterator, call: Callable[[], None]) -> Iterator:
    """All of them; then `call`, before the end is seen."""
    yield from things
    call()
