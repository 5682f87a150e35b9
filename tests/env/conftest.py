import textwrap

import pytest

from miles.env import load_task


@pytest.fixture
def make_task(tmp_path):
    """make_task(test="...", files={name: text}, toml="...") -> Task: a task folder written for one test."""

    def make(test="exit 0", files=None, toml="", name="a-task", instruction="Do it."):
        folder = tmp_path / "tasks" / name
        (folder / "tests").mkdir(parents=True)
        (folder / "environment").mkdir()
        (folder / "task.toml").write_text(textwrap.dedent(toml))
        (folder / "instruction.md").write_text(instruction)
        (folder / "tests" / "test.sh").write_text(textwrap.dedent(test))
        for file, text in (files or {}).items():
            (folder / "environment" / file).write_text(text)
        return load_task(folder)

    return make
