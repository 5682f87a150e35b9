"""Is a folder fit for streamed state? Asked before training starts."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from miles.core import EnvironmentFault

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse.", "9p", "panfs", "wekafs")


def file_system(folder: Path, mounts: str) -> str:
    """Type of the file system that `folder` is on, by the lines of /proc/mounts: the longest mount point that holds it, the last of equals."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        _, point, this, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point) and len(Path(point).parts) >= best:
            best, kind = len(Path(point).parts), this
    return kind


def claim(base: Path, epoch: int, rank: int) -> Path:
    """Folder of a rank in this epoch. What its predecessors left there is removed; one that still runs finds its files gone and harms nobody's."""
    for left in base.glob(f"e*/rank_{rank:05d}"):
        shutil.rmtree(left, ignore_errors=True)
    return base / f"e{epoch:06d}" / f"rank_{rank:05d}"


def release(folder: Path) -> None:
    """Remove a claimed folder, and what is then empty above it."""
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        with contextlib.suppress(OSError):  # other ranks of this node have theirs there
            above.rmdir()


def check_folder(folder: Path, need: int, *, mounts: str | None = None) -> None:
    """Raises EnvironmentFault: `folder` is in memory or on a network file system, or has less than `need` bytes free."""
    kind = file_system(folder.resolve(), Path("/proc/mounts").read_text() if mounts is None else mounts)
    if kind in IN_MEMORY or kind.startswith(NETWORK):
        why = "in memory, which streaming is to save" if kind in IN_MEMORY else "on the network, whose bandwidth all ranks share"
        raise EnvironmentFault(f"the folder of the streamed optimizer state, {folder}, is on {kind}: {why}", "a node-local disk",
                               "set trainer.optimizer.state_dir (or the site's `scratch`) to a folder on a local disk")
    free = shutil.disk_usage(folder).free
    if free < need:
        raise EnvironmentFault(f"{free / 1e9:.1f} GB free in {folder}", f"{need / 1e9:.1f} GB for the streamed optimizer state of this rank",
                               "free space, set trainer.optimizer.state_dir to a larger disk, or use more trainer ranks")
