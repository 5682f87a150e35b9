"""The shell of an episode: what lives from command to command, how each command's end is known, and what happens when a command or the shell does not end."""

import asyncio
import os
import time

import pytest

from miles.env import CommandLimits, Sandbox, Shell
from miles.env import shell as shell_module

LIMITS = CommandLimits(wall_s=5.0, output_chars=400, processes=32)


def play(*commands, limits=LIMITS, kind="bubblewrap", inspect=None):
    """The results of commands in one shell; `inspect(workspace)` looks at the files between the last command and the end."""

    async def all_of_them():
        sandbox = Sandbox(kind)
        with sandbox.workspace(None, limits) as ws:
            async with Shell(sandbox, ws, limits) as shell:
                results = [await shell.run(c) for c in commands]
                if inspect:
                    inspect(ws)
                return results

    return asyncio.run(all_of_them())


def outputs(*commands, **kwargs):
    return [r.output for r in play(*commands, **kwargs)]


# ---- what lives on ----


@pytest.mark.parametrize("kind", ["bubblewrap", "unconfined-i-know"])
def test_working_directory_variables_and_functions_live_from_command_to_command(kind):
    said = outputs("mkdir -p d && cd d", "x=3; export y=4; f() { echo \"f $x\"; }", "echo $x; f; bash -c 'echo $y $x'; basename $PWD", kind=kind)
    assert said == ["", "", "3\nf 3\n4\nd\n"]


def test_both_streams_and_the_exit_code_come_back():
    result, = play("echo out; echo err >&2; (exit 3)")
    assert (result.output, result.exit_code, result.stopped, result.cut, result.fresh_shell) == ("out\nerr\n", 3, "", False, False)


def test_background_jobs_go_on_between_commands():
    assert outputs("(sleep 0.3; echo late > f) & disown", "sleep 0.6; cat f")[1] == "late\n"
    assert "Running" in outputs("sleep 30 &", "jobs")[1]


def test_what_a_job_writes_after_its_command_is_in_no_later_record():
    said = outputs("(sleep 0.2; echo late; sleep 0.2; echo later) & disown", "sleep 0.5; echo mine", "echo next; wait")
    assert said[1:] == ["mine\n", "next\n"]


def test_a_job_that_floods_after_its_command_waits_and_harms_nobody():
    started = time.monotonic()
    assert outputs("(sleep 0.1; yes) & disown", "sleep 1; echo fine")[1] == "fine\n"
    assert time.monotonic() - started < 5


# ---- nothing keeps a command from ending ----


@pytest.mark.parametrize(("command", "exit_code"), [
    ("echo 'never closed", 2), ('echo "never closed', 2), ("if true; then", 2), ("cat <<EOF\nnever ended", 0), (")", 2), ("case x in", 2), ("echo a \\", 0),
    ("${x?gone}", 1), ("set -u; echo $nope", 1), ("#", 0), ("echo $((1/0))", 1), ("return 4", 2), ("break; continue", 0),
])
def test_broken_syntax_ends_and_the_shell_goes_on(command, exit_code):
    first, second = play(command, "echo fine")
    assert (first.exit_code, first.stopped, first.fresh_shell) == (exit_code, "", False)
    assert (second.output, second.fresh_shell) == ("fine\n", False)


@pytest.mark.parametrize("command", ["cat", "read x", "bash", "python3 -i", "less /etc/passwd", "sh -c 'read x < /dev/tty'", "while read l; do :; done", "su"])
def test_programs_that_wait_for_a_person_find_an_empty_input_and_no_terminal(command):
    first, second = play(command, "echo fine", limits=CommandLimits(wall_s=8.0))
    assert (first.stopped, second.output) == ("", "fine\n")


def test_a_command_that_is_no_text_for_bash_is_an_ordinary_failure():
    assert [r.exit_code for r in play("echo a\0b", "#" * 200_000, "echo \ud800", "# " + "x" * 90_000)] == [126, 126, 0, 0]


@pytest.mark.parametrize("command", [
    "sleep 300.5", "while :; do :; done", "f() { f2; }; f2() { while :; do sleep 0.01; done; }; f", "sleep 300.5 | cat", "x=$(sleep 300.5)",
    "(trap '' INT TERM HUP; while :; do sleep 300.5; done)", "sleep 300.5; echo next; sleep 300.5", "for i in 1 2 3; do sleep 300.5; done; sleep 300.5",
    "setsid sleep 300.5", "wait; coproc sleep 300.5; wait", "mkfifo /tmp/p; cat /tmp/p", "until false; do (sleep 300.5); done", "mapfile < <(yes)", "vi f",
])
def test_a_command_over_its_time_is_stopped_and_the_shell_with_its_state_lives(command):
    alive = []
    results = play("x=kept; cd /usr; sleep 200.5 &", command, "echo $x; pwd; jobs | wc -l; ps -eo args | grep -c '^sleep 300.5'",
                   limits=CommandLimits(wall_s=1.5, processes=64), inspect=lambda ws: alive.append(True))  # the third has to end in time too, on a busy machine
    assert (results[1].stopped, results[1].exit_code, results[1].fresh_shell) == ("time", None, False)
    assert results[2].output == ("kept\n" if "x=$" not in command else results[2].output.split("\n")[0] + "\n") + "/usr\n1\n0\n"


@pytest.mark.parametrize("command", ["trap '' INT; while :; do sleep 0.1; done", "kill -STOP $$", "builtin() { :; }", "enable -n printf", "exec sleep 300.5", "exec 0<&- 1>&- 2>&-; sleep 300.5"])
def test_a_shell_that_cannot_be_stopped_is_replaced_and_the_model_is_told(command):
    first, second = play(command, "echo fine; pwd", limits=CommandLimits(wall_s=0.6))
    assert first.stopped == "time" and first.seconds < 5
    assert second.output == "fine\n/app\n"


def test_a_flood_is_stopped_early_and_the_shell_lives():
    first, second = play("x=1; yes", "echo $x", limits=CommandLimits(wall_s=30, output_chars=12))
    assert (first.stopped, first.exit_code, first.cut, second.output) == ("output", None, True, "1\n")
    assert first.output.startswith("y\ny\ny\n[") and first.output.endswith(" characters left out]\ny\ny\ny\n") and first.seconds < 5


# ---- the shell's own end ----


@pytest.mark.parametrize(("command", "exit_code"), [("exit 7", 7), ("kill -9 $$", 137), ("exec true", 0), ("exec sh -c 'exit 5'", 5), ("set -e; false", 1), ("kill -SEGV $$", 139)])
def test_a_shell_that_ends_is_replaced_in_the_same_workspace(command, exit_code):
    results = play("cd /usr; x=1; echo kept > /app/f", command, "pwd; echo \"[$x]\"; cat f", "echo same")
    assert [r.fresh_shell for r in results] == [False, True, False, False]
    assert results[1].exit_code == exit_code and results[2].output == "/app\n[]\nkept\n"


def test_a_shell_killed_between_two_commands_is_replaced():
    results = play("(sleep 0.2; kill -9 $PPID; kill -9 -1) & disown; sleep 0.1", "sleep 0.5", "echo fine")
    assert any(r.fresh_shell for r in results) and results[2].output == "fine\n"


# ---- what a command can do to its record ----


def test_a_line_like_the_end_of_a_command_is_output():
    said = outputs("echo 0123456789abcdef0123456789abcdef 0; printf '%s %d\\n' deadbeef 0; sleep 0.3; echo end")
    assert said == ["0123456789abcdef0123456789abcdef 0\ndeadbeef 0\nend\n"]


def test_forging_the_end_through_the_shells_own_descriptors_harms_only_the_record():
    """Bash is in the sandbox, so code in it can find the channel; what it says there without the word is not believed."""
    first, second = play("for fd in /proc/$$/fd/1?; do echo 'deadbeef 0' > $fd; done 2>/dev/null; head -c 100000 /dev/zero > /proc/$$/fd/11; sleep 0.3; echo end", "echo fine")
    assert second.output == "fine\n"
    assert first.output.endswith("end\n") and first.seconds >= 0.3


@pytest.mark.parametrize("command", ["set -x; set -v", "PS1='> '; PS2='? '; PS4='%'", "trap 'echo debug' DEBUG", "IFS=/; set -f; shopt -s extglob", "PROMPT_COMMAND='echo prompt'",
                                     "printf() { :; }; eval() { :; }; unset PATH", "alias builtin=false printf=false", "exec 3>&1 4<&0", "set -o posix", "set -n"])
def test_settings_of_the_shell_do_not_break_the_records(command):
    results = play(command, "echo fine", limits=CommandLimits(wall_s=2.0))
    assert results[1].output.splitlines()[-1] == "fine" and results[1].exit_code == 0
    assert results[0].stopped == ""


def test_exit_codes_do_not_pass_through_the_shells_word_splitting():
    assert [r.exit_code for r in play("IFS=0123456789; (exit 12)", "(exit 7)")] == [12, 7]


def test_commands_have_only_their_three_descriptors():
    assert outputs("bash -c 'for i in {0..300}; do [ -e /proc/self/fd/$i ] && echo $i; done'") == ["0\n1\n2\n"]


# ---- the end of the episode ----


def test_nothing_is_alive_and_no_fifo_is_left_after_the_episode():
    left = []
    play("setsid nohup sleep 400.5 >/dev/null 2>&1 &", "(sleep 400.5 &)", "true", inspect=lambda ws: left.extend(os.listdir(ws.root / "control")))
    assert left == []
    assert not any("sleep 400.5" in line for line in os.popen("ps -eo args").read().splitlines() if line.startswith("sleep"))


def test_a_cancelled_command_leaves_nothing():
    async def cancelled():
        sandbox = Sandbox()
        with sandbox.workspace(None, LIMITS) as ws:
            async with Shell(sandbox, ws, LIMITS) as shell:
                job = asyncio.ensure_future(shell.run("sleep 400.25"))
                await asyncio.sleep(0.5)
                job.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await job
                return len(asyncio.all_tasks())

    asyncio.run(cancelled())
    assert not any(line.startswith("sleep 400.25") for line in os.popen("ps -eo args").read().splitlines())


# ---- limits of the whole shell ----


def hold(processes: int) -> str:
    """Shell text: so many background processes that hold 25 MB each (``tail`` keeps the unfinished line it is given) for a minute."""
    return f"for i in $(seq {processes}); do (head -c 25000000 /dev/zero; sleep 60) | tail -n 1 >/dev/null & done; wait"


def test_memory_of_all_processes_together_is_bounded():
    first, second = play(hold(6), "echo fine", limits=CommandLimits(wall_s=50, memory_mb=100))
    assert (first.stopped, second.output) == ("memory", "fine\n")


def test_memory_that_a_job_takes_between_commands_ends_the_shell():
    async def idle():
        limits = CommandLimits(memory_mb=80)
        sandbox = Sandbox()
        with sandbox.workspace(None, limits) as ws:
            async with Shell(sandbox, ws, limits) as shell:
                await shell.run(f"(sleep 0.3; {hold(5)}) & disown")
                await asyncio.sleep(4)
                return [await shell.run("echo fine"), await shell.run("ps -e | wc -l")]

    first, second = asyncio.run(idle())
    assert (first.output, first.fresh_shell) == ("fine\n", True)
    assert int(second.output) < 8


def test_cpu_seconds_count_over_all_processes_and_shells_of_the_episode():
    limits = CommandLimits(wall_s=20, cpu_s=1.0)
    first, _, third = play("(while :; do :; done) & (while :; do :; done) & wait", "exit", "while :; do :; done", limits=limits)
    assert (first.stopped, first.seconds < 10) == ("cpu", True)
    assert third.stopped == "cpu" and third.seconds < 3


def test_the_number_of_processes_is_of_the_whole_shell():
    start = "for i in $(seq 12); do sleep 30 & done"
    results = play(start, start, "echo fine", limits=CommandLimits(wall_s=1.5, processes=20, output_chars=4000))
    assert results[0].stopped == "" and "Resource temporarily unavailable" in results[1].output


def test_shell_start_is_bounded(monkeypatch):
    monkeypatch.setattr(shell_module, "_BASH", ("sleep", "60"))
    monkeypatch.setattr(shell_module, "_START_S", 0.5)
    from miles.core import EnvironmentFault

    with pytest.raises(EnvironmentFault, match="did not start the command"):
        play("true")
