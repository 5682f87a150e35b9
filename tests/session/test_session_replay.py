"""Which messages a harness may send back: strict, loose, or a user's function."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core import ConfigError, EnvironmentFault
from miles.session import load_replay
from miles.session.replay import loose, strict
from tests.session.conftest import user
from tests.session.test_session_history import EMPTY, answered, cause


def call(arguments, name="run", call_id="call_1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(arguments='{"a":1}', content=None, **more):
    return {"role": "assistant", "content": content, "tool_calls": [call(arguments)], **more}


RESULT = {"role": "tool", "content": "out", "tool_call_id": "call_1"}


def resent(held, given, same):
    """What a linear history says when the reply comes back like that: "" or the cause of its refusal."""
    history, request = answered(EMPTY, user("q"), reply=held), [user("q"), given, RESULT]
    if same(held, given):
        return cause(history, request, same)
    assert history.match(request, same) == (history, (RESULT,), "")
    return ""


@pytest.mark.parametrize(("held", "given", "strictly", "loosely"), [
    (reply(), reply(), "", ""),
    (reply('{"a":1}'), reply('{"a": 1}'), "history:arguments", ""),  # serialized again
    (reply('{"a":1,"b":"é"}'), reply('{"b": "\\u00e9", "a": 1}'), "history:arguments", ""),
    (reply('{"a":1}'), reply('{"a": 2}'), "history:arguments", "history:arguments"),
    (reply('{"a":1}'), reply('{"a": true}'), "history:arguments", "history:arguments"),  # equal in Python, not in JSON
    (reply('{"a":1}'), reply('{"a": "1"}'), "history:arguments", "history:arguments"),
    (reply("{}"), reply(""), "history:arguments", ""),  # empty arguments
    (reply("{}"), reply(None), "history:arguments", ""),
    (reply('{"a":1}'), reply(""), "history:arguments", "history:arguments"),  # arguments lost
    (reply('{"a":1}'), reply('{"a":'), "history:arguments", "history:arguments"),
    (reply('{"a":1}'), {**reply(), "tool_calls": [{**call('{"a":1}'), "index": 0}]}, "history:tool-calls", ""),
    (reply(), {**reply(), "tool_calls": [call('{"a":1}', name="rm")]}, "history:tool-calls", "history:tool-calls"),
    (reply(), {**reply(), "tool_calls": [call('{"a":1}', call_id="mine")]}, "history:tool-calls", "history:tool-calls"),
    (reply(), {**reply(), "tool_calls": [call('{"a":1}')] * 2}, "history:tool-calls", "history:tool-calls"),
    (reply(), {"role": "assistant", "content": "I call run"}, "history:content", "history:content"),
    (reply(), reply(content=""), "", ""),  # no content and empty content
    (reply(reasoning_content="hmm"), reply(), "history:reasoning-dropped", ""),
    (reply(reasoning_content="hmm"), reply(reasoning_content=None), "history:reasoning-dropped", ""),
    (reply(reasoning_content="hmm"), reply(reasoning_content="hm"), "history:reasoning", "history:reasoning"),
    (reply(), reply(reasoning_content="mine"), "history:reasoning", "history:reasoning"),
    (reply(), reply(refusal=None), "", ""),
    (reply(), reply(name="x"), "history:fields", "history:fields"),
])
def test_what_comes_back_continues_the_session_or_is_refused_with_its_cause(held, given, strictly, loosely):
    assert (resent(held, given, strict), resent(held, given, loose)) == (strictly, loosely)


def content_only(held, given):
    """A user's function of the test below."""
    return held["role"] == given["role"] and held.get("content") == given.get("content")


def broken(held, given):
    raise KeyError("x")


def test_a_users_function_decides_alone():
    mine = load_replay(f"{__name__}.content_only")
    assert mine(reply("{}"), reply('{"b": 2}')) == "" and mine(reply(content="a"), reply(content="b")) == "content"
    assert load_replay("strict") is strict and load_replay("loose") is loose
    with pytest.raises(EnvironmentFault, match=r"broken failed: KeyError"):
        load_replay(f"{__name__}.broken")({}, {})


@pytest.mark.parametrize("name", ["", "nothing", "no.such.module", "json.nothing", "json.__name__"])
def test_a_function_that_does_not_exist_is_refused(name):
    with pytest.raises(ConfigError):
        load_replay(name)


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda v: st.lists(v, max_size=3) | st.dictionaries(
    st.text(max_size=4), v, max_size=3), max_leaves=8)


@given(st.dictionaries(st.text(max_size=4), values, max_size=4), st.dictionaries(st.text(max_size=4), values, max_size=4))
def test_loose_means_equal_as_json(a, b):
    again = json.dumps(dict(reversed(a.items())), ensure_ascii=False, indent=1)
    assert loose(reply(json.dumps(a)), reply(again)) == ""
    equal = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    assert (loose(reply(json.dumps(a)), reply(json.dumps(b))) == "") == equal
