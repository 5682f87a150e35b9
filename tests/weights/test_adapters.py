"""Merging an adapter into a weight: exact values, the same for every shard, and nothing where the adapter is 0. That trainer layouts and exports agree is tested in
tests/trainer/test_lora.py."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.weights import adapters
from miles.weights.adapters import merge, new_a
from miles.weights.digest import bits

DTYPES = [torch.float32, torch.bfloat16]


def merged(base, a, b, scale):
    out = torch.empty_like(base)
    merge(base, a, b, scale, out)
    return out


def same(x, y):
    return torch.equal(bits(x), bits(y))


def a_case(seed, n, m, r, dtype):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=g).mul(0.1).to(dtype) for shape in ((n, m), (r, m), (n, r)))


def test_a_merge_worked_by_hand():
    base, a, b = torch.tensor([[1.0, 2.0], [3.0, -4.0]]), torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, 10.0], [0.5, 0.0]])
    # B A = [[1, 12], [0.5, 1]]
    assert merged(base, a, b, 2.0).tolist() == [[3.0, 26.0], [4.0, -2.0]]


def test_the_sum_is_rounded_once():
    # in float32, or bfloat16, 1 + 2^-24 + 2^-24 is 1 when each addition is rounded, and the next number after 1 when the sum is
    base, half = torch.ones(1, 1), 2.0**-24
    assert merged(base, torch.ones(2, 1), torch.full((1, 2), half), 1.0).item() == 1 + 2.0**-23
    assert merged(base.bfloat16(), torch.ones(2, 1).bfloat16(), torch.full((1, 2), 2.0**-8).bfloat16(), 1.0).item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_are_sums_in_order_of_rank_in_float64(dtype):
    base, a, b = a_case(1, 5, 7, 6, dtype)
    out = merged(base, a, b, 1 / 3)
    for i in range(5):
        for j in range(7):
            total = np.float64(0)
            for k in range(6):
                product = Fraction(b[i, k].item()) * Fraction(a[k, j].item())
                assert Fraction(float(product)) == product  # exact, so one rounding or two are the same
                total = total + np.float64(float(product))
            want = torch.tensor(np.float64(base[i, j].item()) + total * (1 / 3), dtype=torch.float64).float().to(dtype)
            assert same(out[i, j], want)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 40), st.integers(1, 9), st.sampled_from(DTYPES), st.data())
def test_a_shard_of_the_merge_is_the_merge_of_the_shard(seed, n, m, r, dtype, data):
    base, a, b = a_case(seed, n, m, r, dtype)
    rows, columns = (sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in (n, m))
    part = (slice(*rows), slice(*columns))
    whole = merged(base, a, b, 0.75)
    assert same(whole[part].contiguous(), merged(base[part].contiguous(), a[:, part[1]].contiguous(), b[part[0]].contiguous(), 0.75))


@pytest.mark.parametrize("block", [1, 7, 100])
def test_what_is_in_work_at_a_time_changes_nothing(monkeypatch, block):
    base, a, b = a_case(3, 33, 21, 5, torch.bfloat16)
    want = merged(base, a, b, 2.0)
    monkeypatch.setitem(adapters._BLOCK, "cpu", block)
    assert same(want, merged(base, a, b, 2.0))


def test_an_adapter_of_0_changes_no_bit():
    base = torch.tensor([[-0.0, 0.0, 1e-40, float("inf")]])
    assert same(merged(base, new_a("x", 1, 3, 4), torch.zeros(1, 3), 2.0), base)


def test_a_new_a_follows_from_name_and_seed_and_has_the_spread_of_its_width():
    one = new_a("model.layers.0.self_attn.q_proj.weight", 1, 8, 400)
    assert torch.equal(one, new_a("model.layers.0.self_attn.q_proj.weight", 1, 8, 400))
    assert not torch.equal(one, new_a("model.layers.0.self_attn.q_proj.weight", 2, 8, 400)) and not torch.equal(one, new_a("model.layers.1.self_attn.q_proj.weight", 1, 8, 400))
    assert 0.045 < one.abs().max() <= 0.05 and abs(one.std().item() - 0.05 / 3**0.5) < 0.002
