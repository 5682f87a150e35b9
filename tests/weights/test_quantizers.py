"""Quantizers: exact values by hand, the same reading as SGLang's and compressed-tensors' own code, and properties."""

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core import StructureError
from miles.weights.precision import fp8_block, int4, mxfp8, nvfp4

ALL = {"fp8": fp8_block, "mxfp8": mxfp8, "nvfp4": nvfp4, "int4": int4}
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[torch.isfinite(E4M3)]


def noise(seed, r, c, spread=4.0, dtype=torch.float32):
    """Rows and columns of very different magnitudes."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(r, c, generator=g) * torch.exp(spread * torch.randn(r, 1, generator=g))).to(dtype)


def bits(t):
    return t.contiguous().view(torch.uint8)


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(bits(a[k].reshape(-1)), bits(b[k].reshape(-1))) for k in a)


# -- by hand -------------------------------------------------------------------------------------------------------------------
def test_fp8_a_block_is_scaled_so_that_its_largest_element_is_448():
    q = fp8_block.quantize(torch.tensor([[896.0, -2.0, 1.0, 0.0, 34.0, 38.0]]))
    assert q["weight_scale_inv"].tolist() == [[2.0]]
    assert q["weight"].float().tolist() == [[448.0, -1.0, 0.5, 0.0, 16.0, 20.0]]  # 17 is between 16 and 18, 19 between 18 and 20: to even mantissas


def test_fp8_blocks_at_the_edges_are_smaller_and_have_scales_of_their_own():
    w = torch.zeros(130, 257)
    w[129, 256], w[0, 0], w[0, 128] = 448.0, 896.0, 1792.0
    q = fp8_block.quantize(w)
    assert q["weight_scale_inv"].shape == (2, 3) and q["weight_scale_inv"].dtype == torch.float32
    assert q["weight_scale_inv"].tolist() == [[2.0, 4.0, 2.0**-100], [2.0**-100, 2.0**-100, 1.0]]
    assert torch.equal(fp8_block.dequantize(q), w)


def test_fp8_the_scale_is_rounded_up_to_20_significant_bits():
    q = fp8_block.quantize(torch.full((1, 1), 448 * (1 + 2**-22)))
    assert q["weight_scale_inv"].item() == 1 + 2**-19 and q["weight"].float().item() == 448.0


def test_mxfp8_the_scale_is_the_power_of_two_of_the_largest_element_and_what_exceeds_448_saturates():
    w = torch.zeros(1, 64)
    w[0, :3] = torch.tensor([500.0, -3.0, 2.0**-10])  # floor(log2 500) = 8: X = 1; 2^-10 is half of the smallest subnormal: to even, 0
    w[0, 32] = 1.0  # X = 2^-8, element 256
    q = mxfp8.quantize(w)
    assert q["weight_scale_inv"].tolist() == [[127, 119]] and q["weight_scale_inv"].dtype == torch.uint8
    assert q["weight"][0, :3].float().tolist() == [448.0, -3.0, 0.0] and q["weight"][0, 32].float().item() == 256.0


def test_nvfp4_two_levels_of_scales_and_two_elements_a_byte():
    w = torch.zeros(1, 32)
    w[0, :8] = torch.tensor([2688.0, -2688.0, 1344.0, 224.0, 112.0, -336.0, 560.0, 1120.0])  # h = 1, s = 448: 6, -6, 3, 0.5, 0.25, -0.75, 1.25, 2.5
    w[0, 16] = 6.0  # s = 1
    q = nvfp4.quantize(w)
    assert q["weight_scale_2"].item() == 1.0 and q["weight_scale"].float().tolist() == [[448.0, 1.0]]
    assert nvfp4.dequantize(q)[0, :8].tolist() == [2688.0, -2688.0, 1344.0, 224.0, 0.0, -448.0, 448.0, 896.0]  # ties go to even mantissas
    assert q["weight"][0, :4].tolist() == [0xF7, 0x15, 0xA0, 0x42] and q["weight"][0, 8].item() == 0x07


def test_int4_seven_steps_each_way_and_eight_elements_a_word():
    w = torch.zeros(1, 32)
    w[0, :8] = torch.tensor([14.0, -14.0, 2.0, 1.0, 3.0, -2.0, 0.0, 4.0])  # s = 2: 7, -7, 1, 0.5 -> 0, 1.5 -> 2, -1, 0, 2
    q = int4.quantize(w)
    assert q["weight_scale"].tolist() == [[2.0]] and q["weight_scale"].dtype == torch.bfloat16 and q["weight_shape"].tolist() == [1, 32]
    assert q["weight_packed"].tolist() == [[0xA87A891F - 2**32, *[0x88888888 - 2**32] * 3]]


# -- the readers' own code -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (200, 300), (129, 127)])
def test_fp8_is_read_by_sglang_as_we_read_it(shape, dtype):
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    q = fp8_block.quantize(noise(1, *shape, dtype=dtype))
    assert torch.equal(block_quant_dequant(q["weight"], q["weight_scale_inv"], [128, 128], dtype), fp8_block.dequantize(q, dtype))


def test_mxfp8_is_read_by_compressed_tensors_as_we_read_it():
    q = mxfp8.quantize(noise(2, 64, 256))
    scale = decompress_mx_scale(q["weight_scale_inv"]).float().repeat_interleave(32, 1)
    assert torch.equal(q["weight"].float() * scale, mxfp8.dequantize(q))


def test_nvfp4_elements_and_bytes_are_those_of_compressed_tensors():
    w = noise(3, 64, 256, spread=1.0)
    q = nvfp4.quantize(w)
    scale = (q["weight_scale"].float() * q["weight_scale_2"]).repeat_interleave(16, 1)
    theirs = cast_to_fp4(w / scale)
    assert torch.equal(unpack_fp4_from_uint8(q["weight"], 64, 256, torch.float32), theirs)
    assert torch.equal(nvfp4.dequantize(q), theirs * scale)
    assert torch.equal(unpack_fp4_from_uint8(pack_fp4_to_uint8(theirs), 64, 256), unpack_fp4_from_uint8(q["weight"], 64, 256))


def test_int4_words_are_those_of_compressed_tensors():
    w = noise(4, 64, 256)
    q = int4.quantize(w)
    values = unpack_from_int32(q["weight_packed"], 4, torch.Size(q["weight_shape"].tolist()))
    assert torch.equal(pack_to_int32(values, 4), q["weight_packed"])
    assert torch.equal(values.float() * q["weight_scale"].float().repeat_interleave(32, 1), int4.dequantize(q))


# -- properties ----------------------------------------------------------------------------------------------------------------
weights = st.builds(noise, st.integers(0, 10**6), st.integers(1, 140), st.sampled_from([32, 64, 160]), st.floats(0, 8),
                    st.sampled_from([torch.float32, torch.bfloat16]))


def nearest_e4m3(x):
    return (x.double().unsqueeze(-1) - E4M3.double()).abs().amin(-1)


@settings(max_examples=25, deadline=None)
@given(weights)
def test_fp8_no_e4m3_value_is_nearer(w):
    q = fp8_block.quantize(w)
    r, c = w.shape
    scale = q["weight_scale_inv"].repeat_interleave(128, 0)[:r].repeat_interleave(128, 1)[:, :c]
    found, best = (w.float() / scale - q["weight"].float()).abs().double(), nearest_e4m3(w.float() / scale)
    assert torch.all(found <= best * (1 + 1e-6) + 1e-9)


@settings(max_examples=25, deadline=None)
@given(weights)
def test_mxfp8_no_e4m3_value_is_nearer(w):
    q = mxfp8.quantize(w)
    x = w.double() / torch.exp2(q["weight_scale_inv"].double() - 127).repeat_interleave(32, 1)
    assert torch.all((x - q["weight"].double()).abs() <= nearest_e4m3(x))


@settings(max_examples=25, deadline=None)
@given(weights)
def test_int4_the_error_is_at_most_half_a_step(w):
    q = int4.quantize(w)
    step = q["weight_scale"].double().repeat_interleave(32, 1)
    assert torch.all((w.double() - int4.dequantize(q, torch.float64)).abs() <= step / 2 * (1 + 1e-6))


@settings(max_examples=25, deadline=None)
@given(weights)
def test_nvfp4_the_error_is_at_most_half_the_widest_step_or_what_saturates(w):
    q = nvfp4.quantize(w)
    unit = (q["weight_scale"].double() * q["weight_scale_2"].double()).repeat_interleave(16, 1)
    bound = torch.maximum(unit, w.double().abs() - 6 * unit)
    assert torch.all((w.double() - nvfp4.dequantize(q, torch.float64)).abs() <= bound * (1 + 1e-6))


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "int4"])
@settings(max_examples=25, deadline=None)
@given(w=weights)
def test_what_was_read_back_is_quantized_to_the_same_bytes(name, w):
    q = ALL[name].quantize(w)
    assert same(ALL[name].quantize(ALL[name].dequantize(q)), q)


@settings(max_examples=25, deadline=None)
@given(w=st.builds(noise, st.integers(0, 10**6), st.integers(1, 140), st.sampled_from([32, 64, 160]), st.floats(0, 1)))
def test_nvfp4_that_was_read_back_is_quantized_to_the_same_bytes_where_block_scales_are_normal(w):
    q = nvfp4.quantize(w)
    normal = q["weight_scale"].float() >= 2.0**-6
    again = nvfp4.quantize(nvfp4.dequantize(q))
    wide = normal.repeat_interleave(8, 1)
    assert torch.equal(again["weight_scale_2"], q["weight_scale_2"])
    assert torch.equal(again["weight"][wide], q["weight"][wide]) and torch.equal(again["weight_scale"].float()[normal], q["weight_scale"].float()[normal])


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros_and_the_largest_and_smallest_floats_stay_finite(name):
    assert not ALL[name].dequantize(ALL[name].quantize(torch.zeros(3, 64))).any()
    for size in (torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max, 2.0**-126, 2.0**-149):
        out = ALL[name].dequantize(ALL[name].quantize(torch.tensor([[size, -size] * 32])))
        assert torch.isfinite(out).all() and torch.equal(out[0, 0::2], -out[0, 1::2])
        assert out[0, 0] <= size * (1 + 2**-6) and (size < 1 or out[0, 0] >= 0.85 * size)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nan_are_refused(name, bad):
    w = torch.ones(4, 64)
    w[2, 3] = bad
    with pytest.raises(StructureError, match="1 elements are infinite or NaN"):
        ALL[name].quantize(w)


@pytest.mark.parametrize(("name", "shape"), [("mxfp8", (4, 48)), ("int4", (4, 40)), ("nvfp4", (4, 24)), ("fp8", (8,)), ("fp8", (2, 3, 4)), ("fp8", (0, 4))])
def test_shapes_that_a_format_cannot_hold_are_refused(name, shape):
    with pytest.raises(StructureError, match="quantizer"):
        ALL[name].quantize(torch.ones(shape))
