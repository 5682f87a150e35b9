"""The tiny model's parts: demonstrations that really ran, an exact tokenizer, a folder that other programs load."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from miles.config import load_config
from miles.core import ConfigError
from miles.env import EpisodeLimits, load_tasks
from miles.models import tiny_moe, warm_start
from miles.models.demonstrations import SHARES, demonstrate, plan
from miles.models.draft import add_draft_layer
from miles.weights.mapping import hf_names, read_architecture
from miles.weights.mapping.tables import parameters

ROOT = Path(__file__).parents[2]
TASKS = load_tasks(ROOT / "configs" / "tasks" / "terminal")
FEW = [t for t in TASKS if t.name in ("copy-1", "copy-2", "word-1", "delete-1")]
LIMITS = EpisodeLimits(max_turns=5, system_prompt="Reply with one command, or DONE.")


@pytest.fixture(scope="module")
def demonstrations():
    return demonstrate(plan(FEW, LIMITS.max_turns, 1), LIMITS)


@pytest.fixture(scope="module")
def tokenizer(demonstrations):
    return tiny_moe.make_tokenizer(demonstrations)


# ---- demonstrations ----


def test_the_shares_of_all_ways_of_acting_make_one():
    assert sum(SHARES.values()) == pytest.approx(1.0)
    weights = {}
    for task, _, weight, _ in plan(TASKS, 5, seed=1):
        weights[task.name] = weights.get(task.name, 0) + weight
    assert weights == pytest.approx({t.name: 1.0 for t in TASKS})


def test_a_plan_depends_on_its_seed_alone():
    def replies(seed):
        return [(t.name, r) for t, r, _, _ in plan(TASKS, 5, seed)]

    assert replies(1) == replies(1) != replies(2)


def test_what_a_demonstration_shows_was_really_printed(demonstrations):
    right = next(d for d in demonstrations if d.task == "word-1" and "right" in d.ways)
    assert [m["content"] for m in right.messages[2:]] == ["ls", "apple.txt", "cat apple.txt", "blue", "echo blue > new.txt", "[ok]", "DONE"]
    assert right.reward == 1.0


def test_the_right_way_is_rewarded_and_bad_habits_are_not(demonstrations):
    assert {d.reward for d in demonstrations if "right" in d.ways} == {1.0}
    assert {d.reward for d in demonstrations if {"hasty", "misplaced", "lost"} & set(d.ways)} == {0.0}


def test_a_task_without_a_solution_cannot_be_demonstrated():
    easy = load_tasks(ROOT / "configs" / "tasks" / "terminal_easy")
    with pytest.raises(ConfigError, match="at least 2 command"):
        plan(easy, 5, seed=1)


# ---- tokenizer and template ----


def test_every_id_has_a_text_and_the_special_ones_are_few(tokenizer):
    assert len(tokenizer) == tiny_moe.VOCAB_SIZE == 512
    assert [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>", "<|pad|>")] == [0, 1, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert tokenizer.decode([511]) == tokenizer.convert_ids_to_tokens(511)


def test_a_command_is_few_tokens(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("cat apple.txt")] == ["cat", " apple.txt"]


@given(st.text(max_size=40))
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_training_examples_are_what_the_chat_template_writes(tokenizer, demonstrations):
    for d in demonstrations:
        example = warm_start.encode(tokenizer, d)
        assert example.tokens == tokenizer.apply_chat_template(list(d.messages), return_dict=False)
        assert len(example.tokens) <= 250
        said = tokenizer.decode([t for t, m in zip(example.tokens, example.mask, strict=True) if m])
        assert said == "".join(m["content"] + "<|im_end|>" for m in d.messages if m["role"] == "assistant")


def test_the_template_is_append_only(tokenizer, demonstrations):
    for d in demonstrations:
        for n in range(2, len(d.messages), 2):
            before = tokenizer.apply_chat_template(list(d.messages[:n]), tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(list(d.messages), tokenize=False)
            assert after.startswith(before)


# ---- training and the folder ----


def test_the_loss_counts_only_what_the_assistant_wrote():
    tokens, weights, real = warm_start.pad([warm_start.Example([5, 6, 7], [0, 1, 1], 0.5), warm_start.Example([8, 9], [0, 1], 2.0)], pad_id=2)
    assert tokens.tolist() == [[5, 6, 7], [8, 9, 2]]
    assert weights.tolist() == [[0.0, 0.5, 0.5], [0.0, 2.0, 0.0]]
    assert real.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_the_folder_is_an_ordinary_one_and_made_alike_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_moe, "EPOCHS", 2)
    monkeypatch.setattr(tiny_moe, "SAMPLES", 1)
    monkeypatch.setattr(tiny_moe, "load_tasks", lambda path: FEW)
    config = load_config(ROOT / "configs" / "tiny_async.toml")
    facts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        random.seed(name)
        facts.append(tiny_moe.make(config, tmp_path / name, lambda line: None))
    assert facts[0] == facts[1] and set(facts[0]["success_by_task"]) == {t.name for t in FEW}
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as a, safe_open(tmp_path / "b" / "model.safetensors", "pt") as b:
        assert list(a.keys()) == list(b.keys())
        assert all(torch.equal(a.get_tensor(k), b.get_tensor(k)) for k in a.keys())  # noqa: SIM118
        assert a.get_tensor("model.layers.2.mlp.experts.7.gate_proj.weight").shape == (128, 128)
        assert a.get_tensor("lm_head.weight").dtype == torch.float32
        assert sum(a.get_tensor(k).numel() for k in a.keys()) == 1_462_336  # noqa: SIM118
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert type(loaded).__name__ == "Qwen3MoeForCausalLM" and not loaded.config.tie_word_embeddings
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.chat_template == tiny_moe.CHAT_TEMPLATE
    generation = json.loads((tmp_path / "a" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 2)


def test_the_rehearsal_model_has_a_draft_layer_that_starts_as_its_last(tokenizer, tmp_path):
    model, _ = tiny_moe.build("tiny_glm4_moe", tokenizer, 512)
    model.save_pretrained(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    count = add_draft_layer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    arch = read_architecture(tmp_path, draft=True)
    assert set(tensors) == {n for rule, layer, expert in parameters(arch) for n in hf_names(rule, layer, expert)} and arch.layers == 4
    own = {n.removeprefix("model.layers.4."): t for n, t in tensors.items() if n not in plain}
    assert count == sum(t.numel() for t in own.values())
    assert all(torch.equal(tensors[n], t) for n, t in plain.items())
    assert all(torch.equal(t, tensors[f"model.layers.3.{n}"]) for n, t in own.items() if n.startswith(("self_attn", "mlp", "input_", "post_")))
    assert torch.equal(own["eh_proj.weight"] @ torch.cat([torch.ones(128), 2 * torch.ones(128)]), 3 * torch.ones(128))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.norm.weight, plain["model.norm.weight"])
