"""The reward comes from the tests: they cannot be read, changed, fooled or forged by what the model does or leaves behind."""

import asyncio
from types import SimpleNamespace

import pytest

from miles.env import CommandLimits, EpisodeLimits, run_episode

LIMITS = EpisodeLimits(max_turns=4, deadline_s=60.0, command=CommandLimits(wall_s=8.0, output_chars=200, disk_mb=16))


def play(task, *commands, limits=LIMITS):
    replies = iter([*commands, "DONE"])
    shown = []

    async def chat(messages):
        shown.append(messages[-1]["content"])
        content = next(replies)
        return SimpleNamespace(content=content, finish_reason="stop", message={"role": "assistant", "content": content})

    return asyncio.run(run_episode(task, chat, limits)), shown


@pytest.mark.parametrize(
    "attack",
    [
        "ls /tests; cat /tests/*; mkdir -p /tests; echo exit 0 > /tests/test.sh",  # they are not there yet
        "mkdir -p tests; echo exit 0 > tests/test.sh; echo exit 0 > test.sh",  # other files of the same name
        "ln -s /tests/expected out.txt",  # the answer, by a link that leads nowhere yet
        "ln -s ../tests/expected out.txt",
        "mkdir d; ln -s ../../tests d/t; ln -s d/t/expected out.txt",  # by two links
        "ln -s /proc/self/fd/0 out.txt",
        "mkfifo out.txt",  # a test that waits for ever
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('out.txt')\"",
        "mkdir out.txt",
        "head -c 8000000 /dev/zero > out.txt",  # too large to compare
        "chmod 000 . ; chmod 000 /app",
        "echo hello > out.txt; chmod 000 out.txt; mkdir x; chmod 000 x; rm out.txt",
        "head -c 20000000 /dev/zero > full",  # nothing can be written any more
        "for i in $(seq 3000); do : > f$i; done 2>/dev/null",
        "n=$(printf 'd%.0s' {1..60}); for i in $(seq 150); do mkdir $n; cd $n; done",
    ],
)
def test_the_tests_cannot_be_read_or_made_to_fail(make_task, attack):
    """A reward of 0 and no fault: a model must not choose between a bad reward and a sample that is taken again."""
    task = make_task('echo x > tmp-of-tests && sleep 0.1; [ "$(cat out.txt)" = "$(cat /tests/expected)" ] || exit 1')
    (task.tests / "expected").write_text("hello\n")
    before = (task.tests / "test.sh").read_text()
    assert play(task, attack)[0].reward == 0.0
    assert (task.tests / "test.sh").read_text() == before


@pytest.mark.parametrize(
    "attack",
    [
        "(sleep 1; echo hello > out.txt) & disown; (while :; do echo exit 0 > /tests/test.sh; done) 2>/dev/null & disown",  # waits for the tests
        "setsid nohup sh -c 'sleep 0.5; while :; do echo hello > /app/out.txt; done' >/dev/null 2>&1 &",
        "(trap '' TERM HUP INT; while :; do echo 1 > /logs/verifier/reward.txt; echo hello > out.txt; sleep 0.05; rm out.txt; done) 2>/dev/null & disown; sleep 0.02; rm -f out.txt",
    ],
)
def test_nothing_of_the_model_is_alive_when_the_tests_run(make_task, attack):
    task = make_task('rm -f out.txt; sleep 1.5; [ "$(cat out.txt)" = hello ] || exit 1')
    assert play(task, attack)[0].reward == 0.0


@pytest.mark.parametrize(
    "attack",
    [
        "echo 'exit 0' > .bashrc; echo 'exit 0' > .profile; echo 'exit 0' > .bash_profile; export BASH_ENV=/app/.bashrc ENV=/app/.bashrc",
        "echo 'exit 0' > cat; chmod +x cat; export PATH=.:/app:$PATH; mkdir -p bin .local/bin; cp cat bin/; cp cat .local/bin/; hash -p /app/cat cat",
        "cat() { echo hello; }; export -f cat; test() { :; }; export -f test; alias cat='echo hello'",
        "export LD_PRELOAD=/app/x.so LD_LIBRARY_PATH=/app PYTHONPATH=/app PYTHONSTARTUP=/app/s.py PERL5LIB=/app; echo x > x.so",
        "enable -n echo; set -o noexec; trap 'exit 0' EXIT; ulimit -f 0",
    ],
)
def test_the_shell_of_the_tests_is_not_the_models(make_task, attack):
    assert play(make_task('[ "$(cat out.txt 2>/dev/null)" = hello ] || exit 1'), attack)[0].reward == 0.0


@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt",
        "ln -s /logs/verifier/reward.txt out.txt; ln -s /app/r log.txt; echo 1 > r",
    ],
)
def test_the_reward_file_cannot_be_forged(make_task, attack):
    assert play(make_task("echo 0 > /logs/verifier/reward.txt"), attack)[0].reward == 0.0


RUNS_IT = 'out=$(timeout 2 python3 sum.py 2 3); [ "$out" = 5 ] || exit 1'


def program(text):
    return f"cat > sum.py <<'END'\n{text}\nEND"


@pytest.mark.parametrize("rest", ["", "\n# not in /logs/verifier"])
def test_a_program_that_the_tests_run_does_not_write_the_reward_of_tests_that_failed(make_task, rest):
    attack = program("""
import os
os.makedirs("/logs/verifier", exist_ok=True)
open("/logs/verifier/reward.txt", "w").write("1")""")
    assert play(make_task(RUNS_IT + rest), attack)[0].reward == 0.0


HARBOR = """
timeout -k 1 30 python3 sum.py 2 3 > /tmp/out
kill -9 -1 2>/dev/null
rm -rf /logs/verifier/reward.txt
if [ -f /tmp/out ] && [ "$(head -c 1000 /tmp/out)" = 5 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


def test_a_daemon_of_such_a_program_does_not_write_the_reward_of_tests_that_end_it_first(make_task):
    attack = program("""
import os
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            open("/logs/verifier/x", "w").write("1")
            os.rename("/logs/verifier/x", "/logs/verifier/reward.txt")
        except OSError:
            pass""")
    assert play(make_task(HARBOR), attack)[0].reward == 0.0
    assert play(make_task(HARBOR, name="b"), program("print(5)"))[0].reward == 1.0


@pytest.mark.parametrize(
    "attack",
    [
        "os.symlink('/app/x', '/logs/verifier/reward.txt')",
        "os.mkdir('/logs/verifier/reward.txt')",
        "os.mkfifo('/logs/verifier/reward.txt')",
        "open('/logs/verifier/reward.txt', 'w').write('1'); os.chmod('/logs/verifier/reward.txt', 0o444)",
        "open('/logs/verifier/reward.txt', 'w').write('1')",
    ],
)
def test_what_such_a_program_puts_in_the_place_of_the_reward_file_is_no_reward(make_task, attack):
    task = make_task("timeout 5 python3 sum.py 2 3\ntimeout -k 1 1 sh -c 'echo 0 > /logs/verifier/reward.txt'")
    assert play(task, program("import os; " + attack))[0].reward == 0.0


@pytest.mark.parametrize(
    ("attack", "finishes"),
    [
        ("while True: print('x' * 100_000)", ["tests:exit-2", "tests:memory"]),  # bash holds all of it: its own limit, or that of all together, comes first
        ("import subprocess, sys; [subprocess.Popen([sys.executable, '-c', 'x = bytearray(b\\'x\\') * (300 << 20); import time; time.sleep(30)']) for _ in range(4)]; import time; time.sleep(30)",
         ["tests:memory"]),
        ("import sys\nfor _ in range(3000): sys.stderr.write('x' * 1000)", ["done"]),
        ("import os; os.kill(-1, 9)", ["tests:exit-137"]),
    ],
)
def test_a_program_that_brings_the_tests_down_gets_zero_and_no_second_try(make_task, attack, finishes):
    episode = play(make_task(RUNS_IT.replace("timeout 2", "timeout 40")), program(attack))[0]
    assert episode.reward == 0.0 and episode.finish in finishes


SITE = "p=.local/lib/python$(python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])')/site-packages; mkdir -p $p; "


@pytest.mark.parametrize(
    "attack",
    [
        "for m in json re sys os sitecustomize usercustomize encodings; do echo 'import os; os._exit(0)' > $m.py; done",
        SITE + "echo 'import os; os._exit(0)' > $p/usercustomize.py; echo 'import os; os._exit(0)' > $p/x.pth",
        "mkdir json; echo 'import os; os._exit(0)' > json/__init__.py; mkdir __pycache__; cp json/__init__.py __pycache__/json.py",
        "printf '[pytest]\\naddopts = --help\\n' > pytest.ini; echo 'import os; os._exit(0)' > conftest.py",
    ],
)
def test_python_of_the_tests_imports_nothing_of_the_model(make_task, attack):
    task = make_task('python3 -c "import json, re; raise SystemExit(json.loads(open(\'out.json\').read())[\'x\'] != 1)" 2>/dev/null || exit 1')
    assert play(task, attack, "echo '{\"x\": 2}' > out.json")[0].reward == 0.0
    assert play(task, attack, "echo '{\"x\": 1}' > out.json")[0].reward == 1.0


def test_git_of_the_tests_runs_no_hook_and_no_program_of_the_repository(make_task):
    attack = ("git init -q . 2>/dev/null; printf '#!/bin/sh\\necho hello > /app/out.txt\\n' > hook; chmod +x hook; mkdir -p .git/hooks; for h in pre-commit post-checkout post-index-change; do cp hook .git/hooks/$h; done;"
              " git config core.fsmonitor /app/hook; git config core.hooksPath /app/.git/hooks; git config --global core.fsmonitor /app/hook; rm -f out.txt")
    task = make_task('cd /app; git status >/dev/null 2>&1; git -c user.name=a -c user.email=b commit -qm x --allow-empty >/dev/null 2>&1; [ "$(cat out.txt 2>/dev/null)" = hello ] || exit 1')
    assert play(task, attack)[0].reward == 0.0


def test_what_the_shell_of_the_model_set_is_gone_but_its_files_are_there(make_task):
    task = make_task('[ "$(cat d/out.txt)" = hello ] && [ "$PWD" = /app ] && [ -z "$x" ] && [ -z "$(ls -A /tmp)" ] || exit 1')
    assert play(task, "export x=1; touch /tmp/left; mkdir d; cd d; echo hello > out.txt")[0].reward == 1.0
