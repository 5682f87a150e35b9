"""Tool calls of each family, read by SGLang's parsers; what does not parse stays content."""

import json

import pytest

from miles.core import StructureError
from miles.session.boundary import RULES
from miles.session.tools import check_tools, parse_calls

TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {
    "path": {"type": "string"}, "n": {"type": "integer"}, "opts": {"type": "object"}}}}} for name in ("run", "read_file")]
ARGUMENTS = {"path": 'a "b" é日🙂.txt', "n": 3, "opts": {"deep": [1, {"k": None}]}}
_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
_OPTS = json.dumps(ARGUMENTS["opts"])


def hermes(*calls):
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls)


def kimi(*calls):
    return "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" for i, (name, arguments) in enumerate(calls)
    ) + "<|tool_calls_section_end|>"


GLM = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in (("path", ARGUMENTS["path"]), ("n", 3), ("opts", _OPTS)))
DSML = "".join(f'<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>\n' for k, s, v in (
    ("path", "true", ARGUMENTS["path"]), ("n", "false", 3), ("opts", "false", _OPTS)))
SAID = {
    "chatml": hermes(("run", _JSON), ("read_file", "{}")), "smollm2": hermes(("run", _JSON), ("read_file", "{}")),
    "qwen3": hermes(("run", _JSON), ("read_file", "{}")), "qwen3-thinking": hermes(("run", _JSON), ("read_file", "{}")),
    "kimi-k2": kimi(("run", _JSON), ("read_file", "{}")),
    "glm": f"<tool_call>run{GLM}</tool_call><tool_call>read_file</tool_call>",
    "deepseek-v3.2": f'\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="run">\n{DSML}</｜DSML｜invoke>\n<｜DSML｜invoke name="read_file">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "llama-3": f'<|python_tag|>{{"name": "run", "parameters": {_JSON}}};{{"name": "read_file", "parameters": {{}}}}',
}


@pytest.mark.parametrize("name", RULES)
def test_two_calls_with_nested_json_and_unicode(name):
    content, calls = parse_calls(SAID[name], TOOLS, RULES[name])
    assert not content.strip()
    assert [(c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("function", "run", ARGUMENTS), ("function", "read_file", {})]
    assert len({c["id"] for c in calls}) == 2


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("spoil", [lambda s: s.replace("run", "format_disk", 1), lambda s: s[: len(s) // 2], lambda s: "I would call run"],
                         ids=["unknown", "cut", "none"])
def test_what_does_not_parse_as_a_whole_is_content(name, spoil):
    text = spoil(SAID[name])
    assert parse_calls(text, TOOLS, RULES[name]) == (text, [])


def test_one_bad_call_among_good_ones_makes_all_of_it_content():
    text = hermes(("run", _JSON), ("read_file", '{"path": '))
    assert parse_calls(text, TOOLS, RULES["qwen3"]) == (text, [])


@pytest.mark.parametrize("name", RULES)
def test_arguments_nested_too_deeply_to_be_read_are_content(name):
    text = SAID[name].replace(_OPTS, "[" * 3000 + "]" * 3000).replace(_JSON, '{"a": ' * 3000 + "1" + "}" * 3000)
    assert text != SAID[name]
    content, calls = parse_calls(text, TOOLS, RULES[name])
    assert (content, calls) == (text, []) or all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in calls)  # GLM's are not JSON as a whole


def test_text_in_front_of_a_call_stays_content():
    content, calls = parse_calls("I look.\n" + hermes(("run", "{}")), TOOLS, RULES["qwen3"])
    assert content == "I look." and len(calls) == 1


def test_glm_calls_of_both_layouts_parse():
    spread = "<tool_call>run\n<arg_key>path</arg_key>\n<arg_value>a.txt</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"  # GLM-4.5
    (call,) = parse_calls(spread, TOOLS, RULES["glm"])[1]
    assert json.loads(call["function"]["arguments"]) == {"path": "a.txt", "n": 3}


def test_kimi_counts_its_calls_over_the_conversation():
    _, calls = parse_calls(kimi(("run", "{}"), ("run", "{}")), TOOLS, RULES["kimi-k2"], earlier_calls=3)
    assert [c["id"] for c in calls] == ["functions.run:3", "functions.run:4"]


@pytest.mark.parametrize("bad", [{}, "x", [1], [{"type": "function"}], [{"type": "function", "function": {}}], [{"function": {"name": "f"}}]])
def test_malformed_tools_are_refused(bad):
    if not bad:
        assert check_tools(bad) is None
        return
    with pytest.raises(StructureError) as e:
        check_tools(bad)
    assert e.value.cause == "request:tools"
