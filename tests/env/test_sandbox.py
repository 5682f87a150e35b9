"""Single commands run confined: what they give back, what workspaces hold, and which machines and launchers are refused."""

import asyncio
import os
import shutil
import signal

import pytest

from miles.core import ConfigError, EnvironmentFault
from miles.env import CommandLimits, Sandbox, Shell, Workspace, processes
from miles.env import sandbox as sandbox_module
from miles.env import workspace as workspace_module
from tests.env.boxes import run

QUICK = CommandLimits(wall_s=5.0, output_chars=400, processes=32)


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


# ---- workspaces ----


def test_links_out_of_the_folder_and_pipes_are_dropped_before_tests():
    def left(ws):
        ws.drop_traps()
        return sorted(str(p.relative_to(ws.app)) for p in ws.app.rglob("*"))

    made = "mkdir d; echo x > real; ln -s real in; ln -s ../real d/in; ln -s /tests/expected out; ln -s ../../etc d/up; ln -s /app/real abs; mkfifo pipe"
    assert run(made, inspect=left)[1] == ["d", "d/in", "in", "real"]


def test_a_workspace_without_rights_is_still_removed():
    with Workspace(disk_mb=None) as ws:
        deep = "n=$(printf 'd%.0s' {1..200}); for i in $(seq 40); do mkdir $n && cd $n; done"  # longer than a path may be
        asyncio.run(Sandbox("unconfined-i-know").run(f"mkdir -p a/b; touch a/b/c; chmod 000 a/b a; {deep}", ws, CommandLimits(wall_s=20)))
    assert not ws.root.exists()


def test_folders_nested_too_deeply_are_closed_before_tests_and_rights_are_given_back():
    def left(ws):
        ws.drop_traps()
        path, depth = ws.app, 0
        while os.access(path, os.X_OK) and (path / "d").is_dir() and path.stat().st_mode & 0o777:
            path, depth = path / "d", depth + 1
        return depth

    _, depth = run("for i in $(seq 130); do mkdir d && cd d || break; done; echo x > f; chmod 000 /app/d/d /app/d", CommandLimits(wall_s=20), inspect=left)
    assert depth == 101


def test_an_app_that_was_filled_up_has_room_for_the_tests():
    def grown(ws):
        ws.make_room()
        (ws.app / "more").write_bytes(bytes(100_000))
        return True

    assert run("head -c 5000000 /dev/zero > a", CommandLimits(disk_mb=2), inspect=grown)[1]


def test_start_files_that_do_not_fit_the_disk_are_refused(tmp_path):
    (tmp_path / "big").write_bytes(bytes(3 << 20))
    with pytest.raises(ConfigError, match=r"does not fit into 2 MiB[\s\S]*tasks.disk_mb"):
        Workspace(tmp_path, disk_mb=2)


def test_start_files_are_copied_without_the_dockerfile(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian")
    (tmp_path / "a.txt").write_text("red\n")
    (tmp_path / "a.txt").chmod(0o600)
    with Workspace(tmp_path) as ws:
        result = asyncio.run(Sandbox().run("ls; cat a.txt; echo blue > a.txt", ws, QUICK))
    assert result.output == "a.txt\nred\n" and (tmp_path / "a.txt").read_text() == "red\n"


def test_a_workspace_that_is_being_made_when_its_user_is_cancelled_is_closed():
    made = []

    class Recorded(Sandbox):
        def workspace(self, *args):
            made.append(super().workspace(*args))
            return made[-1]

    async def cancelled():
        async def use():
            async with Recorded().opened(None, QUICK):
                raise AssertionError("never entered")

        job = asyncio.ensure_future(use())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        while not made or made[0].root.exists():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancelled(), 10))


# ---- refusals ----


def test_a_namespace_that_does_not_end_is_a_fault_after_a_while(monkeypatch):
    monkeypatch.setattr(workspace_module, "CLOSE_S", 0.1)
    ws = Workspace()
    os.kill(ws._holder.pid, signal.SIGSTOP)  # its child ends, and nobody hears of it
    monkeypatch.setattr(workspace_module.os, "killpg", lambda *_: None)
    with pytest.raises(EnvironmentFault, match="lives 0.1 s after SIGKILL"):
        ws.close()
    os.kill(ws._holder.pid, signal.SIGKILL)
    ws._holder.wait(10)


def test_a_machine_that_makes_no_namespaces_is_a_fault_that_says_what_to_look_at(monkeypatch):
    monkeypatch.setattr(workspace_module, "_HOLD", "echo 'unshare: Operation not permitted' >&2; exit 1")
    with pytest.raises(EnvironmentFault, match=r"Operation not permitted[\s\S]*max_user_namespaces"):
        Workspace()


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
    with pytest.raises(ConfigError, match="sandbox_image"):
        Sandbox("apptainer")


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
            limits = CommandLimits(processes=20, disk_mb=4)
            result, owner = run("id -u; echo x > f; cat f; for i in $(seq 60); do sleep 9 & done", limits, inspect=lambda ws: (ws.app / "f").stat().st_uid)
            full, _ = run("head -c 9000000 /dev/zero > big", limits)
            shell = asyncio.run(in_a_shell("cd /usr; sleep 20 & x=1", "sleep 20", "echo $x; pwd", limits=CommandLimits(wall_s=0.5)))
            os.write(writing, f"{owner} {result.output} {full.output} {shell.output}".encode())
        except BaseException as e:
            os.write(writing, repr(e).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.startswith("61100 1000\nx\n") and "Resource temporarily unavailable" in said and "No space left" in said and said.endswith("1\n/usr\n")


async def in_a_shell(*commands, limits):
    sandbox = Sandbox()
    with sandbox.workspace(None, limits) as ws:
        async with Shell(sandbox, ws, limits) as shell:
            return [await shell.run(c) for c in commands][-1]


def test_a_holder_that_the_kernels_list_of_children_misses_is_looked_for_again(monkeypatch):
    real, looks = processes.below, []

    def below(pid):
        looks.append(pid)
        return real(pid) if len(looks) > 2 else []

    monkeypatch.setattr(processes, "below", below)
    with Workspace() as ws:
        assert len(looks) >= 3 and ws.app.is_dir()


def test_a_holder_that_is_killed_is_a_fault_of_the_machine(monkeypatch):
    def below(pid):
        os.killpg(pid, signal.SIGKILL)
        return []

    monkeypatch.setattr(processes, "below", below)
    with pytest.raises(EnvironmentFault, match="was killed"):
        Workspace()
