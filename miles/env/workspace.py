"""The folder of one episode.

With a size (`disk_mb`) it is no folder of this machine's disk but a file system in memory, mounted in a namespace that lives as long as the
episode. Alternatives: quotas need root and a file system set up for them; a watcher that adds up sizes is late by what a disk takes in between two
looks (about 1 GB), sees no file that is deleted and still open, and is itself slowed down by many files. tmpfs is exact for bytes and for the
number of files, works as root and as an ordinary user, and leaves nothing behind when everything is killed; its cost is memory, at most 2 x disk_mb an
episode, only for what is really written.

The namespace is held by a `cat` that reads a pipe from this process. When this process ends in whatever way, `cat` sees the end of the pipe, and
since it is process 1 of its own pid namespace, the kernel kills every process of every sandbox started in there, also one that is still being set up.

Without a size (launchers other than bubblewrap) it is a plain folder whose name says who owns it; `sweep` removes those whose owner is dead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from miles.core import ConfigError, EnvironmentFault
from miles.env import processes
from miles.env.backends import APP

DISK_MB = 256
FIND_S = 5.0
CLOSE_S = 10.0  # how long the namespace may take to end, and again when it is killed
INODES_PER_MB = 128
PREFIX = "miles-env-"
_DYNAMIC_IDS = range(61184, 65520)  # systemd's range of ids without an account (systemd.io/UIDS-GIDS), mapped also in rootless containers
_DEEPEST = 100  # folders below one another that tests may meet
_BASE = "/dev/shm"  # where the namespace mounts: exists everywhere, and nothing a sandbox is shown lies below it
_HOLD = """
opts=nosuid,nodev,size=$1m,nr_inodes=$2
mount -t tmpfs -o $opts,mode=0711 miles-env $3 && mkdir $3/app $3/tmp && mount -t tmpfs -o $opts,mode=0755 miles-app $3/app && echo ready && exec cat >/dev/null
"""


class Workspace:
    """`app/` (the working directory of commands), later `tests/` and `logs/`. Everything is gone on close, processes included.

    As root, `app/` belongs to an unprivileged id; otherwise to the user who runs Miles. `root` and `app` are usable from this process; what a launcher
    started with `enter` in front calls the same place is `local(path)`. Raises EnvironmentFault when the namespace cannot be made, ConfigError when the
    start files do not fit `disk_mb`.
    """

    def __init__(self, start_files: Path | None = None, *, disk_mb: int | None = DISK_MB, scratch: Path | None = None):
        root = os.geteuid() == 0
        self.uid = _DYNAMIC_IDS[secrets.randbelow(len(_DYNAMIC_IDS))] if root else os.geteuid()
        self.gid = self.uid if root else os.getegid()
        self.disk_mb, self._holder = disk_mb, None
        self.enter: tuple[str, ...] = ()
        try:
            if disk_mb is None:
                self.root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner_name()}-", dir=scratch))
                self.root.chmod(0o711)  # the unprivileged id must reach app/ and nothing else
            else:
                self.root = self._hold(disk_mb, root)
            self.app = self.add("app", start_files, ignore=("Dockerfile", ".keep"))  # the second keeps empty folders in git
        except BaseException:
            self.close()
            raise

    def _hold(self, disk_mb: int, root: bool) -> Path:
        user = [] if root else ["--user", "--map-root-user"]
        argv = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _HOLD, "sh", str(disk_mb),
                str(disk_mb * INODES_PER_MB), _BASE]
        self._holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", start_new_session=True)
        if self._holder.stdout.readline() != b"ready\n":
            said = self._holder.stderr.read().decode("utf-8", "replace").strip()
            raise EnvironmentFault(f"sandbox: no namespace for a workspace: {said!r}", "unshare to make mount and pid namespaces, as this user",
                                   "check `sysctl user.max_user_namespaces kernel.unprivileged_userns_clone kernel.apparmor_restrict_unprivileged_userns`")
        holder = self._find_holder()
        self.enter = ("nsenter", *([] if root else ["--user", "--preserve-credentials"]), "--mount", "--pid", f"--target={holder}", "--")
        return Path(f"/proc/{holder}/root{_BASE}")

    def _find_holder(self) -> int:
        """The process inside, which is the only child of `unshare`; the kernel's list of children may miss it now and then."""
        deadline = time.monotonic() + FIND_S
        while self._holder.poll() is None and time.monotonic() < deadline:
            if found := processes.below(self._holder.pid):
                return found[0].pid
            time.sleep(0.01)
        raise EnvironmentFault("sandbox: the process that holds a workspace's namespace was killed, or is not to be found",
                               "a child of unshare in /proc", "the sample is played again; if it comes again, look for what kills processes of this user")

    def local(self, path: Path) -> str:
        """What a launcher calls `path`: files of this workspace have another name inside the namespace, all others the same."""
        if self._holder is not None and path.is_relative_to(self.root):
            return os.path.join(_BASE, path.relative_to(self.root))
        return str(path)

    def add(self, name: str, content: Path | None = None, *, ignore: tuple[str, ...] = (), owned: bool = True) -> Path:
        """A folder of the workspace with a copy of `content`; `owned`: commands in the sandbox may write to it when it is mounted."""
        path = self.root / name
        path.mkdir(exist_ok=True)
        if content is not None and content.is_dir():
            try:
                shutil.copytree(content, path, symlinks=True, ignore=shutil.ignore_patterns(*ignore), dirs_exist_ok=True)
            except shutil.Error as e:
                if self.disk_mb is not None and os.strerror(errno.ENOSPC) in str(e):
                    raise ConfigError(f"{content} does not fit into {self.disk_mb} MiB ({self.disk_mb * INODES_PER_MB} files)",
                                      "a task's files to fit tasks.disk_mb", "raise tasks.disk_mb, or make them smaller") from e
                raise
        for p in (path, *path.rglob("*")):
            if not p.is_symlink():  # the checkout may be private (umask 077); what is shown to the sandbox must be readable there
                p.chmod(p.stat().st_mode | (0o755 if p.is_dir() else 0o644))
            if owned and os.geteuid() == 0:
                os.chown(p, self.uid, self.gid, follow_symlinks=False)
        return path

    def make_room(self) -> None:
        """Let the tests write into an /app that was filled up: a tenth more of bytes and files."""
        if self._holder is None:
            return
        size = f"remount,size={self.disk_mb * 1126}k,nr_inodes={self.disk_mb * INODES_PER_MB * 11 // 10}"
        done = subprocess.run([*self.enter, "mount", "-o", size, f"{_BASE}/app"], check=False, capture_output=True, text=True, cwd="/")
        if done.returncode:
            raise EnvironmentFault(f"sandbox: no room for tests: {done.stderr.strip()!r}", "the namespace of the workspace to be there",
                                   "start the episode again")

    def drop_traps(self) -> None:
        """Remove from app/ whatever could make a test read or wait for something else than the model's own files.

        Links that lead out of app/ (`out.txt -> /tests/expected`), pipes, sockets; folders nested too deeply to be named are closed. No process of
        the model is alive when this runs, yet no link is followed: every step goes through the folder's descriptor.
        """
        top = os.open(self.app, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(top, 0o755)
            _drop_traps(top, APP, 0)
        finally:
            os.close(top)

    def close(self) -> None:
        if self._holder is not None:
            self._holder.stdin.close()  # `cat` ends; the kernel kills and awaits everything in its pid namespace; then unshare ends
            self._holder.stdout.close()
            self._holder.stderr.close()
            try:
                self._holder.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._holder.pid, signal.SIGKILL)
                try:
                    self._holder.wait(CLOSE_S)
                except subprocess.TimeoutExpired as e:
                    raise EnvironmentFault(f"sandbox: {self._holder.pid}, which holds a workspace's namespace, lives {CLOSE_S:g} s after SIGKILL", "it to end",
                                           "look for processes in uninterruptible sleep (file system)") from e
        elif hasattr(self, "root"):
            remove(self.root)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()


def _drop_traps(folder: int, inside: str, depth: int) -> None:
    for name in os.listdir(folder):
        mode = os.lstat(name, dir_fd=folder).st_mode
        if stat.S_ISLNK(mode):
            link = os.readlink(name, dir_fd=folder)
            target = os.path.normpath(os.path.join(inside, link))
            if os.path.isabs(link) or not (target == APP or target.startswith(APP + "/")):
                os.unlink(name, dir_fd=folder)
        elif stat.S_ISDIR(mode):
            os.chmod(name, stat.S_IMODE(mode) | 0o700 if depth < _DEEPEST else 0, dir_fd=folder)
            if depth < _DEEPEST:
                child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    _drop_traps(child, f"{inside}/{name}", depth + 1)
                finally:
                    os.close(child)
        elif not stat.S_ISREG(mode):
            os.unlink(name, dir_fd=folder)


def remove(root: Path) -> None:
    """Remove a plain workspace, whatever commands left in it: folders without rights, nested deeper than a path is long."""
    for argv in (["rm", "-rf", "--", str(root)], ["chmod", "-R", "u+rwx", "--", str(root)], ["rm", "-rf", "--", str(root)]):
        subprocess.run(argv, check=False, capture_output=True)
        if not root.exists():
            return
    raise EnvironmentFault(f"sandbox: {root} cannot be removed", "a folder of our own", "remove it by hand")


def owner_name() -> str:
    """Identity of this process on this machine: pid namespace, pid, start time."""
    me = processes.read(os.getpid())
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{me.pid}-{me.started}"


def sweep(folder: Path | None = None) -> list[str]:
    """Remove plain workspaces of this user whose owner is dead, and processes still at work in them. Returns their names.

    Owners of another pid namespace (a container that shares `folder`) cannot be judged and are left alone.
    """
    here, swept = str(os.stat("/proc/self/ns/pid").st_ino), []
    for path in sorted(Path(folder or tempfile.gettempdir()).glob(f"{PREFIX}*-*-*-*")):
        namespace, pid, started = path.name.removeprefix(PREFIX).split("-")[:3]
        with contextlib.suppress(FileNotFoundError):  # another rank of this node sweeps too
            if namespace != here or not (pid + started).isdigit() or path.lstat().st_uid != os.geteuid():
                continue
            owner = processes.read(int(pid))
            if owner is None or owner.started != int(started):
                _kill_users(path.name)
                try:
                    remove(path)
                    swept.append(path.name)
                except EnvironmentFault as e:  # it only takes up room: no reason not to start
                    print(e, flush=True)
    return swept


def _kill_users(name: str) -> None:
    """Launchers name the workspace in their arguments; what they started goes with them."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # it ended, or is not ours
                if name.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    for pid in (int(entry), *(p.pid for p in processes.below(int(entry)))):
                        os.kill(pid, signal.SIGKILL)
