"""Agent programs of others play tasks: what they are given, what they can reach, how their episodes end, and what is no episode."""

import asyncio
import contextlib
import json
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from aiohttp import web

from miles.config import SiteConfig, load_config
from miles.core import ConfigError, EnvironmentFault, StructureError
from miles.env import (
    Asked,
    CommandLimits,
    EpisodeLimits,
    Harness,
    Workspace,
    run_harness,
)
from miles.env import harness as module
from miles.env.harness import ending, fill
from miles.env.sandbox import CommandResult

SECRET = "token-of-the-run-5521"
HELLO = '[ "$(cat out.txt)" = hello ] || exit 1'
AGENT = '''
import json, os, subprocess, sys, urllib.error, urllib.request

def ask(messages, url=sys.argv[1]):
    """One reply, as an OpenAI client would get it."""
    body = json.dumps({"model": "miles", "messages": messages}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Content-Type": "application/json", "Authorization": "Bearer none"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["choices"][0]

messages = [{"role": "user", "content": sys.argv[2] if len(sys.argv) > 2 else "go"}]
'''
LOOP = AGENT + '''
while True:
    choice = ask(messages)
    command = choice["message"]["content"]
    if command == "DONE":
        break
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    messages += [choice["message"], {"role": "user", "content": done.stdout + done.stderr}]
'''


class Scripted:
    """A model that says what it was told to, on a unix socket. "!turns" stands for one turn too many, "!refused" and "!fault" for what a session does."""

    def __init__(self, *replies):
        self.replies, self.asked, self.shown, self.headers = list(replies), Asked(), [], []

    @contextlib.asynccontextmanager
    async def serve(self, socket):
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self._chat)])
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(socket)).start()
        try:
            yield self.asked
        finally:
            await runner.cleanup()

    async def _chat(self, request):
        self.asked.requests += 1
        self.shown.append((await request.json())["messages"])
        self.headers.append(dict(request.headers))
        reply = self.replies.pop(0)
        if reply == "!wait":
            await asyncio.sleep(60)
        if reply == "!turns":
            self.asked.over = True
            self.asked.stop.set()
        elif reply == "!refused":
            self.asked.refused = StructureError("other messages", cause="history:content")
        elif reply == "!fault":
            self.asked.fault = EnvironmentFault("the engine died")
            self.asked.stop.set()
        if reply.startswith("!"):
            return web.json_response({"error": {"message": reply}}, status=400)
        self.asked.replies += 1
        self.asked.refused = None
        self.asked.last = "length" if reply == "" else "stop"
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": reply}, "finish_reason": self.asked.last}]})


def harness(*command, **options):
    limits = EpisodeLimits(max_turns=4, deadline_s=options.pop("deadline_s", 30.0), command=CommandLimits(wall_s=2.0))
    return Harness(command or ("python3", "agent.py", "{url}", "{instruction}"), limits=limits, **options)


def play(task, *replies, model=None, **options):
    model = model or Scripted(*replies)
    return asyncio.run(run_harness(task, model, harness(**options))), model


@pytest.fixture
def agent_task(make_task):
    """A task whose working directory holds the agent as agent.py."""
    return lambda agent=LOOP, test=HELLO, **kw: make_task(test, files={"agent.py": agent}, **kw)


def processes():
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


# ---- endings ----


def test_an_agent_plays_through_its_own_endpoint_and_the_tests_give_the_reward(agent_task):
    episode, model = play(agent_task(), "echo hello > out.txt", "cat out.txt", "DONE")
    assert (episode.reward, episode.finish, episode.turns) == (1.0, "done", 3)
    assert model.shown[-1] == [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "echo hello > out.txt"}, {"role": "user", "content": ""},
        {"role": "assistant", "content": "cat out.txt"}, {"role": "user", "content": "hello\n"},
    ]
    assert 0 < episode.env_s < 20


def test_an_unsolved_task_gives_zero_whatever_the_harness_says(agent_task):
    assert play(agent_task(), "echo COMPLETE; exit 0", "DONE")[0].reward == 0.0


def test_a_crash_of_the_agent_is_an_ending_of_its_own_and_what_was_done_counts(agent_task):
    episode, _ = play(agent_task(), "echo hello > out.txt; kill -9 $PPID")
    assert (episode.reward, episode.finish, episode.turns) == (1.0, "crashed", 1)


def test_a_model_that_kills_everything_in_its_sandbox_has_ended_its_episode(agent_task):
    episode, _ = play(agent_task(), "kill -9 -1")
    assert (episode.reward, episode.finish) == (0.0, "crashed")


def test_an_agent_that_asks_for_too_many_turns_is_told_and_stopped(agent_task, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    stubborn = LOOP.replace("choice = ask(messages)", '''
    try:
        choice = ask(messages)
    except urllib.error.HTTPError as e:
        open("told.txt", "wb").write(e.read())
        import time; time.sleep(60)''').replace("while True:\n    \n", "while True:\n")
    started = time.monotonic()
    episode, _ = play(agent_task(stubborn, 'grep -q "!turns" told.txt && grep -q hello out.txt || exit 1'), "echo hello > out.txt", "!turns")
    assert (episode.reward, episode.finish, episode.turns) == (1.0, "turns", 1)
    assert time.monotonic() - started < 25


def test_a_reply_cut_by_its_length_that_ended_the_agent_is_an_ending_by_length(agent_task):
    cut = AGENT + "choice = ask(messages)\nassert choice['finish_reason'] == 'length'\n"
    episode, _ = play(agent_task(cut), "")
    assert (episode.finish, episode.reward) == ("length", 0.0)


def test_the_deadline_ends_the_agent_with_all_its_processes(agent_task):
    started = time.monotonic()
    episode, _ = play(agent_task(), "setsid sleep 347.1425 & sleep 347.1425", deadline_s=5.0)
    assert (episode.finish, episode.turns, episode.reward) == ("deadline", 1, 0.0)
    assert time.monotonic() - started < 25
    assert "sleep 347.1425" not in processes()


def test_the_deadline_also_ends_an_agent_that_waits_for_its_reply(agent_task):
    assert play(agent_task(), "!wait", deadline_s=5.0)[0].finish == "deadline"


def test_a_task_may_have_a_shorter_deadline_than_the_run(agent_task):
    assert play(agent_task(toml="[agent]\ntimeout_sec = 5.0"), "sleep 60")[0].finish == "deadline"


@pytest.mark.parametrize(
    ("asked", "result", "finish"),
    [  # asked (replies, last, over), (exit code, stopped by)
        ((1, "stop", False), (0, ""), "done"),
        ((1, "stop", False), (1, ""), "crashed"),
        ((1, "stop", False), (None, "output"), "crashed"),
        ((1, "stop", False), (None, "time"), "deadline"),
        ((1, "length", False), (1, ""), "length"),
        ((1, "length", False), (0, ""), "length"),
        ((1, "length", False), (None, "time"), "deadline"),
        ((4, "stop", True), (1, ""), "turns"),
        ((4, "stop", True), None, "turns"),
        ((4, "length", True), (None, "time"), "turns"),
    ],
)
def test_what_an_ending_is_called(asked, result, finish):
    replies, last, over = asked
    given = result and CommandResult(result[0], "", False, result[1], 1.0)
    assert ending("t", given, Asked(requests=replies, replies=replies, last=last, over=over)) == finish


# ---- no episode ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("no-such-agent", "{url}"), r"exit code 127 before the model answered it once \(0 requests\)[\s\S]*cannot start no-such-agent"),
        (("bash", "-c", "echo wrong config >&2; exit 3"), r"exit code 3[\s\S]*wrong config"),
        (("true",), "exit code 0"),
        (("sleep", "60"), "was stopped by its time limit"),
    ],
)
def test_a_harness_that_never_asks_the_model_is_a_fault_and_never_a_reward(make_task, argv, message):
    with pytest.raises(EnvironmentFault, match=message):
        asyncio.run(run_harness(make_task("exit 0"), Scripted(), harness(*argv, deadline_s=2.0)))


def test_the_end_of_what_a_harness_said_is_in_the_fault(make_task):
    talk = "python3 -c 'print(\"x\" * 100000)'; echo the reason; exit 1"
    with pytest.raises(EnvironmentFault, match=r"x\\nthe reason'"):
        asyncio.run(run_harness(make_task(), Scripted(), harness("bash", "-c", talk)))


def test_a_failed_engine_ends_the_episode_at_once_as_a_fault(agent_task):
    patient = LOOP.replace("choice = ask(messages)", "choice = ask(messages) if len(messages) == 1 else __import__('time').sleep(60)")
    started = time.monotonic()
    with pytest.raises(EnvironmentFault, match="the engine died"):
        play(agent_task("import time\n" + patient.replace("ask(messages)", "ask(messages)", 1)), "!fault")
    assert time.monotonic() - started < 25


def test_an_agent_that_ends_in_failure_over_a_refused_request_has_no_reward_but_the_reason(agent_task):
    with pytest.raises(StructureError) as e:
        play(agent_task(), "echo hello > out.txt", "!refused")
    assert e.value.cause == "history:content"


def test_an_agent_that_mends_a_refused_request_goes_on(agent_task):
    mending = LOOP.replace("    choice = ask(messages)", "    try:\n        choice = ask(messages)\n    except urllib.error.HTTPError:\n        choice = ask(messages)")
    episode, _ = play(agent_task(mending), "!refused", "echo hello > out.txt", "DONE")
    assert (episode.finish, episode.reward) == ("done", 1.0)


def test_an_episode_can_be_cancelled_and_leaves_nothing(agent_task, tmp_path):
    async def cancelled():
        running = asyncio.ensure_future(run_harness(agent_task(), Scripted("sleep 347.1825"), harness()))
        await asyncio.to_thread(wait_for, lambda: "sleep 347.1825" in processes())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert "sleep 347.1825" not in processes()


def test_a_temporary_folder_too_long_for_a_socket_is_a_fault(agent_task, monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_SOCKET", 20)
    with pytest.raises(EnvironmentFault, match="TMPDIR"):
        play(agent_task(), "DONE")


# ---- what is inside ----


def test_the_command_and_its_variables_are_filled_in(make_task):
    show = AGENT + 'open("argv.json", "w").write(json.dumps([sys.argv[1:], dict(os.environ)]))\nask(messages)\n'
    seen = {}
    task = make_task(files={"agent.py": show}, instruction="Say {url} and $HOME.")
    real = Workspace.drop_traps

    def look(ws):
        seen["job"] = json.loads((ws.app / "argv.json").read_text())
        seen["file"] = (ws.root / "miles" / "instruction.md").read_text()
        real(ws)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(Workspace, "drop_traps", look)
        argv = ("python3", "agent.py", "{url}", "{instruction}", "{instruction_file}", "{model}", "{workspace}", "{max_turns}", '{"a": {x}} ${url}')
        asyncio.run(run_harness(task, Scripted("ok"), harness(*argv, env={"WHERE": "at {url}"}, port=8123)))
    url = "http://127.0.0.1:8123/v1"
    assert seen["job"][0] == [url, "Say {url} and $HOME.", "/miles/instruction.md", "miles", "/app", "4", '{"a": {x}} ${url}']
    assert seen["file"] == "Say {url} and $HOME.\n"
    env = {k: v for k, v in seen["job"][1].items() if k != "LC_CTYPE"}
    assert env == {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp", "LANG": "C.UTF-8", "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url,
                   "OPENAI_API_KEY": "none", "WHERE": f"at {url}"}


@pytest.fixture
def open_folder():
    """A folder that the unprivileged id can reach; pytest's own are closed to it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_what_the_harness_needs_is_mounted_read_only(make_task, open_folder):
    (open_folder / "agent.py").write_text(LOOP)
    episode = asyncio.run(run_harness(make_task(HELLO), Scripted("cp /opt/agent/agent.py /opt/agent/x; [ -e /opt/agent/x ] || echo hello > out.txt", "DONE"),
                                      harness("python3", "/opt/agent/agent.py", "{url}", mounts={"/opt/agent": open_folder})))
    assert (episode.reward, episode.finish) == (1.0, "done")


def test_nothing_else_can_be_reached_and_no_secret_is_inside(agent_task, monkeypatch):
    """The sandbox holds another session's socket nowhere, no port of the host, no token: not in its files, variables, or processes."""
    monkeypatch.setenv("MILES_TOKEN", SECRET)
    probe = (
        "grep -rls 'to[k]en-of-the-run' /miles /tmp /app /proc/*/environ /proc/*/cmdline > found.txt 2>/dev/null;"
        "find / -xdev -type s 2>/dev/null > sockets.txt; find /miles -type s >> sockets.txt; cat /proc/net/unix > unix.txt;"
        "python3 -c \"import socket; socket.create_connection(('127.0.0.1', PORT), 3)\" 2> port.txt;"
        "touch /miles/x 2> write.txt; rm -f /miles/session; ls -A /miles > miles.txt; cat /proc/net/dev | grep -c eth > eth.txt"
    )
    others, seen = {}, {}

    class Two(Scripted):
        """Serves another session beside this one, and a port of the host."""

        @contextlib.asynccontextmanager
        async def serve(self, socket):
            server = await asyncio.start_server(lambda r, w: others.setdefault("reached", True), "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            self.replies = [probe.replace("PORT", str(port)), "DONE"]
            with Workspace() as other:
                async with Scripted("stolen").serve(other.root / "session"), super().serve(socket) as asked:
                    yield asked
            server.close()

    real = Workspace.drop_traps

    def look(ws):
        seen.update({p.name: p.read_text() for p in ws.app.glob("*.txt")})
        real(ws)

    monkeypatch.setattr(Workspace, "drop_traps", look)
    episode, model = play(agent_task(test="exit 0"), model=Two())
    assert episode.finish == "done" and not others
    assert seen["found.txt"] == ""
    assert set(seen["sockets.txt"].split()) == {"/miles/session"}
    assert "miles" not in seen["unix.txt"]
    assert "ConnectionRefusedError" in seen["port.txt"]
    assert "Read-only" in seen["write.txt"] and seen["miles.txt"].split() == ["instruction.md", "job.json", "relay.py", "session"]
    assert seen["eth.txt"] == "0\n"
    assert all(SECRET not in str(h) for h in model.headers)


def test_many_agents_play_at_once_each_in_its_own_conversation(agent_task):
    task = agent_task(test='[ "$(cat out.txt)" = "$(cat want.txt)" ] || exit 1')
    models = [Scripted(f"echo {i} > out.txt; echo {i} > want.txt", "DONE") for i in range(6)]

    async def all_of_them():
        return await asyncio.gather(*(run_harness(task, m, harness()) for m in models))

    assert [(e.reward, e.finish) for e in asyncio.run(all_of_them())] == [(1.0, "done")] * 6
    assert all(len(m.shown) == 2 for m in models)


def test_a_tasks_memory_is_no_less_than_what_the_harness_was_given(agent_task):
    episode, _ = play(agent_task(toml="[environment]\nmemory_mb = 32"), "echo hello > out.txt", "DONE")
    assert (episode.finish, episode.reward) == ("done", 1.0)


# ---- configuration ----

TOML = ('tasks.kind="harness"', 'tasks.harness.command=["agent", "{url}"]')


def load(*overrides):
    return load_config("configs/tiny_async.toml", ('tasks.system_prompt=""', *overrides))


def test_a_harness_comes_from_the_configuration(tmp_path):
    config = load(*TOML, "tasks.harness.port=9000", 'tasks.harness.env={A = "b"}', "tasks.harness.mounts={'/opt/x' = '/usr/share'}")
    found = Harness.from_config(config, SiteConfig())
    assert (found.command, found.port, found.env) == (("agent", "{url}"), 9000, {"A": "b"})
    assert found.limits == EpisodeLimits.from_config(config, SiteConfig()) and found.limits.max_turns == 5
    assert {k: str(v) for k, v in found.mounts.items()} == {"/opt/x": "/usr/share"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (('tasks.kind="harness"',), r"'harness' without a section \[tasks.harness\]"),
        (TOML[1:], r"'terminal' with a section \[tasks.harness\]"),
        ((*TOML, 'tasks.sandbox="unconfined-i-know"'), "'unconfined-i-know' with a harness"),
        ((*TOML, 'tasks.system_prompt="Be brief."'), "system_prompt with a harness"),
        ((TOML[0], 'tasks.harness.command=["agent", "{adress}"]'), r"command\[1\] has \{adress\}; expected one of \{url\}"),
        ((*TOML, 'tasks.harness.env={A = "{token}"}'), r"env.A has \{token\}"),
        ((*TOML, 'tasks.harness.mounts={"/app/x" = "/usr/share"}'), "mounts: '/app/x'"),
        ((*TOML, 'tasks.harness.mounts={"opt" = "/usr/share"}'), "mounts: 'opt'"),
        ((*TOML, 'tasks.harness.mounts={"/opt/../etc" = "/usr/share"}'), "mounts: '/opt/../etc'"),
        ((TOML[0], "tasks.harness.command=[]"), "command"),
    ],
)
def test_configurations_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


def test_something_to_mount_that_is_missing_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere, for /opt/x, is not there"):
        Harness.from_config(load(*TOML, f"tasks.harness.mounts={{'/opt/x' = '{tmp_path}/nowhere'}}"), SiteConfig())


def test_a_folder_that_the_sandbox_cannot_enter_is_refused_as_root(tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    (tmp_path / "closed" / "agent").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    with pytest.raises(ConfigError, match=r"closed to others by the mode of"):
        Harness.from_config(load(*TOML, f"tasks.harness.mounts={{'/opt/x' = '{tmp_path}/closed/agent'}}"), SiteConfig())


def test_the_program_is_looked_for_where_it_will_run(open_folder):
    assert asyncio.run(harness("python3", "agent.py").check()) == "/usr/bin/python3"
    (open_folder / "agent").write_text("#!/bin/sh\n")
    (open_folder / "agent").chmod(0o755)
    assert asyncio.run(harness("agent", mounts={"/opt/x": open_folder}, env={"PATH": "/opt/x:/usr/bin"}).check()) == "/opt/x/agent"
    with pytest.raises(EnvironmentFault, match="the sandbox has no /opt/x/agent"):
        asyncio.run(harness("/opt/x/agent").check())


def test_only_known_names_are_replaced_and_only_once():
    assert fill("{a}{b} {{a}} ${a} {A}", {"a": "{b}", "b": "2"}) == "{b}2 {{b}} ${a} {A}"


