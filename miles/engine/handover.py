"""Weights on their way to an engine: a folder in shared memory with one safetensors file, which the engine loads as it loads any model folder.

SGLang's own endpoint for tensors wants a base64 pickle instead, which is slower and is a pickle.
"""

from __future__ import annotations

import mmap
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
    """Files that an engine loads, in memory of this process. A reader's host copy of the weights lies in one: there is one copy, and nothing to write while
    the engine stands still.

    Each is anonymous memory that the engine, a process of the same user, opens by a link in `folder`: it ends with this process however that ends, and does
    not count against the size of /dev/shm.
    """

    def __init__(self):
        self.folder = handover_folder()
        self._files: dict[str, int] = {}  # name -> file descriptor

    def weights(self, size: int) -> mmap.mmap:
        """`size` bytes of memory that are the safetensors file of `folder`, in the place of those before, which go with the last view of them. Raises
        EnvironmentFault: no room."""
        fd = self._new("model.safetensors")
        try:
            os.posix_fallocate(fd, 0, size)  # a page that is not there would be a SIGBUS later
            return mmap.mmap(fd, size)
        except OSError as e:
            raise no_room(size, e) from e

    def put(self, name: str, source: Path) -> Path:
        """Copy a file."""
        fd = self._new(name)
        with open(source, "rb") as f, open(fd, "wb", closefd=False) as out:
            shutil.copyfileobj(f, out, 1 << 22)
        return self.folder / name

    def _new(self, name: str) -> int:
        self.remove(name)
        self._files[name] = fd = os.memfd_create("miles-weights")
        (self.folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        return fd

    def remove(self, name: str) -> None:
        if (fd := self._files.pop(name, None)) is not None:
            (self.folder / name).unlink(missing_ok=True)
            os.close(fd)

    def close(self) -> None:
        for name in list(self._files):
            self.remove(name)
        shutil.rmtree(self.folder, ignore_errors=True)
