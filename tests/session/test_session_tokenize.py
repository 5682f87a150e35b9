"""Incremental tokenization equals that of the whole conversation, and templates where it does not are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core import ConfigError
from miles.session import ChatTokenizer, verify
from miles.session.verify import conversations
from tests.engine.tiny import CHATML, make_tokenizer
from tests.session.conftest import user

GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM_SPECIALS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
COUNTING = CHATML.replace("<|im_start|>{{ m.role }}", "<|im_start|>{{ m.role }}{{ loop.index if m.role == 'user' }}")
GROUPING = CHATML.replace("<|im_start|>{{ m.role }}\n", "{% if loop.first or messages[loop.index0 - 1].role != m.role %}<|im_start|>{{ m.role }}\n{% endif %}")


def whole(chat, messages):
    return chat.encode(chat.render(messages))


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return ChatTokenizer(make_tokenizer(tmp_path_factory.mktemp("glm"), GLM, GLM_SPECIALS))


text = st.text(alphabet=st.sampled_from(list("ab \n\t<|>{}\"é日🙂")), max_size=12)
message = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool", "system"]), text)


@settings(deadline=None, max_examples=60)
@given(first=st.lists(message, min_size=1, max_size=3), later=st.lists(st.tuples(text, st.lists(message, min_size=1, max_size=3)), max_size=4))
def test_chatml_put_together_equals_whole(chat, first, later):
    messages, ids = list(first), chat.first(first)
    assert ids == whole(chat, messages)
    for reply, appended in later:
        sampled = [*chat.encode("x" + reply), chat.stop_ids[0]]  # "x": a reply may begin so that it merges with the newline of its header
        ids = [*ids, *sampled, *chat.append(appended, sampled[-1])]
        messages += [{"role": "assistant", "content": "x" + reply}, *appended]
        assert ids[-len(chat.append(appended, sampled[-1])):] == whole(chat, messages)[-len(chat.append(appended, sampled[-1])):]
        assert chat._tokenizer.decode(ids) == chat._tokenizer.decode(whole(chat, messages))


def test_the_stop_token_is_not_counted_twice(chat):
    ids = chat.append([user("hi")], chat.stop_ids[0])
    assert chat._tokenizer.decode(ids) == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_messages_appended_together_are_rendered_together(tmp_path):
    grouped = ChatTokenizer(make_tokenizer(tmp_path, GROUPING))
    both = grouped.append([{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}], grouped.stop_ids[0])
    assert grouped._tokenizer.decode(both) == "\n<|im_start|>tool\na<|im_end|>\nb<|im_end|>\n<|im_start|>assistant\n"


def test_glm_stop_token_opens_the_next_message(glm):
    assert glm.boundary.name == "glm"
    opened_user, opened_tool, ended = glm.stop_ids
    tail = "\nhi<|assistant|>\n"
    assert glm._tokenizer.decode(glm.append([user("hi")], opened_user)) == tail
    assert glm._tokenizer.decode(glm.append([user("hi")], opened_tool)) == "<|user|>" + tail  # the model had opened another kind of message
    assert glm._tokenizer.decode(glm.append([user("hi")], ended)) == "<|user|>" + tail
    assert glm.text([*glm.encode("ok"), opened_user]) == "ok"


def test_known_families_pass_the_proof(chat, glm):
    assert verify(chat) == len(conversations())
    assert verify(glm) == len(conversations(reasoning=True))


def test_a_template_that_numbers_its_messages_is_refused_with_the_smallest_example(tmp_path):
    chat = ChatTokenizer(make_tokenizer(tmp_path, COUNTING))
    with pytest.raises(ConfigError) as e:
        verify(chat)
    assert "not append-only" in str(e.value)
    # the smallest one that differs has a second message before the reply, which the stand-in conversation has not
    assert "    system: ''\n    user: ''\n    assistant: ''\n    user: ''\n" in str(e.value)
    here, whole = (chat.encode(f"user{n}\n")[-2] for n in (3, 4))
    assert here != whole and f", {here}, " in str(e.value) and f", {whole}, " in str(e.value)  # as tokens too


def test_a_template_that_rewrites_earlier_replies_is_refused(tmp_path):
    forgetting = CHATML.replace("{{ m.content }}", "{% if m.role == 'assistant' and loop.index < messages|length - 1 %}...{% else %}{{ m.content }}{% endif %}")
    with pytest.raises(ConfigError):
        verify(ChatTokenizer(make_tokenizer(tmp_path, forgetting)))


def test_a_template_without_a_rule_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="puts '</s>"):
        ChatTokenizer(make_tokenizer(tmp_path, CHATML.replace("<|im_end|>", "</s>")))


def test_a_rule_that_does_not_fit_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"<\|user\|>"):
        ChatTokenizer(tokenizer, "glm")


def test_a_stop_token_that_is_no_token_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not one token"):
        ChatTokenizer(make_tokenizer(tmp_path, GLM))  # this vocabulary has no <|user|>
