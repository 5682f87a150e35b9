"""Patches applied to an engine's own, fused parameters: `apply_patch` alone. What a server does with them is in test_engine_real.py."""

import pytest
import torch

from miles.core import StructureError
from miles.engine.handover import READY, told
from miles.engine.inplace import Rehearsal, apply_patch, hugging_face_views
from miles.weights.digest import bits
from miles.weights.patch import Patch, encode_patch, write_patch

L = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (50, 8), f"{L}self_attn.q_proj.weight": (8, 8), f"{L}self_attn.k_proj.weight": (4, 8), f"{L}self_attn.v_proj.weight": (4, 8),
    f"{L}mlp.experts.0.gate_proj.weight": (6, 8), f"{L}mlp.experts.0.up_proj.weight": (6, 8), f"{L}mlp.experts.0.down_proj.weight": (8, 6),
    f"{L}mlp.experts.1.gate_proj.weight": (6, 8), f"{L}mlp.experts.1.up_proj.weight": (6, 8), f"{L}mlp.experts.1.down_proj.weight": (8, 6), "model.norm.weight": (8,),
}


def state(seed):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=g).bfloat16() for n, shape in SHAPES.items()}


def fused(s):
    """As SGLang holds them on a CPU: the embedding padded to 64 rows, experts stacked."""
    experts = [f"{L}mlp.experts.{i}." for i in range(2)]
    return {
        "model.embed_tokens.weight": torch.cat([s["model.embed_tokens.weight"], torch.zeros(14, 8).bfloat16()]),
        f"{L}self_attn.qkv_proj.weight": torch.cat([s[f"{L}self_attn.{p}_proj.weight"] for p in "qkv"]),
        f"{L}mlp.experts.w13_weight": torch.stack([torch.cat([s[e + "gate_proj.weight"], s[e + "up_proj.weight"]]) for e in experts]),
        f"{L}mlp.experts.w2_weight": torch.stack([s[e + "down_proj.weight"] for e in experts]),
        "model.norm.weight": s["model.norm.weight"].clone(),
    }


def patch(tmp_path, new, old):
    with open(tmp_path / "p", "wb") as f:
        write_patch(f, encode_patch(new.items(), old))
    return tmp_path / "p"


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(bits(a[n]), bits(b[n])) for n in a)


@pytest.mark.parametrize("rehearsed", [False, True])
@pytest.mark.parametrize("how", ["one element in seven", "all", "one tensor"])
def test_fused_parameters_become_those_of_the_new_state_and_padding_stays(tmp_path, how, rehearsed):
    old = state(1)
    new = state(2) if how == "all" else {n: t.clone() for n, t in old.items()}
    for t in new.values() if how == "one element in seven" else [new[f"{L}mlp.experts.1.up_proj.weight"]]:
        bits(t)[::7] ^= 1
    parameters = fused(old)
    commit = None
    if rehearsed:
        file = Patch(patch(tmp_path, new, old))
        commit = file.rehearse(hugging_face_views(parameters, file.shapes))
        assert same(parameters, fused(old)) and (commit is None) == (how == "all")
    where = {n: p.data_ptr() for n, p in parameters.items()}
    commit() if commit else apply_patch(patch(tmp_path, new, old), parameters)
    assert same(parameters, fused(new)) and {n: p.data_ptr() for n, p in parameters.items()} == where


@pytest.mark.parametrize("rehearsed", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_a_draft_layer_of_the_version_is_left_out_by_an_engine_that_has_none(tmp_path, rehearsed, dense):
    drafts = {"model.layers.1.enorm.weight": torch.ones(8).bfloat16(), "model.layers.1.self_attn.q_proj.weight": torch.ones(8, 8).bfloat16()}
    old, new = state(1), state(1)
    for t in new.values():
        bits(t)[::7] ^= 1
    moved = {n: t * 3 if dense else torch.cat([t[:1] * 3, t[1:]]) for n, t in drafts.items()}
    version = dict(sorted((new | moved).items()))  # between those that it has
    parameters, path = fused(old), patch(tmp_path, version, old | drafts)
    if rehearsed:
        rehearsal = Rehearsal(str(path), parameters)
        rehearsal.run()
        assert rehearsal.said == READY and same(parameters, fused(old))
        rehearsal._commit()
    else:
        apply_patch(path, parameters)
    assert same(parameters, fused(new))


def test_memory_that_is_not_the_base_is_refused_and_stays_what_it_was(tmp_path):
    old = state(1)
    new = {n: t.clone() for n, t in old.items()}
    for t in new.values():
        bits(t)[::7] ^= 1
    parameters = fused(old)
    parameters[f"{L}mlp.experts.w2_weight"][1, 7, 5] += 1  # in the last block that is looked at
    before = {n: p.clone() for n, p in parameters.items()}
    with pytest.raises(StructureError, match="a block does not become what the trainer had"):
        apply_patch(patch(tmp_path, new, old), parameters)
    file = Patch(tmp_path / "p")
    with pytest.raises(StructureError, match="a block does not become what the trainer had"):
        file.rehearse(hugging_face_views(parameters, file.shapes))
    assert same(parameters, before)


def test_memory_that_changes_between_rehearsal_and_pause_is_noticed(tmp_path):
    old = state(1)
    new = {n: t.clone() for n, t in old.items()}
    for t in new.values():
        bits(t)[::7] ^= 1
    parameters, path = fused(old), patch(tmp_path, new, old)
    rehearsal = Rehearsal(str(path), parameters)
    rehearsal.run()
    assert rehearsal.said == READY and told(path).exists()
    parameters[f"{L}mlp.experts.w2_weight"][1, 7, 5] += 1
    with pytest.raises(StructureError, match="a block does not become what the trainer had"):
        rehearsal._commit()


@pytest.mark.parametrize(("change", "said"), [
    (lambda s: s.pop("model.norm.weight"), "says nothing of the engine's .*model.norm.weight"),
    (lambda s: s.update({"nope.weight": torch.zeros(2)}), "no parameter nope.weight"),
    (lambda s: s.update({f"{L}self_attn.v_proj.weight": torch.zeros(5, 8).bfloat16()}), "does not fit the engine's .*qkv_proj.weight of 128 elements"),
    (lambda s: s.update({"model.norm.weight": torch.zeros(8)}), "changes model.norm.weight, of which the reader has"),
])
def test_a_patch_of_other_tensors_is_refused(tmp_path, change, said):
    other = state(1)
    change(other)
    parameters = fused(state(1))
    with pytest.raises(StructureError, match=said):
        apply_patch(patch(tmp_path, other, {n: t.clone() for n, t in other.items()}), parameters)
    assert same(parameters, fused(state(1)))
