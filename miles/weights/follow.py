"""`Follower`: a reader's host copy of the weights, moved forward through verified patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.core import StructureError
from miles.weights.patch import State
from miles.weights.store import Manifest, Step, WeightStore


class Follower:
    """Holds the state of one version (or none), in one piece of memory: that of the keyframe it came from, laid out as the keyframe's file is.

    A version that does not verify leaves the copy as it was, or, where it takes a keyframe to go on, leaves none: a keyframe is read into the place of what
    was held, so that there are never two copies. (A patch whose blocks are dense makes another of the tensors that it changes, while it is applied.)

    Patches change the tensors of `state` in place: whoever was handed them is done with them before the next `advance`.
    """

    def __init__(self, store: WeightStore, memory: Callable[[int], Any] = bytearray):
        """memory: makes so many writable bytes."""
        self._store, self._memory = store, memory
        self.manifest: Manifest | None = None  # what `state` was verified by
        self.version: int | None = None
        self.state: State = {}

    def adopt(self, manifest: Manifest, state: State) -> None:
        """Hold what another has brought there."""
        self.manifest, self.version, self.state = manifest, manifest.version, state

    def forget(self) -> None:
        """Hold nothing."""
        self.manifest, self.version, self.state = None, None, {}

    def advance(self, target: int) -> Manifest | None:
        """Bring the host copy to `target`. Returns its manifest, or None when files do not lead there. Raises StructureError when a file on the way is
        damaged, or even the way over the last keyframe does not verify, FileNotFoundError when the files went meanwhile."""
        for have in (self.version, None) if self.version is not None else (None,):
            chain = self._store.chain(target, have)
            if chain is None:
                continue
            if whole := bool(chain) and chain[0].encoding == "keyframe":
                self.forget()
            done: list[Step] = []
            state, held = dict(self.state), self.manifest
            try:
                for m in chain:
                    done.append(self._store.read(m, state, held, self._memory))
                    state, held = done[-1].state, m
                home = self.state or done[0].state
                self._settle(home, state, target)
            except BaseException as e:
                for step in reversed(done):
                    step.undo()
                if whole or getattr(e, "cause", "") not in ("patch-base", "patch-digest"):
                    raise  # also of a damaged patch: the way over the keyframe leads over the same file
                continue
            self.adopt(held, home)
            return held
        return None

    @staticmethod
    def _settle(home: State, state: State, target: int) -> None:
        """Put tensors that patches made anew in their place."""
        def fits(name: str) -> bool:
            return name in home and name in state and home[name].shape == state[name].shape and home[name].dtype == state[name].dtype

        if wrong := sorted(n for n in home.keys() | state.keys() if not fits(n)):
            raise StructureError(f"v{target} has other tensors than the keyframe it goes back to: {wrong[:5]}", "the same names, shapes and dtypes",
                                 "the version is skipped; the next keyframe repairs it", cause="patch-base")
        for name, tensor in state.items():
            if tensor.data_ptr() != home[name].data_ptr():
                home[name].copy_(tensor)
