"""`Follower`: a reader's host copy of the weights, moved forward through verified patches."""

from __future__ import annotations

from miles.config.precision import together
from miles.core import StructureError
from miles.weights.patch import State
from miles.weights.store import Manifest, Step, WeightStore


class Follower:
    """Holds the state of one version (or none). A patch that does not verify sends it back to the last keyframe.

    Patches change the tensors of `state` in place: whoever was handed them is done with them before the next `advance`.
    """

    def __init__(self, store: WeightStore):
        self._store = store
        self._manifest: Manifest | None = None  # what `state` was verified by
        self.version: int | None = None
        self.state: State = {}

    def forget(self) -> None:
        """The host copy is no longer what the engine has (a broadcast went past it)."""
        self._manifest, self.version, self.state = None, None, {}

    def advance(self, target: int) -> tuple[Manifest, set[str]] | None:
        """Bring the host copy to `target`. Returns its manifest and the names of the tensors that changed (a quantized weight with all its parts), or None when files do not lead
        there. Raises StructureError when even the way over the last keyframe does not verify; version and state are then as they were."""
        for have in (self.version, None) if self.version is not None else (None,):
            chain = self._store.chain(target, have)
            if chain is None:
                continue
            state, held = (self.state, self._manifest) if have is not None else ({}, None)
            done: list[Step] = []
            try:
                for m in chain:
                    done.append(self._store.read(m, state, held))
                    state, held = done[-1].state, m
            except BaseException as e:
                for step in reversed(done):
                    step.undo()
                if have is None or not isinstance(e, (StructureError, FileNotFoundError)):
                    raise
                continue
            self._manifest, self.version, self.state = held, target, state
            return held or self._store.manifest(target), together(set().union(*(step.changed for step in done)), state)
        return None
