"""What commands of a model must not be able to do, each tried for real. Attacks on the rewards are in test_reward_attacks.py."""

import asyncio
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import miles
from miles.env import CommandLimits, Sandbox, Shell, Workspace, seccomp, sweep
from tests.env.boxes import QUICK, alive, run, wait_for

ROOT = Path(miles.__file__).parent.parent


def calls(code):
    """A command that runs Python with `libc` and `ctypes`; prints what it prints."""
    return f"python3 - <<'EOF'\nimport ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n{code}\nEOF"


# ---- escape ----


@pytest.mark.parametrize("command", [
    "mount -t tmpfs x /app", "mount --bind /usr /app", "umount /app", "unshare -U true", "unshare -m true", "unshare --user --map-root-user --mount true",
    "chroot /usr /bin/true", "nsenter -t 1 -m true", "mknod /app/disk b 254 0", "mknod /app/mem c 1 1", "mknod /tmp/tty c 5 0", "pivot_root . .",
    "setpriv --reuid 0 id",
    "su -c id", "bwrap --ro-bind / / true",
])
def test_nothing_that_needs_a_right_works(command):
    assert run(command)[0].exit_code not in (0, None)


def test_no_capability_and_no_new_privileges():
    result, _ = run("grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/self/status")
    assert result.output.count("0000000000000000") == 5
    assert "NoNewPrivs:\t1" in result.output and "Seccomp:\t2" in result.output


def test_setuid_programs_give_nothing():
    result, _ = run("cp /usr/bin/id .; chmod 6755 id; ./id -u; su -c id; for p in $(find /usr/bin /usr/sbin -perm -4000 -type f); do $p id 2>/dev/null; done;"
                    " findmnt -no OPTIONS -T /app")
    assert "\n1000\n" in "\n" + result.output and "uid=0" not in result.output and "nosuid" in result.output and "nodev" in result.output


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_as_root_commands_own_nothing_of_root():
    _, owner = run("touch mine; chmod u+s mine", inspect=lambda ws: (ws.app / "mine").stat().st_uid)
    assert owner in range(61184, 65520)


def test_other_processes_cannot_be_seen_traced_or_entered():
    result, _ = run("ls -d /proc/[0-9]* | wc -l; ls /proc/1/root/; cat /proc/*/environ | tr '\\0' '\\n'; ls -l /proc/1/cwd /proc/1/exe 2>&1")
    assert int(result.output.split()[0]) < 6
    for name in ("root", "home", "var", "SECRET"):
        assert f"\n{name}\n" not in result.output
    # Process 1 belongs to the sandbox and is filtered like everything in it: nothing is won by tracing it.
    assert "Seccomp:\t2" in run("grep Seccomp: /proc/1/status")[0].output


def test_no_environment_variable_of_the_host_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc-secret")
    assert "abc-secret" not in run("env; cat /proc/*/environ; set")[0].output


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter for this machine")
@pytest.mark.parametrize("name", sorted(seccomp.REFUSED))
def test_refused_system_calls_fail_with_eperm(name):
    number = seccomp.REFUSED[name][platform.machine() == "aarch64"]
    # Arguments that each call would refuse with another error (or accept): EPERM before ENOSYS, EFAULT and EINVAL is the filter's.
    result, _ = run(calls(f"print(libc.syscall({number}, 0, 0, 0, 0, 0), ctypes.get_errno())"))
    assert result.output == "-1 1\n"


def test_typing_into_a_terminal_is_refused_and_other_calls_are_not():
    result, _ = run(calls("print([(libc.ioctl(0, n, b'x'), ctypes.get_errno()) for n in (0x5412, 0x541C, 0x5401)])"))
    assert result.output == "[(-1, 1), (-1, 1), (-1, 25)]\n"


def test_the_filter_is_this_program():
    code = seccomp.program("x86_64")
    lines = list(struct.iter_unpack("<HBBI", code))
    n = len(seccomp.REFUSED)
    assert len(lines) == 5 + n + 6
    assert lines[:5] == [(0x20, 0, 0, 4), (0x15, 1, 0, 0xC000003E), (6, 0, 0, 0x00050001), (0x20, 0, 0, 0), (0x35, n + 4, 0, 0x40000000)]
    for i, (op, jump, other, _) in enumerate(lines[5 : 5 + n]):
        assert (op, 5 + i + 1 + jump, other) == (0x15, len(lines) - 2, 0)  # every one jumps to the refusal
    assert lines[-2:] == [(6, 0, 0, 0x00050001), (6, 0, 0, 0x7FFF0000)]
    assert seccomp.program("riscv64") is None


def test_only_the_three_descriptors_are_open():
    result, _ = run("bash -c 'for i in {0..1024}; do [ -e /proc/self/fd/$i ] && echo $i; done; true'")
    assert result.output == "0\n1\n2\n"


def test_there_is_no_terminal_and_no_group_of_the_harness():
    result, _ = run("tty; : > /dev/tty; ps -o pgid= -p $$; kill -TERM 0; kill -KILL -$(ps -o pgid= -p $$ | tr -d ' ')")
    assert "not a tty" in result.output and "No such device" in result.output


# ---- links ----


@pytest.mark.parametrize("command", [
    "ln -s / out; ls out/root out/home", "ln -s /etc/shadow s; cat s", "ln /etc/shadow h", "ln /proc/1/environ e", "ln -s /proc/1/root r; ls r/root r/home",
    "cd /proc/1/cwd && ls ../root", "cat /proc/self/root/etc/shadow", "cd /app; cd ../../../../root",
])
def test_links_lead_to_nothing_of_the_host(command):
    result, _ = run(command)
    assert result.exit_code != 0 or "No such file" in result.output or "denied" in result.output


def test_a_link_swapped_in_for_a_folder_while_the_host_walks_leads_nowhere(tmp_path):
    """The tests' clean-up walks by descriptors; here it runs again and again while a process swaps a folder for a link to a folder of the host."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "pipe-like").symlink_to("/etc/passwd")
    (tmp_path / "victim").chmod(0o755)
    with Workspace() as ws:
        (ws.app / "d").mkdir()
        end = time.monotonic() + 1.0
        pid = os.fork()
        if pid == 0:
            while time.monotonic() < end:
                (ws.app / "d").rename(ws.app / "e")
                (ws.app / "d").symlink_to(tmp_path / "victim")
                (ws.app / "d").unlink(missing_ok=True)
                (ws.app / "e").rename(ws.app / "d")
            os._exit(0)
        while time.monotonic() < end:
            try:
                ws.drop_traps()
            except OSError:
                pass  # what it was about to enter is gone
        os.waitpid(pid, 0)
    assert (tmp_path / "victim" / "pipe-like").is_symlink()


# ---- reading and killing ----


@pytest.mark.parametrize("path", ["/root", "/home", "/var", "/srv", "/run/user", "/etc/shadow", "/etc/passwd",
                                  "/etc/hostname", "/sys", "/usr/local/bin", "/boot", str(ROOT)])
def test_files_of_the_host_cannot_be_read(path):
    result, _ = run(f"ls -A '{path}' && cat '{path}'")
    assert result.exit_code != 0 or result.output.strip() == ""


def test_the_run_directory_and_its_token_cannot_be_read(tmp_path):
    (tmp_path / "token").write_text("run-token")
    result, _ = run(f"cat {tmp_path}/token; grep -rs run-token /tmp /run /dev/shm /app")
    assert "run-token" not in result.output.replace("grep", "")


def test_only_app_and_tmp_can_be_written():
    places = "/ /usr /usr/bin /usr/local /etc /dev /proc /bin /lib /run /run/miles"
    result, _ = run(f"for d in {places}; do touch $d/x 2>/dev/null && echo wrote $d; done; touch /app/x /tmp/x /dev/shm/x && echo fine; rm -rf /usr/bin/ls; ls /usr/bin/ls")
    assert "wrote" not in result.output and "fine\n" in result.output and result.output.endswith("/usr/bin/ls\n")


def test_the_harness_cannot_be_killed():
    result, _ = run(f"kill -9 {os.getpid()} {os.getppid()}; for s in TERM KILL STOP; do kill -$s -1; kill -$s 1; done; (kill -9 -1); echo end")
    assert result.output.count("No such process") >= 2 and result.seconds < 4


# ---- network ----


def test_no_network():
    result, _ = run("cat /proc/net/dev; exec 3<>/dev/tcp/127.0.0.1/22")
    assert result.exit_code != 0
    assert [line.split(":")[0].strip() for line in result.output.splitlines() if ":" in line and "face" not in line][:1] == ["lo"]
    assert "eth" not in result.output


def test_a_listening_port_of_the_host_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        result, _ = run(f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}")
    assert result.exit_code == 1 and "refused" in result.output.lower()


def test_an_abstract_socket_of_the_host_cannot_be_reached_and_no_name_is_resolved():
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0miles-test-abstract")
        server.listen()
        result, _ = run("python3 - <<'EOF'\nimport socket\nfor do in (lambda: socket.socket(socket.AF_UNIX).connect('\\0miles-test-abstract'), lambda: socket.getaddrinfo('example.org', 80),"
                        " lambda: socket.create_connection(('1.1.1.1', 53), 2)):\n  try: do(); print('reached')\n  except OSError as e: print(type(e).__name__)\nEOF")
    assert result.output == "ConnectionRefusedError\ngaierror\nOSError\n"


# ---- bombs ----


def test_a_fork_bomb_is_bounded_and_ends():
    started = time.monotonic()
    result, _ = run(":(){ :|:& };:; for i in $(seq 1 200); do sleep 60 & done; wait", CommandLimits(wall_s=2.0, processes=24, output_chars=20_000))
    assert "Resource temporarily unavailable" in result.output
    assert time.monotonic() - started < 8


def test_an_endless_loop_is_stopped_in_time():
    result, _ = run("echo before; while :; do :; done", CommandLimits(wall_s=1.0))
    assert (result.stopped, result.exit_code, result.output) == ("time", None, "before\n")
    assert 1.0 <= result.seconds < 4.0


def test_a_flood_of_output_is_stopped_early():
    result, _ = run("yes", CommandLimits(wall_s=30.0, output_chars=16))
    assert (result.stopped, result.cut) == ("output", True)
    assert result.seconds < 5


@pytest.mark.parametrize("bomb", [
    "python3 -c 'x = bytearray(10**9)'", "head -c 200000000 /dev/zero | tail -c 199999999 | wc -c", "x=$(yes | head -c 300000000)",
    "python3 -c 'import mmap; m = mmap.mmap(-1, 10**9); m.write(bytes(10**9))'",
])
def test_memory_of_a_process_is_bounded(bomb):
    result, _ = run(bomb, CommandLimits(memory_mb=100))
    assert result.exit_code != 0 or "199999999" not in result.output


@pytest.mark.parametrize("hold", ["b'x' * (60 << 20)", "__import__('mmap').mmap(-1, 60 << 20).write(b'x' * (60 << 20))"])
def test_memory_of_all_processes_together_is_bounded(hold):
    one = f"import time, mmap\nm = mmap.mmap(-1, 60 << 20)\nm.write(b'x' * (60 << 20))\nk = {hold}\ntime.sleep(30)"
    result, _ = run(f"for i in 1 2 3 4 5 6; do python3 -c \"{one}\" & done; wait", CommandLimits(wall_s=20, memory_mb=256))
    assert result.stopped == "memory" and result.seconds < 15


def test_shared_pages_are_counted_once():
    one = "import os, time\nx = b'x' * (80 << 20)\n[os.fork() for _ in range(2)]\ntime.sleep(1.5)"
    assert run(f'python3 -c "{one}"', CommandLimits(memory_mb=200))[0].stopped == ""


def test_one_file_is_bounded():
    result, size = run("head -c 5000000 /dev/zero > big", replace(QUICK, file_mb=2), inspect=lambda ws: (ws.app / "big").stat().st_size)
    assert (result.exit_code != 0, size) == (True, 2 << 20)
    assert run("truncate -s 100G sparse", replace(QUICK, file_mb=2))[0].exit_code != 0


@pytest.mark.parametrize(("fill", "error"), [
    ("for i in $(seq 40); do head -c 1000000 /dev/zero > f$i || exit 1; done", "No space left"),
    ("for i in $(seq 3000); do : > f$i || exit 1; done", "No space left"),
    ("for i in $(seq 3000); do mkdir d$i || exit 1; done", "No space left"),
    ("fallocate -l 15M a && fallocate -l 15M b", "No space left"),
    ("exec 3> gone; rm gone; head -c 15000000 /dev/zero >&3; exec 4> gone; rm gone; head -c 15000000 /dev/zero >&4", "No space left"),
    ("python3 -c \"import mmap, os; fd = os.open('m', 66); os.ftruncate(fd, 15 << 20); m = mmap.mmap(fd, 15 << 20)\n"
     "for i in range(0, 15 << 20, 4096): m[i] = 1\nopen('n', 'wb').write(bytes(15 << 20))\"", ""),
])
def test_disk_use_is_bounded_in_bytes_and_in_files(fill, error):
    limits = CommandLimits(wall_s=20, disk_mb=16, file_mb=64, output_chars=2000)
    result, used = run(fill, limits, inspect=lambda ws: os.statvfs(ws.app))
    assert result.exit_code != 0 and error in result.output
    assert used.f_blocks * used.f_frsize == 16 << 20 and used.f_files == 16 * 128


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_tmp_and_shm_are_small_in_bytes_and_files_and_forgotten(folder):
    result, _ = run(f"cd {folder}; for i in 1 2 3; do head -c 30000000 /dev/zero > f$i; done; rm f*; for i in $(seq 9000); do : > $i || break; done; ls | wc -l",
                    replace(QUICK, wall_s=15.0))
    assert result.output.count("No space left") == 2 and int(result.output.split()[-1]) < 8192
    assert run(f"ls -A {folder}")[0].output == ""


def test_cpu_seconds_of_all_processes_together_are_bounded():
    result, _ = run("for i in 1 2 3; do (while :; do :; done) & done; wait", CommandLimits(wall_s=30, cpu_s=1.0))
    assert result.stopped == "cpu" and result.seconds < 10


def test_cpu_seconds_of_processes_that_nobody_waits_for_are_bounded():
    code = "import signal, os\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n  if os.fork() == 0:\n    sum(range(300000)); os._exit(0)"
    result, _ = run(f"python3 -c \"{code}\" 2>/dev/null", CommandLimits(wall_s=40, cpu_s=1.0, processes=16))
    assert result.stopped == "cpu" or result.exit_code != 0


# ---- nothing outlives ----


@pytest.mark.parametrize("command", ["sleep 300.25 & echo started", "setsid nohup sleep 300.25 >/dev/null 2>&1 & echo started",
                                     "(trap '' TERM HUP; sleep 300.25) & disown; echo started"])
def test_background_processes_are_gone_when_the_command_ends(command):
    result, _ = run(command)
    assert result.output == "started\n" and result.exit_code == 0 and result.seconds < 4
    assert not alive("300.25")


def test_processes_are_gone_after_a_time_limit():
    run("setsid sleep 300.75 & sleep 300.75", CommandLimits(wall_s=0.5))
    assert not alive("300.75")


def test_processes_are_gone_when_the_caller_is_cancelled():
    async def cancelled():
        with Workspace() as ws:
            sandbox = Sandbox()
            await sandbox.check()
            task = asyncio.ensure_future(sandbox.run("sleep 300.5", ws, CommandLimits(wall_s=60)))
            await asyncio.to_thread(wait_for, lambda: alive("300.5"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    assert not alive("300.5")


HARNESS = """
import asyncio, sys
from miles.env import *
async def main():
    sandbox = Sandbox()
    with sandbox.workspace(None, CommandLimits(wall_s=60)) as ws:
        async with Shell(sandbox, ws, CommandLimits(wall_s=60)) as shell:
            await asyncio.gather(shell.run("setsid sleep 300.125 & sleep 300.125"), sandbox.run("sleep 300.125", ws, CommandLimits(wall_s=60)))
asyncio.run(main())
"""


def test_everything_is_gone_when_the_harness_is_killed():
    child = subprocess.Popen([sys.executable, "-c", HARNESS], cwd=ROOT)
    try:
        wait_for(lambda: alive("300.125"))
    finally:
        child.kill()
        child.wait()
    wait_for(lambda: not alive("300.125"), 5)


def launchers():
    out = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(line.split()[0]) for line in out if "miles-env" in line or "miles-tmp" in line}


def test_no_launcher_is_left_whenever_the_harness_is_killed_while_it_sets_a_sandbox_up():
    before = launchers()
    code = "import asyncio, sys\nfrom miles.env import *\nprint('ready', flush=True)\nasyncio.run(Sandbox().check())"
    for delay in (0.0, 0.004, 0.008, 0.012, 0.016, 0.02, 0.025, 0.03):
        child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(delay)
        child.kill()
        child.wait()
        child.stdout.close()
    wait_for(lambda: not launchers() - before, 5)


# ---- what killed harnesses leave of plain folders ----


def test_plain_workspaces_of_dead_owners_are_swept_with_their_processes_and_others_are_not(tmp_path):
    code = f"import os, subprocess, pathlib\nfrom miles.env import Workspace\nw = Workspace(disk_mb=None, scratch=pathlib.Path({str(tmp_path)!r}))\n" \
           "p = subprocess.Popen(['sh', '-c', 'sleep 300.625', str(w.root)], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n" \
           "print(p.pid, flush=True)\nos.kill(os.getpid(), 9)"
    dead = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert dead.returncode == -signal.SIGKILL
    for name in ("miles-env-1-1-1-x", "miles-env-old", "other"):  # another pid namespace's, an older version's, somebody else's
        (tmp_path / name).mkdir()
    with Workspace(disk_mb=None, scratch=tmp_path) as mine:
        swept = sweep(tmp_path)
        assert len(swept) == 1 and mine.root.is_dir()
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["miles-env-1-1-1-x", "miles-env-old", "other", mine.root.name])
    assert int(dead.stdout) and not alive("300.625")


def test_a_workspace_in_memory_leaves_no_folder_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Workspace() as ws:
        assert (ws.app.is_dir(), list(tmp_path.iterdir())) == (True, [])
    assert not ws.root.exists()


async def _shell_sees(command):
    sandbox = Sandbox()
    with sandbox.workspace(None, QUICK) as ws:
        async with Shell(sandbox, ws, QUICK) as shell:
            return await shell.run(command)


def test_the_shell_of_an_episode_is_confined_like_a_single_command():
    out = asyncio.run(_shell_sees("grep -E 'Cap(Prm|Eff|Bnd)|Seccomp:' /proc/$$/status; unshare -U true || echo refused; ls /root /home; "
                                  "cat /proc/net/dev | wc -l; touch /run/miles/x")).output
    assert out.count("0000000000000000") == 3 and "Seccomp:\t2" in out and "refused" in out and out.count("No such file") == 2 and "\n3\n" in out
    assert "Read-only" in out
