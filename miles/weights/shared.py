"""One pull for each node: the first rank that wants a version reads it from the shared file system and verifies it, and the others of its node use that.

    NodeCopy      the host copy that engines load: one for all ranks of the node, which takes turns to move it forward
    NodePatches   patch files that engines apply to their own memory
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from miles.core import StructureError
from miles.weights.follow import Follower
from miles.weights.node import EXCLUSIVE, SHARED, Memory, Place, Shared
from miles.weights.patch import Patch, State
from miles.weights.store import Manifest, WeightStore, keyframe_tensors

RECORDED = 64
"""Patches that the record of a node names, the newest ones. Whether all of them are still held is not asked: that of one which nobody holds takes a look at every process."""


class NodeCopy:
    """A rank's hold on the node's host copy.

        advance   wait for whoever changes it  ->  is it there already?  ->  otherwise change it, when nobody reads it
                  ->  it is this rank's to read, and nobody changes it
        release   others may change it; it stays in memory
        forget    let go of the memory, which ends when nobody has it

    While it is changed the record says so, and what it has become is said when all of it is verified. A rank that is killed in the middle leaves a copy that
    nobody believes: the next one goes on from the keyframe, in new memory.
    """

    def __init__(self, store: WeightStore, shared: Shared):
        self._store, self._shared = store, shared
        self._follower = Follower(store, self._new_memory)
        self.memory: Memory | None = None  # in it lies the safetensors file of the state
        self.pulled = False  # by this rank, when it last asked

    @property
    def state(self) -> State:
        """Of the version that `advance` gave, to be read until `release`."""
        return self._follower.state

    def advance(self, target: int) -> Manifest | None:
        """Bring the copy to version `target`, or leave it where another rank has brought it further. Returns the manifest of what it holds, which is held until
        `release`; None, and then nothing is held, when files do not lead there. Raises like `Follower.advance`, and then nothing is held either."""
        self.pulled = False
        try:
            for _ in self._shared.attempts():
                if self._shared.take(EXCLUSIVE):
                    self._shared.keep()
                    if self._adopt() < target and not self._go_on(target):
                        break
                if self._shared.take(SHARED) and self._adopt() >= target:  # looked at again: another may have come between
                    self._shared.keep()
                    return self._follower.manifest
                self._shared.release()
        except BaseException:
            self.release()
            raise
        self.release()
        return None

    def release(self) -> None:
        self._shared.release()

    def forget(self) -> None:
        self.release()
        self._drop()

    def _drop(self) -> None:
        self._follower.forget()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def _adopt(self) -> int:
        """Hold what the record speaks of. Returns its version, -1 when there is nothing to go on from."""
        places = self._shared.read()
        if not places or not self._open(places[0]):
            self._drop()
            return -1
        held = self._follower.manifest
        if places[0].version < 0:
            self._follower.forget()
        elif held is None or held.mark != places[0].mark:
            try:
                manifest = self._store.manifest(places[0].version)
            except (FileNotFoundError, StructureError):
                manifest = None  # nobody can say any more what lies there
            if manifest is None or manifest.mark != places[0].mark:
                self._follower.forget()
            else:
                self._follower.adopt(manifest, self._follower.state or keyframe_tensors(self.memory.map(), manifest))
        return -1 if self._follower.version is None else self._follower.version

    def _open(self, place: Place) -> bool:
        """Hold its memory. Where the rank that wrote the record has ended, one that has it still goes on with it."""
        if self.memory is None or self.memory.name != place.memory:
            self._drop()
            self.memory = Memory.at(place)
        return self.memory is not None

    def _go_on(self, target: int) -> bool:
        """Change the copy. The lock is held exclusively."""
        self.pulled = True
        if self.memory is not None:
            self._shared.write([self.memory.place(-1, "")])
        try:
            return self._follower.advance(target) is not None
        except BaseException as e:
            if not isinstance(e, StructureError | FileNotFoundError):
                self._follower.forget()  # it broke off anywhere
            raise
        finally:
            if (held := self._follower.manifest) is None:
                self._drop()
            self._shared.write([self.memory.place(held.version, held.mark)] if held is not None else [])

    def _new_memory(self, size: int):
        """In the place of what was held, by all ranks of the node: there are never two copies."""
        if self.memory is not None:
            self.memory.empty()
            self._drop()
        self.memory = Memory.new(size)
        return self.memory.map()


class NodePatches:
    """Patch files, verified, in memory that an engine can read. What a rank holds of them stays until it fetches others, for the ranks that come later."""

    def __init__(self, store: WeightStore, shared: Shared):
        self._store, self._shared = store, shared
        self._held: dict[int, Memory] = {}
        self.pulled = False  # one of them by this rank, when it last asked

    def fetch(self, manifests: Sequence[Manifest]) -> list[Memory]:
        """Raises StructureError or FileNotFoundError."""
        self.pulled = False
        for version in self._held.keys() - {m.version for m in manifests}:
            self._held.pop(version).close()
        for _ in self._shared.attempts():
            if self._shared.take(EXCLUSIVE):
                self._shared.keep()
                try:
                    return [self._fetch(m) for m in manifests]
                finally:
                    self._shared.release()

    def forget(self) -> None:
        for memory in self._held.values():
            memory.close()
        self._held = {}

    def _fetch(self, manifest: Manifest) -> Memory:
        if manifest.version not in self._held:
            places = self._shared.read()
            memory = next((m for p in places if p.mark == manifest.mark and (m := Memory.at(p)) is not None), None)
            if memory is None:
                memory = self._pull(manifest)
                self._shared.write([*places[1 - RECORDED:], memory.place(manifest.version, manifest.mark)])
            self._held[manifest.version] = memory
        return self._held[manifest.version]

    def _pull(self, manifest: Manifest) -> Memory:
        self.pulled = True
        source, memory = self._store.patch_file(manifest), Memory.new()
        try:
            with open(source, "rb") as f, open(memory.fd, "wb", closefd=False) as out:
                shutil.copyfileobj(f, out, 1 << 22)
            Patch(memory.path, manifest.file_size, manifest.file_digest).check()
        except BaseException as e:
            memory.close()
            if isinstance(e, OSError) and not isinstance(e, FileNotFoundError):  # as where a network file system has lost the file in the middle
                raise StructureError(f"{source} cannot be read: {e}", "the file as it was published",
                                     "the version is skipped; the next keyframe repairs it", cause="patch-file") from e
            raise
        return memory
