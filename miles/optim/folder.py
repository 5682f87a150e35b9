"""Is a folder fit for state of the trainer? Asked before training starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from miles.core import EnvironmentFault
from miles.optim.layout import PAGE

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
    """Folder of a rank in this epoch. What its predecessors left there is removed: one of them that still runs finds its files gone. A successor's are never
    touched, for a process that starts late may find them in use."""
    for left in base.glob(f"e*/rank_{rank:05d}"):
        if int(left.parent.name[1:]) < epoch:
            release(left, up_to=1)
    return base / f"e{epoch:06d}" / f"rank_{rank:05d}"


def release(folder: Path, up_to: int = 2) -> None:
    """Remove a claimed folder, and what is then empty above it: that of its epoch, and that of the run."""
    shutil.rmtree(folder, ignore_errors=True)
    for above in folder.parents[:up_to]:
        with contextlib.suppress(OSError):  # other ranks of this node have theirs there
            above.rmdir()


def folder_of(base: Path, run: str) -> Path:
    """Where the ranks of the run of this name have their state on a node."""
    return base / f"miles-optimizer-{run}"


def left_by(folder: Path) -> int:
    """Bytes that lie in `folder`, which a rank that claims its place there gives back. A file that a snapshot holds too is one."""
    files = {(s.st_dev, s.st_ino): s.st_blocks * 512 for path in folder.rglob("*") if path.is_file() for s in (path.stat(),)}
    return sum(files.values())


def check_folder(folder: Path, need: float = 0, *, network: bool = False, mounts: str | None = None) -> str:
    """Can state of `need` bytes be written to and read from `folder`, or where it is still to be made? Returns what was found. Raises EnvironmentFault: it is
    in memory, or, unless `network`, on a network file system; nothing can be written or linked there; or too little space is free."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()).resolve()
    kind = file_system(there, Path("/proc/mounts").read_text() if mounts is None else mounts)
    elsewhere = "set trainer.optimizer.state_dir (or the site's `scratch`) to a folder on a local disk"
    if kind in IN_MEMORY:
        raise EnvironmentFault(f"the folder of the trainer's state, {folder}, is on {kind}: in memory, which a disk is to save", "a node-local disk", elsewhere)
    if kind.startswith(NETWORK) and not network:
        raise EnvironmentFault(f"the folder of the trainer's state, {folder}, is on {kind}: on the network, whose bandwidth all ranks share",
                               "a node-local disk", f"{elsewhere}, or, where nodes have none, set trainer.optimizer.state_on_network = true")
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".miles-canary-") as file:
            file.write(bytes(PAGE))
            file.flush()
            os.fsync(file.fileno())
            link = Path(file.name + ".link")
            os.link(file.name, link)  # as a snapshot does
            link.unlink()
    except OSError as e:
        raise EnvironmentFault(f"the folder of the trainer's state, {folder}: in {there} no file can be written, synced and linked: {e.strerror}",
                               "a folder that the user of the job may write to, on a file system with hard links", elsewhere) from e
    free = shutil.disk_usage(there).free
    if free < need:
        raise EnvironmentFault(f"{free / 1e9:.1f} GB free in {folder}", f"{need / 1e9:.1f} GB for the trainer's state",
                               "free space, set trainer.optimizer.state_dir to a larger disk, or use more trainer ranks")
    return f"{folder} is on {kind}, {free / 1e9:.0f} GB free"
