"""The plan alone: memory of sources and receivers is NumPy, and every piece is copied by its indices."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from models import DRAFTING, FAMILIES, Trainer, architecture, shards_of, tensors_of

from miles.core import StructureError
from miles.weights.mapping.placement import Place
from miles.weights.mapping.tables import EMBEDDING, rules_for
from miles.weights.p2p.plan import Box, plan, shard_parts
from miles.weights.p2p.receivers import engine_share, whole

TRAINERS = [Trainer(tp, pp, dp, etp, ep) for tp in (1, 2, 4) for pp in (1, 2) for dp in (1, 2, 4) for etp in (1, 2) for ep in (1, 2, 4)
            if (tp * dp) % (etp * ep) == 0]
MODELS = [*((f, False) for f in sorted(FAMILIES)), *((f, True) for f in DRAFTING)]  # without and with a draft layer
ENGINES = [(tp, ep, dp) for tp in (1, 2, 4, 8) for ep in (1, 2, 4) for dp in (1, 2) if tp % ep == 0 and tp % dp == 0]


def carry_out(chunks, sources, receivers, tensors):
    """Receivers' memory after all pieces, and how often each element was written."""
    memory = [{n: np.zeros((b.bottom - b.top, b.right - b.left)) for n, b in held.items()} for held in receivers]
    written = [{n: np.zeros(m.shape, int) for n, m in held.items()} for held in memory]
    for chunk in chunks:
        assert chunk.size == sum(p.box.size * tensors[p.name].itemsize for p in chunk.pieces)
        for p in chunk.pieces:
            shard = sources[chunk.source][p.key].numpy().reshape(len(sources[chunk.source][p.key]), -1)
            value = shard[p.row:p.row + p.box.bottom - p.box.top, p.column:p.column + p.box.right - p.box.left]
            for r in chunk.receivers:
                held = receivers[r][p.name]
                at = np.s_[p.box.top - held.top:p.box.bottom - held.top, p.box.left - held.left:p.box.right - held.left]
                assert memory[r][p.name][at].shape == value.shape
                memory[r][p.name][at] = value
                written[r][p.name][at] += 1
    return memory, written


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(TRAINERS), st.lists(st.sampled_from(ENGINES), min_size=1, max_size=2), st.sampled_from([24, 200, 1 << 20]),
       st.integers(9, 70))
def test_every_element_of_every_receiver_is_written_once_with_its_value(model, trainer, engines, chunk_bytes, vocab):
    family, draft = model
    arch = architecture(family, draft=draft, vocab_size=vocab)
    tensors = tensors_of(arch, "bfloat16")
    generator = torch.Generator().manual_seed(vocab)
    values = {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    places = trainer.places(arch.layers, arch.draft_layers)
    sources = [shards_of(arch, place, trainer, values) for place in places]
    receivers = [engine_share(arch, tensors, rank=r, tp=tp, ep=ep, dp_attention=dp) for tp, ep, dp in engines for r in range(tp)] + [whole(tensors)]
    memory, written = carry_out(plan(arch, places, tensors, receivers, chunk_bytes), sources, receivers, tensors)
    for held, got, count in zip(receivers, memory, written, strict=True):
        assert got.keys() == held.keys()
        for name, box in held.items():
            expected = values[name].numpy().reshape(len(values[name]), -1)[box.top:box.bottom, box.left:box.right]
            assert (count[name] == 1).all() and np.array_equal(got[name], expected), name


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_processes_of_an_engine_hold_every_element_between_them(family):
    arch = architecture(family)
    tensors = tensors_of(arch)
    shares = [engine_share(arch, tensors, rank=r, tp=4, ep=2, dp_attention=2) for r in range(4)]
    for name, tensor in tensors.items():
        covered = np.zeros((tensor.whole.bottom, tensor.whole.right), bool)
        for box in (s[name] for s in shares if name in s):
            covered[box.top:box.bottom, box.left:box.right] = True
        assert covered.all(), name


def test_key_and_value_heads_are_repeated_where_an_engine_has_more_processes():
    arch = architecture("llama")  # 8 query heads and 4 key heads of width 2
    tensors = tensors_of(arch)
    held = [engine_share(arch, tensors, rank=r, tp=8) for r in range(8)]
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert [h[name.format("q")][:2] for h in held] == [(2 * r, 2 * r + 2) for r in range(8)]
    assert [h[name.format("k")][:2] for h in held] == [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6), (6, 8), (6, 8)]


def test_every_process_of_an_engine_holds_what_joins_embedding_and_hidden_state_of_drafts_whole():
    arch = architecture("deepseek_v3", draft=True)
    tensors = tensors_of(arch)
    held = [engine_share(arch, tensors, rank=r, tp=4) for r in range(4)]
    assert [h["model.layers.4.eh_proj.weight"] for h in held] == [Box(0, 8, 0, 16)] * 4
    assert [h["model.layers.4.mlp.shared_experts.down_proj.weight"][2:] for h in held] == [(2 * r, 2 * r + 2) for r in range(4)]


def test_interleaved_query_groups_are_found_in_the_shard():
    arch = architecture("llama")  # 4 groups: 2 queries, a key and a value of 2 rows each
    qkv = next(r for r in rules_for(arch) if r.kind == "qkv")
    parts = list(shard_parts(qkv, [(16, 8), (8, 8), (8, 8)], 2, 1, arch))
    assert parts == [(0, Box(8, 12, 0, 8), 0, 0), (1, Box(4, 6, 0, 8), 4, 0), (2, Box(4, 6, 0, 8), 6, 0),
                     (0, Box(12, 16, 0, 8), 8, 0), (1, Box(6, 8, 0, 8), 12, 0), (2, Box(6, 8, 0, 8), 14, 0)]


def test_a_shard_that_is_all_padding_sends_nothing():
    assert list(shard_parts(EMBEDDING, [(5, 2)], 4, 3, architecture("llama", vocab_size=5))) == []
    assert list(shard_parts(EMBEDDING, [(5, 2)], 4, 2, architecture("llama", vocab_size=5))) == [(0, Box(4, 5, 0, 2), 0, 0)]


def test_replicas_share_the_bytes_of_their_shard():
    arch = architecture("qwen3")
    tensors = tensors_of(arch)
    chunks = plan(arch, Trainer(tp=2, dp=3).places(arch.layers), tensors, [whole(tensors)] * 2, chunk_bytes=64)
    sent = [sum(c.size * len(c.receivers) for c in chunks if c.source == r) for r in range(6)]
    assert sum(sent) == 2 * sum(t.whole.size * 4 for t in tensors.values())
    # ranks 0, 2, 4 have the unsharded norms beside their half of the rest; a piece is 64 bytes to each of two receivers
    assert max(sent[0::2]) - min(sent[0::2]) <= 128 and max(sent[1::2]) - min(sent[1::2]) <= 128


def test_receivers_that_hold_the_same_get_the_same_messages():
    arch = architecture("qwen3_moe")
    tensors = tensors_of(arch)
    chunks = plan(arch, Trainer(tp=2).places(arch.layers), tensors, [whole(tensors)] * 3)
    assert {c.receivers for c in chunks} == {(0, 1, 2)} and [c.source for c in chunks] == [0, 1]


def test_a_tied_output_layer_is_sent_once_from_the_first_stage():
    arch = architecture("llama")
    tensors = tensors_of(arch)
    chunks = plan(arch, Trainer(pp=2).places(arch.layers), tensors, [whole(tensors)])
    assert "lm_head.weight" not in tensors
    assert {c.source for c in chunks for p in c.pieces if p.name == "model.embed_tokens.weight"} == {0}


def test_a_receiver_that_holds_what_no_rank_has_is_refused():
    arch = architecture("llama")
    tensors = tensors_of(arch)
    with pytest.raises(StructureError, match=r"receiver 0 holds .* of extra.weight, of which the trainer has 0 elements"):
        plan(arch, [Place(0, 0, 3, 0, 0, 0, 0, 0)], tensors, [{**whole(tensors), "extra.weight": Box(0, 1, 0, 1)}])
