"""Which launcher confines commands: one description of a sandbox, and for each launcher the argument list that makes it. Pure.

| | bubblewrap | apptainer | enroot |
|---|---|---|---|
| root file system | this machine's /usr, read-only | `sandbox_image` | `sandbox_image` |
| network, processes, IPC of the host | none | none | none, by `unshare` around it: enroot itself isolates neither |
| disk use of /app, size of /tmp | bounded | not bounded | not bounded |
| dangerous system calls | refused (seccomp) | the site's apptainer decides | allowed |
| out-of-memory killer takes the sandbox first | yes | no | no |
| tried | in every run of the tests | never run, arguments only | never run, arguments only |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from miles.env.limits import CommandLimits

Confined = Literal["bubblewrap", "apptainer", "enroot"]
Kind = Literal["bubblewrap", "apptainer", "enroot", "unconfined-i-know"]
Argv = list[str | bytes]
APP = "/app"
CONTROL = "/run/miles"  # inside: where the output of a persistent shell's commands goes
ENV: Mapping[str, str] = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": APP, "LANG": "C.UTF-8", "TERM": "dumb", "USER": "agent"}
TMP_MB = 64  # /tmp and /dev/shm together; lives in memory
TMP_INODES = 8192


@dataclass(frozen=True)
class HostLayout:
    """What of this machine's root bubblewrap shows: names directly under /, and which of them are links."""

    links: Mapping[str, str] = field(default_factory=dict)  # bin -> usr/bin
    folders: tuple[str, ...] = ()  # lib64 where it is no link
    hidden: tuple[str, ...] = ()  # /usr/local


@dataclass(frozen=True)
class Box:
    """One sandbox, as every launcher is told about it. Host paths are those that the launcher sees."""

    app: str
    program: tuple[str | bytes, ...]
    limits: CommandLimits
    cpu_s: int  # of each process
    readonly: Mapping[str, str] = field(default_factory=dict)  # inside -> host
    writable: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)  # beside ENV
    image: str = ""
    setid: tuple[int, int] | None = None  # user and group id to take first, where Miles runs as root
    host: HostLayout = HostLayout()
    tmp: str = ""  # bubblewrap: where to mount the small file system that becomes /tmp and /dev/shm
    status_fd: int = -1  # bubblewrap: where it reports the exit code
    seccomp_fd: int | None = None  # bubblewrap: where it reads the filter

    def limited(self) -> Argv:
        """The program under its rlimits, set in the sandbox: since Linux 5.14 processes are counted per user namespace."""
        mib = self.limits
        return ["prlimit", f"--nproc={mib.processes}", f"--as={mib.memory_mb << 20}", f"--fsize={mib.file_mb << 20}", f"--cpu={self.cpu_s}",
                "--nofile=256", "--core=0", "--", *self.program]

    def environment(self) -> dict[str, str]:
        return {**ENV, **self.env}


def bubblewrap(box: Box) -> Argv:
    """A shell first mounts the small file system, in a mount namespace of its own, and lets the out-of-memory killer begin here."""
    tmp, prepare = box.tmp, (f"mount -t tmpfs -o nosuid,nodev,size={TMP_MB}m,nr_inodes={TMP_INODES},mode=0755 miles-tmp {box.tmp} && "
                             f"mkdir -m 1777 {box.tmp}/tmp {box.tmp}/shm && echo 1000 > /proc/self/oom_score_adj && exec \"$@\"")
    args: Argv = ["unshare", "--mount", "sh", "-c", prepare, "sh"]
    if box.setid:
        args += ["setpriv", f"--reuid={box.setid[0]}", f"--regid={box.setid[1]}", "--clear-groups"]
    args += ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
             "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--json-status-fd", str(box.status_fd)]
    if box.seccomp_fd is not None:
        args += ["--seccomp", str(box.seccomp_fd)]
    args += ["--ro-bind", "/usr", "/usr"]
    for hidden in box.host.hidden:
        args += ["--tmpfs", hidden, "--remount-ro", hidden]
    for name, target in box.host.links.items():
        args += ["--symlink", target, f"/{name}"]
    for name in box.host.folders:
        args += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in ("/etc/alternatives", "/etc/ld.so.cache"):  # awk and others are links through the first
        args += ["--ro-bind-try", name, name]
    args += ["--proc", "/proc", "--dev", "/dev", "--bind", f"{tmp}/shm", "/dev/shm", "--bind", f"{tmp}/tmp", "/tmp", "--bind", box.app, APP]
    for flag, mounts in (("--ro-bind", box.readonly), ("--bind", box.writable)):
        for inside, host in mounts.items():
            args += [flag, host, inside]
    args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", APP]
    for key, value in box.environment().items():
        args += ["--setenv", key, value]
    return args + box.limited()


def apptainer(box: Box) -> Argv:
    """https://apptainer.org/docs/user/latest/cli/apptainer_exec.html; `--network none` is the network an ordinary user may ask for."""
    args: Argv = ["setpriv", "--pdeathsig", "KILL", "apptainer", "exec", "--containall", "--no-mount", "sys,hostfs,bind-paths,cwd", "--no-privs", "--no-eval",
                  "--net", "--network", "none", "--pwd", APP, "--bind", f"{box.app}:{APP}:rw"]
    for mode, mounts in (("ro", box.readonly), ("rw", box.writable)):
        for inside, host in mounts.items():
            args += ["--bind", f"{host}:{inside}:{mode}"]
    return [*args, box.image, *_with_environment(box)]


def enroot(box: Box) -> Argv:
    """https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md. Enroot shares network, processes and IPC with the host: `unshare` does not."""
    args: Argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--mount", "--fork", "--kill-child",
                  "--mount-proc", "enroot", "start", "--mount", f"{box.app}:{APP}:none:x-create=dir,bind,rw"]
    for mode, mounts in (("ro", box.readonly), ("rw", box.writable)):
        for inside, host in mounts.items():
            args += ["--mount", f"{host}:{inside}:none:x-create=auto,bind,{mode}"]
    return [*args, box.image, "sh", "-c", f'cd {APP} && exec "$@"', "sh", *_with_environment(box)]


def unconfined(box: Box) -> Argv:
    return _with_environment(box)


def _with_environment(box: Box) -> Argv:
    return ["env", "-i", *(f"{key}={value}" for key, value in box.environment().items()), *box.limited()]


@dataclass(frozen=True)
class Backend:
    """A launcher: how it is called, what must be installed, and what it does not bound (said by `miles-submit check`)."""

    argv: Callable[[Box], Argv]
    tools: tuple[str, ...]
    gaps: tuple[str, ...] = ()
    needs_image: bool = False


BACKENDS: Mapping[str, Backend] = {
    "bubblewrap": Backend(bubblewrap, ("bwrap", "setpriv", "prlimit", "unshare", "nsenter", "mount", "bash")),
    "apptainer": Backend(apptainer, ("apptainer", "setpriv"),
                         ("disk use of /app", "size of /tmp", "system calls beyond the site's own filter"), needs_image=True),
    "enroot": Backend(enroot, ("enroot", "setpriv", "unshare"), ("disk use of /app", "size of /tmp", "system calls"), needs_image=True),
    "unconfined-i-know": Backend(unconfined, ("prlimit", "bash"), ("files, network and processes of this machine", "disk use")),
}
