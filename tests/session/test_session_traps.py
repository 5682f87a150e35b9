"""Ways in which token-exact training goes wrong elsewhere, each with the right value."""

import numpy as np
import pytest

from miles.core import ConfigError, StructureError
from miles.session import ChatTokenizer, assemble, verify
from tests.engine.tiny import CHATML, CORPUS
from tests.session.conftest import user
from tests.session.fake import finish, leaves, open_session

BARE = CHATML.replace("<|im_end|>\n", "<|im_end|>")  # nothing between the end of a message and the next
SPACED = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def leading_space(template, prepend, special=True):
    """A vocabulary of the SentencePiece kind, in which a word at the beginning is another token than the same word after something."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    core.decoder = decoders.Metaspace(prepend_scheme=prepend)
    alphabet = sorted(set("".join(CORPUS) + "user: assistant: tool system probe-question probe-answer"))
    core.train_from_iterator([*CORPUS, "user: user: user: tool: system: assistant:"], trainers.BpeTrainer(
        vocab_size=200, initial_alphabet=alphabet, show_progress=False, special_tokens=["<unk>", "<s>"]))
    if special:
        core.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>" if special else "<s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("prepend", ["always", "first", "never"])
def test_a_suffix_has_the_tokens_it_has_in_context(prepend):
    tokenizer = leading_space(SPACED, prepend)
    chat = ChatTokenizer(tokenizer)
    suffix = "user: list<|im_end|>assistant:"
    alone = tokenizer.encode(suffix, add_special_tokens=False)
    whole = tokenizer.encode("user: a<|im_end|>assistant: ok<|im_end|>" + suffix, add_special_tokens=False)
    context = whole[np.flatnonzero(np.array(whole) == chat.stop_ids[0])[1] + 1:]
    assert (alone == context) == (prepend != "first"), "with `first` the naive way is wrong"
    ours = chat.append([user("list")], chat.stop_ids[0])
    assert ours == context and tokenizer.decode(ours, skip_special_tokens=False).replace(" ", "") == suffix.replace(" ", "")


def test_a_stop_mark_that_is_ordinary_text_is_refused():
    with pytest.raises(ConfigError, match="not one token"):
        ChatTokenizer(leading_space(SPACED, "never", special=False))


class Merging:
    """A tokenizer to which the stop mark is one token alone, and another one together with a newline after it."""

    WORDS = ("<|im_end|>\n", "<|im_end|>")

    def __init__(self, template):
        import jinja2

        self.template = jinja2.Environment().from_string(template)

    def apply_chat_template(self, conversation, *, tools, tokenize, add_generation_prompt):
        return self.template.render(messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt)

    def encode(self, text, *, add_special_tokens):
        ids = []
        while text:
            word = next((i for i, w in enumerate(self.WORDS) if text.startswith(w)), None)
            ids.append(word if word is not None else 10 + ord(text[0]))
            text = text[len(self.WORDS[word]) if word is not None else 1:]
        return ids

    def decode(self, ids, **kw):
        return "".join(self.WORDS[i] if i < 10 else chr(i - 10) for i in ids)


def test_a_stop_token_that_merges_with_what_follows_is_detected_and_refused():
    chat = ChatTokenizer(Merging(CHATML))
    assert chat.stop_ids == (1,)
    with pytest.raises(StructureError) as e:
        chat.append([user("hi")], 1)
    assert e.value.cause == "tokenization:merge"
    with pytest.raises(ConfigError, match="the stop token '<|im_end|>' by itself"):
        verify(chat)
    assert verify(ChatTokenizer(Merging(BARE)))  # where nothing follows it that it merges with, it is exact


def test_two_appended_messages_are_rendered_together():
    """A template that writes consecutive results into one message: rendered apart, the second would open one of its own."""
    grouping = CHATML.replace("<|im_start|>{{ m.role }}\n", "{% if loop.first or messages[loop.index0 - 1].role != m.role %}<|im_start|>{{ m.role }}\n{% endif %}")
    chat = ChatTokenizer(Merging(grouping.replace("<|im_end|>\n", "<|im_end|>")))
    results = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    together = chat.append(results, 1)
    assert chat._tokenizer.decode(together) == "<|im_start|>tool\na<|im_end|>b<|im_end|><|im_start|>assistant\n"
    apart = [i for m in results for i in chat.append([m], 1)]
    assert apart.count(1) == 2 and chat._tokenizer.decode(apart).count("<|im_start|>tool") == 2 != chat._tokenizer.decode(together).count("<|im_start|>tool")
    s = open_session(chat)
    first = s.ask([user("q")], [99, 1])
    s.ask([user("q"), first.message, *results], [98, 1])
    assert s.engine.answered[1].input_ids.tolist() == [*s.engine.answered[0].input_ids, 99, 1, *together]


def test_the_stop_token_is_there_once(chat):
    s, stop = open_session(chat), chat.stop_ids[0]
    first = s.ask([user("q")], [50, stop])
    s.ask([user("q"), first.message, user("r")], [51, stop])
    t = finish(s.session)
    # the end of the question, of the sampled reply, of the second question, of the second reply: four, of which two were sampled
    assert (t.tokens == stop).sum() == 4 and ((t.tokens == stop) & (t.loss_mask == 1)).sum() == 2
    where = np.flatnonzero(t.tokens == stop)
    assert not (np.diff(where) == 1).any()


def test_a_retry_of_the_first_turn_starts_from_nothing(chat):
    s, stop = open_session(chat), chat.stop_ids[0]
    s.ask([user("q")], [50, stop])
    s.ask([user("q")], [51, 52, stop])
    t = finish(s.session)
    assert t.tokens.tolist() == [*chat.first([user("q")]), 51, 52, stop] and t.loss_mask.sum() == 3 and s.session.retries == 1


def test_an_invalid_request_after_a_valid_turn_loses_nothing(chat):
    s, stop = open_session(chat), chat.stop_ids[0]
    first = s.ask([user("q")], [50, stop])
    before = s.session.history
    bad = [([], {}), ([user("q"), {"role": "assistant", "content": "mine"}, user("r")], {}), ([user("other"), first.message, user("r")], {}),
           ([user("q"), first.message, user("r")], {"tools": [{"type": "function"}]}),
           ([user("q"), first.message, user("r")], {"tools": [{"type": "function", "function": {"name": "new"}}]})]
    for messages, more in bad:
        with pytest.raises(StructureError):
            s.ask(messages, [51, stop], **more)
    assert s.session.history is before and len(s.engine.answered) == 1
    assert s.session.refused == {"history:message": 1, "history:content": 2, "request:tools": 1, "history:tools": 1}
    s.ask([user("q"), first.message, user("r")], [51, stop])
    t = finish(s.session)
    assert t.loss_mask.sum() == 4 and t.meta["refused_requests"] == dict(s.session.refused)


def test_nothing_is_joined_to_a_turn_that_was_cut(chat):
    s, stop = open_session(chat, max_turn_tokens=3), chat.stop_ids[0]
    cut = s.ask([user("q")], [50, 51, 52, stop])
    assert cut.finish_reason == "length" and cut.turn.output_ids.tolist() == [50, 51, 52]
    with pytest.raises(StructureError) as e:
        s.ask([user("q"), cut.message, user("r")], [53, stop])
    assert e.value.cause == "history:truncated" and finish(s.session).tokens.tolist() == [*chat.first([user("q")]), 50, 51, 52]


def test_a_branching_history_takes_a_cut_turn_as_given_text_in_a_sequence_of_its_own(chat):
    s, stop = open_session(chat, branching=True, max_turn_tokens=3), chat.stop_ids[0]
    first = s.ask([user("q")], [49, stop])
    cut = s.ask([user("q"), first.message, user("r")], [50, 51, 52, stop])
    s.ask([user("q"), first.message, user("r"), cut.message, user("go on")], [53, stop])
    one, two = leaves(s.session)
    assert one.tokens[one.loss_mask == 1].tolist() == [49, stop, 50, 51, 52]
    assert two.tokens[two.loss_mask == 1].tolist() == [53, stop]  # the first turn is trained once, the cut one is text here
    whole = chat.render([user("q"), first.message, user("r"), cut.message, user("go on")])
    assert chat._tokenizer.decode(two.tokens) == whole + chat._tokenizer.decode([53, stop])


def test_a_turn_that_ends_exactly_at_the_length_limit_ended_by_itself(chat):
    stop = chat.stop_ids[0]
    s = open_session(chat, max_turn_tokens=3)
    first = s.ask([user("q")], [50, 51, stop])
    assert first.finish_reason == "stop" and first.turn.output_ids.tolist() == [50, 51, stop]
    s.ask([user("q"), first.message, user("r")], [52, stop])  # and can be continued
    assert finish(s.session).loss_mask.sum() == 5
    room = len(chat.first([user("q")])) + 3
    s = open_session(chat, max_session_tokens=room)
    first = s.ask([user("q")], [50, 51, stop])
    assert first.finish_reason == "stop" and s.session.tokens == room
    end = s.ask([user("q"), first.message, user("r")], [52, stop])
    assert (end.content, end.finish_reason, end.turn) == ("", "length", None) and len(s.engine.answered) == 1
    assert finish(s.session).loss_mask.sum() == 3, "the turns before the end of the budget are trained as they were"


def test_a_session_over_its_budget_tells_the_agent_and_trains_what_there_is(chat):
    """An agent that goes on until it is told `length`."""
    s, stop = open_session(chat, max_session_tokens=60), chat.stop_ids[0]
    messages, asked = [user("q")], 0
    while True:
        answer = s.ask(messages, [50, 51, stop])
        asked += 1
        if answer.finish_reason == "length":
            break
        messages = [*messages, answer.message, user("more")]
    t = finish(s.session)
    assert asked > 2 and len(t.tokens) <= 60
    assert t.tokens.tolist() == assemble(s.session.turns).tokens.tolist()
    assert t.tokens.tolist() == [*s.engine.answered[-1].input_ids, *s.engine.answered[-1].output_ids]
