"""Commands run confined: what they can do, and an attack list of what they must not be able to do."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import miles
from miles.core import ConfigError, EnvironmentFault
from miles.env import CommandLimits, Sandbox, Workspace
from miles.env import sandbox as sandbox_module

QUICK = CommandLimits(wall_s=5.0, output_chars=400, processes=32)


def run(command, limits=QUICK, files=None, kind="bubblewrap", inspect=None, **mounts):
    """(result, what `inspect(workspace)` returned) of one command in a fresh workspace."""
    with Workspace() as ws:
        for name, text in (files or {}).items():
            (ws.app / name).write_text(text)
        result = asyncio.run(Sandbox(kind).run(command, ws, limits, **mounts))
        return result, inspect(ws) if inspect else None


def test_output_of_both_streams_and_the_exit_code_come_back():
    result, _ = run("echo out; echo err >&2; exit 3")
    assert (result.output, result.exit_code, result.stopped, result.cut) == ("out\nerr\n", 3, "", False)


def test_files_written_are_seen_by_the_next_command():
    async def two(ws):
        sandbox = Sandbox()
        await sandbox.run("echo one > a.txt", ws, QUICK)
        return await sandbox.run("cat a.txt; pwd", ws, QUICK)

    with Workspace() as ws:
        assert asyncio.run(two(ws)).output == "one\n/app\n"


def test_invalid_utf8_and_long_output_are_safe():
    result, _ = run(r"printf 'a\xff\xfeb'")
    assert result.output == "a��b"
    result, _ = run("seq 1 1000", CommandLimits(output_chars=16))
    assert (result.output, result.cut, result.exit_code) == ("1\n2\n3\n4\n5\n6\n7\n8\n", True, 0)


def test_text_of_four_byte_characters_is_kept_up_to_the_limit_in_characters():
    result, _ = run("for i in $(seq 1 20); do printf '😀'; done", CommandLimits(output_chars=16))
    assert (result.output, result.cut) == ("😀" * 16, True)


def test_a_command_that_reads_its_input_does_not_wait():
    result, _ = run("cat; read x; echo $?")
    assert result.output == "1\n" and result.seconds < 2


def test_a_command_with_a_nul_byte_or_no_end_is_an_ordinary_failure():
    assert run("echo a\0b")[0].exit_code == 126
    assert run("#" * 200_000)[0].exit_code == 126
    assert run("echo \ud800")[0].exit_code == 0


def test_ordinary_tools_work():
    result, _ = run("printf 'b\\na\\n' | sort | awk '{print NR $1}' | sed s/1/x/ | tr a-z A-Z; mkdir d && cp -r d e && ls")
    assert result.output == "XA\n2B\nd\ne\n"


# ---- attacks ----


def test_no_network():
    result, _ = run("cat /proc/net/dev; exec 3<>/dev/tcp/127.0.0.1/22")
    assert result.exit_code != 0
    assert [line.split(":")[0].strip() for line in result.output.splitlines() if ":" in line and "face" not in line][:1] == ["lo"]
    assert "eth" not in result.output


def test_a_listening_port_of_the_host_cannot_be_reached():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        result, _ = run(f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}")
    assert result.exit_code == 1 and "refused" in result.output.lower()


@pytest.mark.parametrize("path", ["/root", "/home", "/work", "/var", "/etc/shadow", "/etc/hostname", "/sys", "/usr/local/bin", str(Path(miles.__file__).parent)])
def test_files_of_the_host_cannot_be_read(path):
    result, _ = run(f"ls -A '{path}' && cat '{path}'")
    assert result.exit_code != 0 or result.output.strip() == ""


def test_only_app_and_tmp_can_be_written():
    places = "/ /usr /usr/bin /usr/local /etc /dev /proc /bin /lib"
    result, _ = run(f"for d in {places}; do touch $d/x 2>/dev/null && echo wrote $d; done; touch /app/x /tmp/x /dev/shm/x && echo fine; rm -rf /usr/bin/ls; ls /usr/bin/ls")
    assert "wrote" not in result.output and "fine\n" in result.output and result.output.endswith("/usr/bin/ls\n")


def test_tmp_is_small_and_forgotten():
    result, _ = run("for i in 1 2 3 4 5 6; do head -c 30000000 /dev/zero > /tmp/f$i; done; du -sm /tmp")
    assert "No space left" in result.output
    assert run("ls -A /tmp")[0].output == ""


def test_no_environment_variable_of_the_host_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert "abc" not in run("env; cat /proc/*/environ")[0].output


def test_no_capability_and_no_nested_user_namespace():
    result, _ = run("grep -E 'Cap(Prm|Eff|Bnd)' /proc/self/status; unshare -U true; mount -t tmpfs x /app")
    assert result.output.count("0000000000000000") == 3 and result.exit_code != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_as_root_commands_own_nothing_of_root():
    _, owner = run("touch mine; chmod u+s mine", inspect=lambda ws: (ws.app / "mine").stat().st_uid)
    assert owner in range(61184, 65520)


def test_the_harness_cannot_be_killed_or_seen():
    result, _ = run(f"kill -9 {os.getpid()} {os.getppid()}; kill -9 -1; ls -d /proc/[0-9]* | wc -l")
    assert result.exit_code != 0 or int(result.output.split()[-1]) < 6  # its own few processes


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
    result, _ = run("yes", CommandLimits(wall_s=30.0, output_chars=10))
    assert (result.stopped, result.output, result.cut) == ("output", "y\ny\ny\ny\ny\n", True)
    assert result.seconds < 5


def test_memory_and_file_size_are_bounded():
    result, _ = run("head -c 200000000 /dev/zero | tail -c 199999999 | wc -c", CommandLimits(memory_mb=100))
    assert "199999999" not in result.output
    result, size = run("head -c 5000000 /dev/zero > big", CommandLimits(file_mb=2), inspect=lambda ws: (ws.app / "big").stat().st_size)
    assert (result.exit_code != 0, size) == (True, 2 << 20)


@pytest.mark.parametrize("command", ["sleep 300.25 & echo started", "setsid nohup sleep 300.25 >/dev/null 2>&1 & echo started", "(trap '' TERM HUP; sleep 300.25) & disown; echo started"])
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


def test_processes_are_gone_when_the_harness_is_killed(tmp_path):
    script = ("import asyncio\nfrom miles.env import *\n"
              "asyncio.run(Sandbox().run('sleep 300.125', Workspace(), CommandLimits(wall_s=60)))")
    child = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": "/tmp"}, cwd=Path(miles.__file__).parent.parent)
    try:
        wait_for(lambda: alive("300.125"))
    finally:
        child.kill()
        child.wait()
    wait_for(lambda: not alive("300.125"))


def alive(mark):
    time.sleep(0.1)
    out = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return any(line.startswith(("sleep " + mark, "setsid sleep " + mark)) for line in out.splitlines())


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"


# ---- workspaces ----


def test_links_out_of_the_folder_and_pipes_are_dropped_before_tests():
    def left(ws):
        ws.drop_traps()
        return sorted(str(p.relative_to(ws.app)) for p in ws.app.rglob("*"))

    made = "mkdir d; echo x > real; ln -s real in; ln -s ../real d/in; ln -s /tests/expected out; ln -s ../../etc d/up; ln -s /app/real abs; mkfifo pipe"
    assert run(made, inspect=left)[1] == ["d", "d/in", "in", "real"]


def test_a_workspace_without_rights_is_still_removed():
    with Workspace() as ws:
        asyncio.run(Sandbox().run("mkdir -p a/b; touch a/b/c; chmod 000 a/b a", ws, QUICK))
    assert not ws.root.exists()


def test_start_files_are_copied_without_the_dockerfile(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian")
    (tmp_path / "a.txt").write_text("red\n")
    (tmp_path / "a.txt").chmod(0o600)
    with Workspace(tmp_path) as ws:
        result = asyncio.run(Sandbox().run("ls; cat a.txt; echo blue > a.txt", ws, QUICK))
    assert result.output == "a.txt\nred\n" and (tmp_path / "a.txt").read_text() == "red\n"


# ---- refusals ----


def test_a_missing_bubblewrap_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda tool: None if tool == "bwrap" else shutil.which.__name__)
    with pytest.raises(EnvironmentFault, match=r"bwrap not found[\s\S]*apt-get install bubblewrap"):
        asyncio.run(Sandbox().check())


def test_a_bubblewrap_that_does_not_start_is_a_fault_and_no_result(tmp_path):
    with pytest.raises(EnvironmentFault, match=r"did not start the command[\s\S]*nowhere"):
        run("true", readonly={"/tests": tmp_path / "nowhere"})


def test_an_unknown_kind_of_sandbox_is_refused():
    with pytest.raises(ConfigError, match="unconfined-i-know"):
        Sandbox("none")


def test_unconfined_runs_only_when_asked_for_by_name_and_keeps_its_limits():
    result, _ = run("pwd; ls -d /root", kind="unconfined-i-know")
    assert result.output.endswith("/app\n/root\n")
    result, _ = run("while :; do :; done", CommandLimits(wall_s=0.5), kind="unconfined-i-know")
    assert result.stopped == "time"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become an ordinary user")
def test_it_works_for_an_ordinary_user_too():
    reading, writing = os.pipe()
    child = os.fork()  # a fork, since this Python may be in a folder that the other user cannot enter
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(61100)
            os.setuid(61100)
            result, owner = run("id -u; echo x > f; cat f; for i in $(seq 60); do sleep 9 & done", CommandLimits(processes=20),
                                inspect=lambda ws: (ws.app / "f").stat().st_uid)
            os.write(writing, f"{owner} {result.output}".encode())
        except BaseException as e:
            os.write(writing, repr(e).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.startswith("61100 1000\nx\n") and "Resource temporarily unavailable" in said
