"""Over every family: what is assembled is what the engine was sent and answered, whatever the model says and the harness does."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from miles.core import EnvironmentFault, StructureError
from miles.session import load_replay, verify
from tests.session.conftest import user
from tests.session.fake import finish, open_session
from tests.session.families import FAMILIES, make_chat
from tests.session.test_session_tools import SAID, TOOLS


@pytest.fixture(scope="module", params=FAMILIES)
def chat(request, tmp_path_factory):
    return make_chat(request.param, tmp_path_factory.mktemp("family"))


text = st.text(alphabet=st.sampled_from(list("ab \n\t<|>{}\"\\é日🙂")), max_size=10)
appended = st.lists(st.tuples(st.sampled_from(["user", "tool", "system"]), text), min_size=1, max_size=3)
reply = st.tuples(st.lists(st.integers(30, 300), max_size=8), st.integers(0, 2))  # any tokens, and which of the family's stop tokens ends them
steps = st.lists(st.tuples(st.sampled_from(["go on", "go on", "retry", "fail", "foreign", "cut"]), appended, reply), min_size=1, max_size=8)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(first=text, steps=steps)
def test_assembled_tokens_are_the_engines_exactly(chat, first, steps):
    s = open_session(chat)
    messages, recorded, held = [user(first)], [], []  # held: the conversation before each recorded turn
    for action, new, (body, ended) in (("go on", [], ([40], 0)), *steps):
        output = [*body, chat.stop_ids[ended % len(chat.stop_ids)]]
        if action == "cut":
            output = [*body, 40]
        if action == "foreign":
            with pytest.raises(StructureError):
                s.ask([*messages, {"role": "assistant", "content": "mine"}, user("x")], output)
        if action == "retry" and recorded:
            messages, _ = held.pop(), recorded.pop()
        elif recorded and held:
            messages = [*messages, *({"role": r, "content": c} for r, c in new)]
        before = s.session.history
        s.engine.fail = action == "fail"
        try:
            answer = s.ask(messages, output)
        except (EnvironmentFault, StructureError) as e:
            s.engine.fail = False
            assert s.session.history is before
            if isinstance(e, StructureError):
                assert e.cause in ("history:truncated", "request:template")
                break
            s.ask(messages, output)
            answer = None
        turn = s.engine.answered[-1]
        reply = s.session.history.last.reply
        assert answer is None or answer.message == reply
        held.append(messages)
        recorded.append(turn)
        _check_prompt(chat, messages, turn, recorded[-2] if len(recorded) > 1 else None)
        messages = [*messages, reply]
    t = finish(s.session)
    last = recorded[len(s.session.turns) - 1]
    assert t.tokens.tolist() == [*last.input_ids, *last.output_ids]
    assert t.tokens[t.loss_mask == 1].tolist() == [int(x) for turn in s.session.turns for x in turn.output_ids]
    assert t.logprobs[t.loss_mask == 1].tolist() == [float(x) for turn in s.session.turns for x in turn.logprobs]
    assert t.routes[:, 0, 0].tolist() == [x % 8 for x in t.tokens[:-1]]


def _check_prompt(chat, messages, turn, before):
    """The prompt of a turn begins with every token before it, and ends like the whole conversation rendered at once."""
    known = [*before.input_ids, *before.output_ids] if before else []
    new = turn.input_ids[len(known):].tolist()
    assert turn.input_ids[: len(known)].tolist() == known and new
    try:
        whole = chat.encode(chat.render(messages))
    except TemplateError:  # results of calls that the reply, as these random tokens read, does not have
        assert before and any(m["role"] == "tool" for m in messages)
        return
    assert whole[-len(new):] == new and (before or whole == new)


def test_tool_calls_results_and_a_harness_that_serializes_again(chat):
    """A whole exchange in every family: calls in, JSON re-serialized and reasoning left out by the harness, results appended together."""
    s = open_session(chat, replay=load_replay("loose"))
    one = chat.boundary.name == "llama-3"  # its template allows one call
    said = SAID[chat.boundary.name].partition(";")[0] if one else SAID[chat.boundary.name]
    thought = "hmm</think>" if chat.boundary.reasoning else ""
    answer = s.ask([user("q")], [*chat.encode(thought + said), chat.stop_ids[-1]], tools=TOOLS)
    assert answer.finish_reason == "tool_calls" and [c["function"]["name"] for c in answer.tool_calls] == ["run", "read_file"][: 1 if one else 2]
    assert answer.message["content"] in (None, "\n\n") and answer.reasoning == ("hmm" if thought else None)
    again = {"role": "assistant", "content": answer.message["content"], "tool_calls": [
        {**c, "function": {**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]), indent=2)}} for c in answer.tool_calls]}
    results = [{"role": "tool", "tool_call_id": c["id"], "content": f"out {i}"} for i, c in enumerate(answer.tool_calls)]
    s.ask([user("q"), again, *results], [50, chat.stop_ids[0]], tools=TOOLS)
    t = finish(s.session)
    sent = s.engine.answered
    assert t.tokens.tolist() == [*sent[1].input_ids, 50, chat.stop_ids[0]] and t.loss_mask.sum() == len(sent[0].output_ids) + 2
    added = chat._tokenizer.decode(t.tokens[len(sent[0].input_ids) + len(sent[0].output_ids):-2])
    assert added.count("out 0") == 1 and added.count("out 1") == (0 if one else 1)
    whole = chat.render([user("q"), {**answer.message}, *results], tools=TOOLS)
    assert whole.endswith(added.removeprefix(chat.boundary.stops[0]))


def test_the_proof_holds_for_every_tail_after_every_stop_token(chat):
    """A family may have several stop tokens; each stands for the one the template writes, or is followed by it, never both."""
    assert verify(chat)
    for last in chat.stop_ids:
        tail = chat.append([user("next")], last)
        first = chat.encode(chat.tail([user("next")]))
        if chat.boundary.opens_next and last != first[0]:
            assert tail == first  # the model opened another message than the one that came
        else:
            assert tail == first[1:] and tail[0] not in chat.stop_ids
