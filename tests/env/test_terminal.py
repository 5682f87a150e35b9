"""The agent loop with scripted models: what the model is shown, when an episode ends, how it is rewarded, what is a fault."""

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles.config import load_config, load_site
from miles.core import EnvironmentFault
from miles.env import SYSTEM_PROMPT, CommandLimits, EpisodeLimits, run_episode, terminal
from miles.env.terminal import parse_reply, shared_sandbox
from miles.env.workspace import Workspace
from tests.env.boxes import alive, wait_for

LIMITS = EpisodeLimits(max_turns=4, deadline_s=30.0, command=CommandLimits(wall_s=2.0, output_chars=40))
HELLO = '[ "$(cat out.txt)" = hello ] || exit 1'


@dataclass
class Reply:
    content: str
    finish_reason: str = "stop"

    @property
    def message(self):
        return {"role": "assistant", "content": self.content}


class Script:
    """A model that says what it was told to say; keeps what it was shown."""

    def __init__(self, *replies):
        self.replies = [r if isinstance(r, Reply) else Reply(r) for r in replies]
        self.shown = []

    async def __call__(self, messages):
        self.shown.append(messages)
        return self.replies[len(self.shown) - 1]


def play(task, *replies, limits=LIMITS):
    script = Script(*replies)
    return asyncio.run(run_episode(task, script, limits)), script.shown


def test_a_solved_task_gives_one_and_the_messages_only_grow(make_task):
    episode, shown = play(make_task(HELLO, {"a.txt": "hello\n"}), "cat a.txt", "cp a.txt out.txt", "DONE")
    assert (episode.reward, episode.finish, episode.turns) == (1.0, "done", 3)
    assert 0 < episode.env_s < 10
    assert shown[-1] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "cat a.txt"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "cp a.txt out.txt"},
        {"role": "user", "content": "[ok]"},
    ]
    assert all(later[: len(earlier)] == earlier for earlier, later in zip(shown, shown[1:], strict=False))


def test_an_unsolved_task_gives_zero(make_task):
    assert play(make_task(HELLO), "DONE")[0].reward == 0.0


@pytest.mark.parametrize(
    ("content", "parsed"),
    [
        ("ls -l\n", ("ls -l", False)),
        ("DONE", ("", True)),
        (" DONE \n", ("", True)),
        ("echo hi > a\nDONE", ("echo hi > a", True)),
        ("echo DONE", ("echo DONE", False)),
        ("done", ("done", False)),
        ("```bash\nls\ncat a\n```", ("ls\ncat a", False)),
        ("Sure:\n```\nls\n```\nThis lists files.", ("ls", False)),
        ("```sh\nls", ("ls", False)),
        ("", ("", False)),
    ],
)
def test_a_reply_is_a_command_or_the_word_done(content, parsed):
    assert parse_reply(content) == parsed


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("false", "[exit 1]"),
        ("echo no; exit 7", "no\nexit\n[exit 7]\n[the shell ended; a new one starts in /app]"),
        ("(exit 7)", "[exit 7]"),
        ("seq -s, 1 100", "1,2,3,4,5,6,7,8,9,10\n[252 characters left out]\n,95,96,97,98,99,100"),
        ("sleep 30", "[stopped: over 2 s]"),
        ("", "[no command]"),
        ("true", "[ok]"),
    ],
)
def test_the_model_is_shown_what_came_of_its_command(make_task, command, shown):
    assert play(make_task(), command, "DONE")[1][-1][-1] == {"role": "user", "content": shown}


def test_variables_of_the_task_are_there_for_the_model_and_for_the_tests(make_task):
    toml = "[environment]\nenv = { A = 'one' }\n[verifier]\nenv = { B = 'two' }"
    episode, shown = play(make_task('[ "$A$B" = onetwo ] || exit 1', toml=toml), 'echo "$A$B"', "DONE")
    assert (episode.reward, shown[-1][-1]["content"]) == (1.0, "one")


def test_the_turn_limit_ends_an_episode_and_what_was_done_counts(make_task):
    episode, shown = play(make_task(HELLO), "echo hello > out.txt", "ls", "ls", "ls")
    assert (episode.reward, episode.finish, episode.turns, len(shown)) == (1.0, "turns", 4, 4)


def test_a_reply_cut_by_length_ends_the_episode_and_is_not_run(make_task):
    episode, _ = play(make_task(HELLO), Reply("echo hello > out.txt", "length"))
    assert (episode.reward, episode.finish, episode.turns) == (0.0, "length", 1)


def test_the_deadline_ends_an_episode_that_waits_for_its_reply(make_task):
    async def slow(messages):
        await asyncio.sleep(60)

    episode = asyncio.run(run_episode(make_task(HELLO), slow, replace(LIMITS, deadline_s=0.5)))
    assert (episode.reward, episode.finish, episode.turns) == (0.0, "deadline", 0)


def test_the_deadline_counts_also_where_its_timer_is_ahead_of_the_clock(make_task, monkeypatch):
    """A loop that is late counts from its last look at the clock, so that time is over before the clock says so."""
    async def slow(messages):
        await asyncio.sleep(30)

    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: 100.0))
    assert asyncio.run(run_episode(make_task(HELLO), slow, replace(LIMITS, deadline_s=0.5))).finish == "deadline"


def test_a_task_may_have_a_shorter_deadline_than_the_run(make_task):
    async def slow(messages):
        await asyncio.sleep(60)

    task = make_task(HELLO, toml="[agent]\ntimeout_sec = 0.5")
    assert asyncio.run(run_episode(task, slow, LIMITS)).finish == "deadline"


def test_a_timeout_of_the_callers_own_is_passed_on(make_task):
    async def failing(messages):
        raise TimeoutError("engine")

    with pytest.raises(TimeoutError, match="engine"):
        asyncio.run(run_episode(make_task(), failing, LIMITS))


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("exit 0", 1.0),
        ("exit 1", 0.0),
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ("echo 0.25 > /logs/verifier/reward.txt; exit 1", 0.0),
        ("echo 1 > /logs/verifier/reward.txt", 1.0),
        ("[ -e /logs ] && exit 1; d=verifier; mkdir -p /logs/$d 2>/dev/null && exit 1; exit 0", 1.0),  # named nowhere: no such folder
        ('bash "$(dirname "$0")/../tests/test.sh.other" 2>/dev/null || exit 1', 0.0),
    ],
)
def test_the_reward_is_what_the_tests_say(make_task, test, reward):
    assert play(make_task(test), "DONE")[0].reward == reward


@pytest.mark.parametrize(
    ("test", "toml", "message"),
    [
        ("echo broken; no-such-program", "", "exited with 127"),
        ("sleep 60", "[verifier]\ntimeout_sec = 0.5", "stopped by its time limit"),
    ],
)
def test_tests_that_neither_pass_nor_fail_are_a_fault_and_never_a_reward(make_task, test, toml, message):
    with pytest.raises(EnvironmentFault, match=message):
        play(make_task(test, toml=toml), "DONE")


@pytest.mark.parametrize(
    ("test", "finish"),
    [
        ("kill -9 $$", "tests:exit-137"),
        ("exit 2", "tests:exit-2"),
        ("timeout 0.1 sleep 9", "tests:exit-124"),
        ("echo nan > /logs/verifier/reward.txt", "tests:reward-file"),
        ("echo 7 > /logs/verifier/reward.txt", "tests:reward-file"),
        ("echo one > /logs/verifier/reward.txt", "tests:reward-file"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "tests:reward-file"),
        ("mkfifo /logs/verifier/reward.txt", "tests:reward-file"),
        ("true # no number for /logs/verifier", "tests:reward-file"),
    ],
)
def test_tests_that_a_program_may_have_kept_from_speaking_give_zero_and_say_so(make_task, test, finish):
    episode = play(make_task(test), "DONE")[0]
    assert (episode.reward, episode.finish) == (0.0, finish)


def test_a_second_file_of_the_tests_may_be_the_one_that_writes_the_reward(make_task):
    task = make_task("python3 /tests/score.py")
    (task.tests / "score.py").write_text("open('/logs/verifier/reward.txt', 'w').write('0.75')")
    assert play(task, "DONE")[0].reward == 0.75


def test_output_of_the_tests_is_cut_and_stops_nothing(make_task):
    assert play(make_task("head -c 3000000 /dev/zero | tr '\\0' x; echo hello >&2; exit 0"), "DONE")[0].reward == 1.0


def test_an_aborted_reply_is_a_fault(make_task):
    with pytest.raises(EnvironmentFault, match="aborted turn 1"):
        play(make_task(), Reply("ls", "abort"))


def test_what_the_tests_leave_is_gone_and_the_task_is_unchanged(make_task):
    task = make_task("echo x > new; rm -f a.txt; echo 1 > /tests/x && exit 2; exit 0", {"a.txt": "red"})
    assert play(task, "echo y > b.txt", "DONE")[0].reward == 1.0
    assert sorted(p.name for p in task.path.rglob("*") if p.is_file()) == ["a.txt", "instruction.md", "task.toml", "test.sh"]


def test_an_episode_can_be_cancelled_and_leaves_nothing(make_task):
    async def cancel_during_command():
        running = asyncio.ensure_future(run_episode(make_task(), Script("sleep 500.5"), replace(LIMITS, command=CommandLimits(wall_s=30))))
        await asyncio.to_thread(wait_for, lambda: alive("500.5"))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel_during_command())
    assert not alive("500.5")


def test_the_shell_lives_from_turn_to_turn(make_task):
    episode, shown = play(make_task('[ "$(cat d/out.txt)" = hello ] || exit 1'), "mkdir d; cd d; x=hello", "echo $x > out.txt", "pwd", "DONE")
    assert episode.reward == 1.0
    assert shown[-1][-1]["content"] == "/app/d"


def test_many_episodes_run_at_once(make_task):
    task = make_task(HELLO)

    async def all_of_them():
        return await asyncio.gather(*(run_episode(task, Script("echo hello > out.txt", "DONE"), LIMITS) for _ in range(24)))

    assert [e.reward for e in asyncio.run(all_of_them())] == [1.0] * 24


@pytest.mark.parametrize("slow", ["make_room", "drop_traps", "close"])
def test_what_takes_its_time_with_a_workspace_does_not_hold_up_other_episodes(make_task, monkeypatch, slow):
    asyncio.run(shared_sandbox(LIMITS).check())
    real, began, ended = getattr(Workspace, slow), [], []

    def slowly(self):
        began.append(time.monotonic())
        time.sleep(1.0)
        real(self)
        ended.append(time.monotonic())

    async def beside():
        playing, ticks = asyncio.ensure_future(run_episode(make_task(), Script("DONE"), LIMITS)), []
        while not playing.done():
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)
        return [t for t in ticks if began[0] < t < ended[0]]

    monkeypatch.setattr(Workspace, slow, slowly)
    assert len(asyncio.run(beside())) > 10


def test_limits_come_from_the_configuration():
    config = load_config(Path(__file__).parents[2] / "configs" / "tiny_async.toml", ('tasks.system_prompt="Be brief."',))
    limits = EpisodeLimits.from_config(config, load_site(config.cluster.site))
    assert (limits.max_turns, limits.deadline_s, limits.system_prompt, limits.sandbox, str(limits.scratch)) == (5, 180.0, "Be brief.", "bubblewrap", "/tmp")
    assert limits.command == CommandLimits(wall_s=5.0, output_chars=400, memory_mb=512, processes=64, file_mb=64, disk_mb=256, cpu_s=600.0)
