"""Every named family: `auto` picks its rule, the proof holds, and what is put together equals what the engine was sent."""

import re
import subprocess
import sys
from typing import get_args

import pytest

from miles.config.schema import Boundary
from miles.core import ConfigError
from miles.session import verify
from miles.session.boundary import RULES
from tests.conftest import ROOT
from tests.engine.tiny import CHATML, make_tokenizer
from tests.session.families import FAMILIES, make_chat


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return FAMILIES[request.param], make_chat(request.param, tmp_path_factory.mktemp("family"))


def test_every_rule_has_a_family_here():
    assert {f.rule for f in FAMILIES.values()} == set(RULES)
    assert set(get_args(Boundary)) == {"auto", *RULES}, "model.boundary offers every rule"


def test_auto_picks_the_rule_and_the_proof_holds(family):
    expected, chat = family
    assert chat.boundary.name == expected.rule
    assert verify(chat) > 150


KEEPS = ("loop.index0 > ns.asked and ", "")  # what GLM-4.7 calls preserved thinking
ANSWER = "{{ m.content }}{% for c in"  # where Qwen's templates write a reply's content


@pytest.mark.parametrize("name", ["qwen3-thinking", "glm-4.7"])
def test_reasoning_of_earlier_turns_may_be_kept_or_dropped(name, tmp_path):
    dropping, keeping = make_chat(name, tmp_path), make_chat(name, tmp_path, KEEPS)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "because"}, {"role": "user", "content": "r"}]
    assert "because" not in dropping.render(talk) and "because" in keeping.render(talk)
    assert verify(keeping) == verify(dropping) and keeping.append(talk[2:], keeping.stop_ids[0]) == dropping.append(talk[2:], dropping.stop_ids[0])


@pytest.mark.parametrize(("change", "says"), [
    ((ANSWER, "{% if loop.index0 > ns.asked %}{{ m.content }}{% endif %}{% for c in"), "does not render a reply's content"),  # drops the answer too
    ((ANSWER, "{{ m.content }}{% if m.reasoning_content and loop.index0 < ns.asked %} (thought){% endif %}{% for c in"), "text before the appended messages changed"),
    (("<|im_start|>{{ m.role }}\n{{ m.content }}", "<|im_start|>{{ m.role }}\n{% if loop.index0 > 3 %}(later) {% endif %}{{ m.content }}"), "appended text differs"),
])
def test_dropping_reasoning_excuses_nothing_else(change, says, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(says)):
        verify(make_chat("qwen3-thinking", tmp_path, change))


@pytest.mark.parametrize(("said", "reasoning", "content"), [
    ("hmm\n</think>\n\nok", "hmm", "ok"), ("<think>\nhmm\n</think>\n\nok", "hmm", "ok"), ("</think>ok", "", "ok"), ("still thinking", "still thinking", ""),
    ("a</think>b</think>c", "a", "b</think>c"),
])
def test_reasoning_is_told_apart_where_the_prompt_opens_it(family, said, reasoning, content):
    _, chat = family
    if not chat.boundary.reasoning:
        assert chat.split_reasoning(said) == (None, said)
    elif chat._prompt_opens_reasoning or "</think>" in said:
        assert chat.split_reasoning(said) == (reasoning, content)
    else:
        assert chat.split_reasoning(said) == (None, said)


@pytest.mark.parametrize(("template", "code", "says"), [
    (CHATML, 0, "boundary rule chatml, stop tokens <|im_end|>"),
    (CHATML.replace("{{ m.content }}", "{{ loop.length }}{{ m.content }}"), 2, "smallest failing conversation:\n    user: ''\n    assistant: ''\n    user: ''\n"),
])
def test_the_tool_proves_a_folder_or_shows_the_smallest_counter_example(tmp_path, template, code, says):
    make_tokenizer(tmp_path, template)
    done = subprocess.run([sys.executable, ROOT / "tools/verify_template", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == code and says in done.stdout + done.stderr, done
