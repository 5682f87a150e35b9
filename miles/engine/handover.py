"""Weights on their way to an engine: a folder in shared memory with one safetensors file, or a link to the memory where one lies, which the engine loads as it
loads any model folder.

SGLang's own endpoint for tensors wants a base64 pickle instead, which is slower and is a pickle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from miles.core import EnvironmentFault

HANDOVER = Path("/dev/shm")
PATCH_FORMAT = "miles-patch"
"""What a patch file is called in a request to load weights (miles.engine.inplace)."""
REHEARSE = "miles-rehearse:"
"""Begins the action, before the path of a patch, of a request to check weights; the answer is WORKING, READY or why not, in the place of checksums."""
WORKING, READY = "working", "ready"


def told(path: str | Path) -> Path:
    """The file that an engine makes beside a patch when its rehearsal has ended, so that nobody has to ask it meanwhile: each answer takes it milliseconds."""
    return Path(f"{path}.told")


def handover_folder() -> Path:
    """A new folder of this process in shared memory."""
    return owned_folder(HANDOVER, "weights")


def owned_folder(parent: Path, kind: str) -> Path:
    """A new folder of this process. When it is killed, the next that makes one of this kind on this node removes it: one of weights holds a copy of the model."""
    for folder in parent.glob(f"miles-{kind}-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)  # another rank of this node may be doing the same
    return Path(tempfile.mkdtemp(prefix=f"miles-{kind}-{os.getpid()}-", dir=parent))


def no_room(size: int, error: Exception) -> EnvironmentFault:
    return EnvironmentFault(f"no room for {size / 1e9:.3g} GB of weights in {HANDOVER}, cannot hand them over: {error}", "room for one copy of the model",
                            "enlarge /dev/shm")


class Handover:
    """A folder of this process with links to memory that it has open, which an engine, a process of the same user, reads as files."""

    def __init__(self):
        self.folder = handover_folder()

    def show(self, name: str, memory: str) -> Path:
        """memory: path of it under /proc."""
        self.hide(name)
        (self.folder / name).symlink_to(memory)
        return self.folder / name

    def hide(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
