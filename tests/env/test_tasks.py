"""Task folders are read as written, and every mistake in one is named."""

import pytest

from miles.core import ConfigError
from miles.env import load_task, load_tasks


def write(folder, toml="", instruction="Say hello.\n", test="exit 0"):
    (folder / "tests").mkdir(parents=True)
    for name, text in (("task.toml", toml), ("instruction.md", instruction), ("tests/test.sh", test)):
        if text is not None:
            (folder / name).write_text(text)
    return folder


def test_a_harbor_task_is_read_with_its_limits(tmp_path):
    toml = """
        version = "1.0"
        [metadata]
        difficulty = "easy"
        anything = 1
        [verifier]
        timeout_sec = 120.0
        [agent]
        timeout_sec = 90
        [environment]
        build_timeout_sec = 600.0
        cpus = 1
        memory_mb = 2048
        storage_mb = 10240
    """
    task = load_task(write(tmp_path / "hello", toml))
    assert (task.name, task.instruction) == ("hello", "Say hello.")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.memory_mb) == (90, 120.0, 2048)
    assert task.metadata == {"difficulty": "easy", "anything": 1}


def test_variables_of_a_task_are_read_and_memory_may_be_written_with_its_unit(tmp_path):
    toml = """
        [environment]
        memory = "1.5G"
        workdir = "/app"
        env = { A = "1" }
        [verifier]
        env = { B = "two words" }
    """
    task = load_task(write(tmp_path / "hello", toml))
    assert (task.memory_mb, task.env, task.verifier_env) == (1536, {"A": "1"}, {"B": "two words"})


def test_the_older_layout_of_terminal_bench_is_refused_with_how_to_convert_it(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    for name in ("task.yaml", "run-tests.sh", "docker-compose.yaml"):
        (folder / name).write_text("instruction: |-\n  Do it.\n")
    with pytest.raises(ConfigError, match=r"older layout of terminal-bench[\s\S]*instruction.md[\s\S]*tests/test.sh"):
        load_tasks(tmp_path)


def test_a_task_of_several_containers_is_refused(tmp_path):
    folder = write(tmp_path / "many")
    (folder / "environment").mkdir()
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(ConfigError, match="many has environment/docker-compose.yaml"):
        load_task(folder)


def test_limits_left_out_are_the_defaults(tmp_path):
    task = load_task(write(tmp_path / "hello"))
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.memory_mb) == (None, 60.0, None)


def test_tasks_come_sorted_by_name_and_hidden_folders_are_left_out(tmp_path):
    for name in ("b", "a", ".git"):
        write(tmp_path / name)
    assert [t.name for t in load_tasks(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"toml": None}, "task.toml is missing"),
        ({"instruction": None}, "instruction.md is missing"),
        ({"test": None}, "test.sh is missing"),
        ({"instruction": " \n"}, "instruction.md is empty"),
        ({"toml": "a ="}, "not valid TOML"),
        ({"toml": "[agnet]\ntimeout_sec = 1"}, "unknown section 'agnet'; did you mean 'agent'?"),
        ({"toml": "[agent]\ntimeout = 1"}, "unknown key agent.timeout; did you mean 'timeout_sec'?"),
        ({"toml": "agent = 3"}, "agent = 3"),
        ({"toml": "[agent]\ntimeout_sec = 0"}, "agent.timeout_sec = 0"),
        ({"toml": "[agent]\ntimeout_sec = 'long'"}, "agent.timeout_sec = 'long'"),
        ({"toml": "[environment]\nmemory_mb = true"}, "environment.memory_mb = True"),
        ({"toml": "[environment]\nmemory = 'much'"}, "environment.memory = 'much'"),
        ({"toml": "[environment]\nworkdir = '/work'"}, "environment.workdir = '/work'"),
        ({"toml": "[environment]\nenv = ['A=1']"}, "environment.env = ['A=1']"),
        ({"toml": "[verifier]\nenv = { KEY = '${KEY}' }"}, "verifier.env.KEY = '${KEY}'"),
    ],
)
def test_each_mistake_in_a_task_is_named(tmp_path, change, message):
    folder = write(tmp_path / "hello", **change)
    with pytest.raises(ConfigError) as e:
        load_task(folder)
    assert message in str(e.value) and "hello" in str(e.value)


def test_a_missing_or_empty_folder_of_tasks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no folder of tasks"):
        load_tasks(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no task folder"):
        load_tasks(tmp_path)
