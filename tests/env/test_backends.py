"""The exact arguments of every launcher for one sandbox."""

import pytest

from miles.env.backends import (
    BACKENDS,
    Box,
    HostLayout,
    apptainer,
    bubblewrap,
    enroot,
    unconfined,
)
from miles.env.limits import CommandLimits

BOX = Box(app="/w/app", program=("bash", "-c", b"ls"), limits=CommandLimits(memory_mb=100, processes=9, file_mb=2), cpu_s=11, readonly={"/tests": "/w/tests"},
          writable={"/logs": "/w/logs"}, env={"HOME": "/tmp"}, image="img.sif", setid=(61200, 61201),
          host=HostLayout(links={"bin": "usr/bin"}, folders=("lib64",), hidden=("/usr/local",)), tmp="/w/tmp", status_fd=7, seccomp_fd=8)
LIMITED = ["prlimit", "--nproc=9", "--as=104857600", "--fsize=2097152", "--cpu=11", "--nofile=256", "--core=0", "--", "bash", "-c", b"ls"]
PLAIN_ENV = ["env", "-i", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", "HOME=/tmp", "LANG=C.UTF-8", "TERM=dumb", "USER=agent"]


def test_bubblewrap():
    mount = ('mount -t tmpfs -o nosuid,nodev,size=64m,nr_inodes=8192,mode=0755 miles-tmp /w/tmp && mkdir -m 1777 /w/tmp/tmp /w/tmp/shm && '
             'echo 1000 > /proc/self/oom_score_adj && exec "$@"')
    assert bubblewrap(BOX) == [
        "unshare", "--mount", "sh", "-c", mount, "sh", "setpriv", "--reuid=61200", "--regid=61201", "--clear-groups",
        "bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
        "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--json-status-fd", "7", "--seccomp", "8", "--ro-bind", "/usr", "/usr",
        "--tmpfs", "/usr/local", "--remount-ro", "/usr/local", "--symlink", "usr/bin", "/bin", "--ro-bind", "/lib64", "/lib64",
        "--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        "--proc", "/proc", "--dev", "/dev", "--bind", "/w/tmp/shm", "/dev/shm", "--bind", "/w/tmp/tmp", "/tmp", "--bind", "/w/app", "/app",
        "--ro-bind", "/w/tests", "/tests", "--bind", "/w/logs", "/logs", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/app",
        "--setenv", "PATH", "/usr/bin:/bin:/usr/sbin:/sbin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", "--setenv", "TERM", "dumb",
        "--setenv", "USER", "agent", *LIMITED]


def test_apptainer():
    assert apptainer(BOX) == [
        "setpriv", "--pdeathsig", "KILL", "apptainer", "exec", "--containall", "--no-mount", "sys,hostfs,bind-paths,cwd", "--no-privs", "--no-eval",
        "--net", "--network", "none", "--pwd", "/app", "--bind", "/w/app:/app:rw", "--bind", "/w/tests:/tests:ro", "--bind", "/w/logs:/logs:rw",
        "img.sif", *PLAIN_ENV, *LIMITED]


def test_enroot():
    assert enroot(BOX) == [
        "setpriv", "--pdeathsig", "KILL", "unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc",
        "enroot", "start", "--mount", "/w/app:/app:none:x-create=dir,bind,rw", "--mount", "/w/tests:/tests:none:x-create=auto,bind,ro",
        "--mount", "/w/logs:/logs:none:x-create=auto,bind,rw", "img.sif", "sh", "-c", 'cd /app && exec "$@"', "sh", *PLAIN_ENV, *LIMITED]


def test_unconfined():
    assert unconfined(BOX) == [*PLAIN_ENV, *LIMITED]


@pytest.mark.parametrize("kind", ["apptainer", "enroot", "unconfined-i-know"])
def test_a_launcher_that_cannot_bound_something_says_so(kind):
    assert any("disk" in gap for gap in BACKENDS[kind].gaps) and BACKENDS["bubblewrap"].gaps == ()
