"""Moments in bf16: what rounding does to them, and that a run goes on with the same ones."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.core import EnvironmentFault
from miles.optim import BucketStore, StreamedAdam
from miles.optim.layout import BucketLayout
from miles.optim.rounding import key_of, random_bits, round_to_bf16

N, BUCKET = 50_000, 16_384
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}


def adam(folder, count=N, moments="bf16", step=0, **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(count))
    return StreamedAdam([{"params": [p], "step": step, **HYPER}], [p.detach()], folder, bucket=BUCKET, moments=moments, **options)


def train(optimizer, steps):
    p = optimizer.parameters[0]
    for step in steps:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


def moments_of(optimizer):
    """exp_avg and exp_avg_sq, as they lie on disk."""
    layout, out = optimizer.store.layout, ([], [])
    for bucket in range(layout.buckets):
        count = min(layout.bucket, layout.elements - bucket * layout.bucket)
        for parts, field in zip(out, optimizer.store.read(bucket)[1:], strict=True):
            parts.append(field[:count].clone())
    return [torch.cat(parts) for parts in out]


def values_of(*tensors):
    return lambda p, start, n: [t[start:start + n] for t in tensors]


def decayed(tmp_path, monkeypatch, rounding, steps, count=16_384):
    """exp_avg_sq, 1 at first, after `steps` steps whose gradients are 0."""
    optimizer = adam(tmp_path, count)
    optimizer.replace(values_of(torch.zeros(count), torch.zeros(count), torch.ones(count)))
    optimizer.parameters[0].grad = torch.zeros(count)
    with monkeypatch.context() as m:
        m.setattr("miles.optim.adam.round_to_bf16", rounding)
        for _ in range(steps):
            optimizer.step()
    return moments_of(optimizer)[1].float()


def test_to_the_nearest_second_moments_stay_where_they_are(tmp_path, monkeypatch):
    """0.999 lies between the bf16 numbers 1 and 1 - 1/256 = 0.99609, and 1 is nearer: each of 100 steps rounds back to it."""
    assert torch.equal(decayed(tmp_path, monkeypatch, lambda values, bits: values.bfloat16(), 100), torch.ones(16_384))


def test_rounded_stochastically_second_moments_decay_as_they_should_on_average(tmp_path, monkeypatch):
    """The first step leaves 1 - 256/1000 of the elements at 1. After 100 the mean is 0.999^100 = 0.90479; by hand: a step adds a variance of at most
    (1/256)^2 / 4 to an element, so after 100 its deviation is below 10 / 512 = 0.0195, and that of the mean of 16384 below 0.00016."""
    one = decayed(tmp_path / "one", monkeypatch, round_to_bf16, 1)
    assert set(one.unique().tolist()) == {1.0, 255 / 256}
    assert abs(float((one < 1).float().mean()) - 0.256) < 4 * math.sqrt(0.256 * 0.744 / 16_384)
    assert abs(float(decayed(tmp_path / "more", monkeypatch, round_to_bf16, 100).mean()) - 0.999**100) < 4 * 0.00016


def test_a_step_of_parameters_is_that_of_fp32_moments_at_first(tmp_path):
    narrow, wide = adam(tmp_path / "n"), adam(tmp_path / "w", moments="fp32")
    for optimizer in (narrow, wide):
        train(optimizer, [0])
    assert torch.equal(narrow.parameters[0], wide.parameters[0])  # moments of 0 are the same in both, and are computed in fp32
    for got, want in zip(moments_of(narrow), moments_of(wide), strict=True):
        assert got.dtype == torch.bfloat16 and ((got.float() - want).abs() <= want.abs() / 128).all()


def test_a_run_that_goes_on_rounds_as_the_one_that_was_not_interrupted(tmp_path):
    through, first = adam(tmp_path / "a", origins=[(5, 0)]), adam(tmp_path / "b", origins=[(5, 0)])
    train(through, range(5))
    train(first, range(3))
    again = adam(tmp_path / "c", origins=[(5, 0)], step=3)
    again.replace(values_of(first.parameters[0].detach(), *(m.float() for m in moments_of(first))))
    train(again, range(3, 5))
    for got, want in zip(moments_of(again), moments_of(through), strict=True):
        assert torch.equal(got, want)
    other = adam(tmp_path / "d", origins=[(6, 0)])
    train(other, range(5))
    assert not torch.equal(moments_of(other)[0], moments_of(through)[0])


def test_a_part_of_a_parameter_is_rounded_as_in_the_whole_wherever_its_elements_lie(tmp_path):
    """Another rank may have another part of the same parameter, behind other parameters, in other buckets."""
    torch.manual_seed(2)
    whole, grads = torch.randn(N), [torch.randn(N) for _ in range(3)]

    def stepped(name, parts):
        params = [torch.nn.Parameter(whole[start:end].clone()) for start, end in parts]
        optimizer = StreamedAdam([{"params": params, **HYPER}], [p.detach() for p in params], tmp_path / name, bucket=BUCKET, moments="bf16",
                                 origins=[(7, start) for start, _ in parts])
        for grad in grads:
            for p, (start, end) in zip(params, parts, strict=True):
                p.grad = grad[start:end].clone()
            optimizer.step()
        return moments_of(optimizer)

    for got, want in zip(stepped("cut", [(1234, 30_000), (30_000, N)]), stepped("whole", [(0, N)]), strict=True):
        assert torch.equal(got, want[1234:])


def test_fp32_moments_become_the_nearest_and_bf16_moments_stay_what_they_are(tmp_path):
    torch.manual_seed(1)
    means, squares, main = torch.randn(N), torch.rand(N), torch.randn(N)
    narrow, wide = adam(tmp_path / "n"), adam(tmp_path / "w", moments="fp32")
    narrow.replace(values_of(main, means, squares))
    stored = moments_of(narrow)
    assert torch.equal(stored[0], means.bfloat16()) and torch.equal(stored[1], squares.bfloat16())
    wide.replace(values_of(main, *(m.float() for m in stored)))
    assert all(torch.equal(a, b.float()) for a, b in zip(moments_of(wide), stored, strict=True))


def test_state_of_another_format_is_not_opened(tmp_path):
    adam(tmp_path)
    with pytest.raises(EnvironmentFault, match=r"buckets of 16384, moments in bf16\n +expected: .*moments in fp32"):
        BucketStore.open(tmp_path, BucketLayout((N,), BUCKET))


# -- rounding ---------------------------------------------------------------------------------------------------------------------
@given(st.floats(width=32), st.integers(0, 0xFFFF))
def test_a_value_becomes_itself_or_one_of_its_two_neighbours(value, bits):
    x = torch.tensor([value])
    got = float(round_to_bf16(x, torch.tensor([bits], dtype=torch.int32))[0])
    low = (x.view(torch.int32) & -0x10000).view(torch.float32)  # towards 0
    high = (low.view(torch.int32) + 0x10000).view(torch.float32)
    assert math.isnan(got) if math.isnan(value) else got in ((value,) if float(low) == value else (float(low), float(high)))


@pytest.mark.parametrize("payload", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_no_nan_becomes_a_number(payload):
    x = torch.tensor([payload], dtype=torch.int32).view(torch.float32)
    assert round_to_bf16(x, torch.tensor([0xFFFF], dtype=torch.int32)).isnan().all()


def test_of_all_random_bits_as_many_round_up_as_the_value_is_far_from_its_lower_neighbour():
    bits = torch.arange(1 << 16, dtype=torch.int32)
    for away in (1, 300, 0x8000, 0xFFFF):
        for sign in (1.0, -1.0):
            x = torch.full((1 << 16,), sign * (1 + away * 2.0**-23))
            assert int((round_to_bf16(x, bits).float().abs() > 1).sum()) == away


def test_random_bits_are_those_of_an_element_whatever_the_parts_and_differ_by_key():
    key = key_of(1, 2, 3)
    whole = random_bits(key, 0, 1000)
    assert torch.equal(torch.cat([random_bits(key, 0, 300), random_bits(key, 300, 700)]), whole)
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert int((random_bits(key_of(*other), 0, 1000) == whole).sum()) < 5


def test_random_bits_by_hand():
    """Element 0 under key (0, 0): x = 0 stays 0 in every step. Element 1: 0x9E3779B1; x ^ x >> 16 = 0x9E37E786; and so on,
    here in whole numbers, shifted as unsigned."""
    x = 0x9E3779B1
    for shift, then in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * then & 0xFFFFFFFF
    x ^= x >> 16
    assert [v & 0xFFFFFFFF for v in random_bits((0, 0), 0, 2).tolist()] == [0, x]


def test_both_halves_of_random_bits_are_uniform():
    """Of 2^20 draws into 256 equal cells chi-squared has 255 degrees of freedom: mean 255, deviation 22.6."""
    bits = random_bits(key_of(7), 0, 1 << 20)
    for half in (bits & 0xFFFF, bits >> 16 & 0xFFFF):
        counts = torch.bincount(half.long() >> 8, minlength=256).double()
        assert float(((counts - 4096) ** 2 / 4096).sum()) < 255 + 5 * 22.6
