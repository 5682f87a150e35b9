"""`Follower`: a reader's host copy of the weights, moved forward through verified patches."""

from __future__ import annotations

from miles.core import StructureError
from miles.weights.store import Manifest, State, WeightStore


class Follower:
    """Holds the state of one version (or none). A patch that does not verify sends it back to the last keyframe."""

    def __init__(self, store: WeightStore):
        self._store = store
        self.version: int | None = None
        self.state: State = {}

    def forget(self) -> None:
        """The host copy is no longer what the engine has (a broadcast went past it)."""
        self.version, self.state = None, {}

    def advance(self, target: int) -> tuple[Manifest, set[str]] | None:
        """Bring the host copy to `target`. Returns its manifest and the names of the tensors that changed, or None when files do not lead
        there. Raises StructureError when even the way over the last keyframe does not verify."""
        for have in (self.version, None) if self.version is not None else (None,):
            chain = self._store.chain(target, have)
            if chain is None:
                continue
            state, changed = (self.state if have is not None else {}), set()
            try:
                for m in chain:
                    new = self._store.read(m, state)
                    changed |= {n for n in new if n not in state or new[n] is not state[n]}
                    state = new
            except (StructureError, FileNotFoundError):
                if have is None:
                    raise
                continue
            self.version, self.state = target, state
            return self._store.manifest(target), changed
        return None
