"""What several trainer ranks hold alike is the same bit for bit before it is published. That it stays so over steps of training is checked in every layout of
test_layouts.py and test_mtp_layouts.py."""

import pytest
import torch
import worlds
from launch import Job, launch

from miles.weights.digest import bits
from miles.weights.mapping.replicas import mark_on_device

NORM, ROUTER, EMBEDDING, QUERY = "model.norm.weight", "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"
CASES = {  # model, layout, what is changed, what is named
    "a data-parallel copy": ("qwen3_moe", {}, QUERY, 'model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight'),
    "a data-parallel copy of an expert": ("qwen3_moe", {}, EXPERT, EXPERT),
    "a copy of context parallelism": ("qwen3_moe", {"cp": 2}, EMBEDDING, EMBEDDING),
    "a norm under tensor parallelism": ("llama", {"tp": 2}, NORM, NORM),
    "a router under tensor and expert parallelism": ("qwen3_moe", {"tp": 2, "ep": 2}, ROUTER, ROUTER),
    "the tied embedding of the last stage": ("llama", {"pp": 2}, EMBEDDING, EMBEDDING),
    "the embedding of a draft layer on the last stage": ("drafting", {"pp": 2}, EMBEDDING, EMBEDDING),
}
ALONE = {"a shard": ("llama", {"tp": 2}, QUERY), "an expert": ("qwen3_moe", {"ep": 2}, EXPERT), "a stage": ("qwen3_moe", {"pp": 2}, NORM)}
STEPS = {"tensor parallelism": ("qwen3_moe", {"tp": 2}, [2, 2, 8]), "a tied embedding on two stages": ("llama", {"pp": 2}, None)}


@pytest.fixture(scope="module")
def said(models, drafting, tmp_path_factory):
    folders = {**models, "drafting": drafting["glm4_moe"]}
    jobs = {name: Job(worlds.replicas_after_a_change, layout, (folders[model], layout, changed, model == "drafting"))
            for name, (model, layout, changed, *_) in {**CASES, **ALONE}.items()}
    jobs["versions"] = Job(worlds.versions_until_replicas_are_compared, {}, (models["llama"],))
    for name, (model, layout, routes) in STEPS.items():
        options = {"replay": routes is not None, "state_dir": str(tmp_path_factory.mktemp("state")), "optimizer": {"moments": "bf16"}}
        jobs[name] = Job(worlds.run_steps, layout, (models[model], options, layout, 3, 6, routes))
    return dict(zip(jobs, launch(list(jobs.values()), ranks=2, timeout_s=600), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_one_unit_in_the_last_place_of_a_copy_is_noticed_and_named_on_every_rank(said, name):
    first, second = said[name]
    assert first == second and first.startswith("weights:replicas: ") and f": {CASES[name][3]} (shard 0) differs between trainer ranks [0] and trainer ranks [1]; so do 0 more" in first


@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_holds_alone_is_not_compared(said, name):
    assert said[name] == ["", ""]


def test_copies_are_compared_before_every_eighth_version(said):
    assert said["versions"] == [8, 8]


@pytest.mark.parametrize("name", STEPS)
def test_moments_that_are_rounded_at_random_leave_copies_the_same(said, name):
    assert [[step["skipped"] for step in rank] for rank in said[name]] == [[False] * 3] * 2  # and the copies were compared then


def marks(tensors):
    return {mark_on_device(t).item() for t in tensors}


def flipped(tensor, bit, *places):
    out = tensor.clone()
    for place in places:
        bits(out)[place] ^= torch.tensor(1).bitwise_left_shift(bit).to(bits(out).dtype)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 8, 1001])  # of whole words of 64 bits, and not
def test_a_mark_in_torchs_operations_sees_any_bit_anywhere(dtype, size):
    tensor, width = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype), 8 * dtype.itemsize
    places = {0, size // 2, size - 1}
    assert len(marks([tensor, *(flipped(tensor, bit, place) for bit in range(width) for place in places)])) == 1 + width * len(places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_of_two_words_do_not_cancel_in_a_mark_nor_do_places_count_for_nothing(dtype):
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)
    pairs = [flipped(tensor, bit, 3, place) for bit in range(8 * dtype.itemsize) for place in (7, 11, 43)]  # 3, 7, 11, 43: the last of their words
    assert len(marks([tensor, tensor.flip(0), tensor.roll(4), *pairs])) == 3 + len(pairs)


def test_a_mark_does_not_depend_on_the_address():
    tensor = torch.randn(64).bfloat16()
    assert len(marks([tensor, torch.cat([tensor[:1], tensor])[1:]])) == 1
