"""The route codec: exact values, the same bytes as the plain description of the format, layers read alone, damage found."""

import sys
from math import comb, log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.buffer import route_kernels as kernels
from miles.buffer.routes import RouteReader, decode_routes, decode_weights, encode_routes, fit_weights
from miles.core import StructureError

sys.path.insert(0, str(Path(__file__).parent))

import routes_reference as reference

HEAD, ENTRY = 32, 13  # bytes of the header, and of each block's entry in it


def draw_sets(rng, rows, layers, k, experts, skew=0.0):
    """[rows, layers, k] in random order; expert popularity falls like rank^-skew, another order in each layer."""
    out = np.empty((rows, layers, k), np.uint8 if experts <= 256 else np.uint16)
    for layer in range(layers):
        score = -skew * np.log(1 + rng.permutation(experts)) + rng.gumbel(size=(rows, experts))
        out[:, layer] = np.argsort(-score, axis=-1)[:, :k]
    return out


def test_two_rows_of_two_out_of_four_by_hand():
    """Z[1] = 4 3 2 1 0 and Z[2] = 6 3 1 0 0 (pairs out of the experts a..3). One coder, the last row first, x = 2^31 to begin with.

    M = 2^24 - 4 = 16777212; the choice of j out of a.. begins at (j - a) + floor((Z[a] - Z[j]) * M / Z[a]).
    Row 1 = {2, 3}: 3 out of 3..: [0, 1 + M = 16777213), so x = 2^31 div 16777213 * 2^24 + 2^31 mod 16777213 = 128 * 2^24 + 384.
                    2 out of 0..: with Z[2]: [2 + 5 M / 6 = 13981012, 3 + M = 16777215), a width of 2796203:
                    2147484032 = 768 * 2796203 + 128, so x = 768 * 2^24 + 128 + 13981012 = 12898883028.
    Row 0 = {0, 1}: 1 out of 1..: with Z[1]: [0, 1 + M / 3 = 5592405): 12898883028 = 2306 * 5592405 + 2797098,
                    so x = 2306 * 2^24 + 2797098 = 38691057194.
                    0 out of 0..: [0, 1 + 3 M / 6 = 8388607): 38691057194 = 4612 * 8388607 + 2801710, so x = 4612 * 2^24 + 2801710.
    """
    words = reference.encode([[0, 1], [2, 3]], [1, 1, 1, 1], 2, 1)
    assert words == [(4612 * 2**24 + 2801710) % 2**32, (4612 * 2**24 + 2801710) >> 32]
    blob = encode_routes(np.array([[[1, 0]], [[3, 2]]], np.uint8))
    assert len(blob) == HEAD + 2 * ENTRY + 8 and blob[-8:].view(np.uint32).tolist() == words
    assert decode_routes(blob).tolist() == [[[0, 1]], [[2, 3]]]


def test_subset_sums_are_binomials_for_equal_weights_and_products_otherwise():
    z = kernels.subset_sums(np.ones(5), 3)[0].reshape(4, -1)
    assert z[:, :6].tolist() == [[comb(5 - a, m) for a in range(6)] for m in range(4)]
    z = kernels.subset_sums(np.array([2.0, 3.0, 5.0]), 2)[0].reshape(3, -1)[:, :4]
    assert z[1].tolist() == [10, 8, 5, 0] and z[2].tolist() == [2 * 3 + 2 * 5 + 3 * 5, 15, 0, 0]


def test_weight_codes_are_eight_steps_an_octave():
    assert decode_weights(np.array([0, 1, 7, 8, 9, 16, 255], np.uint8)).tolist() == [1, 9 / 8, 15 / 8, 2, 9 / 4, 4, 15 / 8 * 2**31]
    # in 64 rows: odds 1/63, 8/56 = 9 times as much, 32/32 = 63 times as much: 2^3 * 9/8 and 2^5 * 63/32, which rounds to 2^6
    assert decode_weights(fit_weights(np.array([1, 8, 32]), 64)).tolist() == [1, 9, 64]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_what_is_written_comes_back_ascending(data):
    experts = data.draw(st.one_of(st.integers(1, 20), st.integers(21, 300), st.sampled_from([65536])))
    k = data.draw(st.integers(1, min(experts, 12)))
    rows, layers = data.draw(st.sampled_from([0, 1, 2, 5, 63, 64, 65, 67, 300, 2048, 2049, 4100])), data.draw(st.integers(0, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    if experts > 300:
        rows = min(rows, 5)
    routes = draw_sets(rng, rows, layers, k, experts, data.draw(st.sampled_from([0.0, 1.0, 3.0])))
    if routes.size and data.draw(st.booleans()):  # an expert named twice: nothing for the trainer, but storage keeps it
        routes[-1, 0, 0] = routes[-1, 0, -1]
    back = decode_routes(encode_routes(routes))
    assert back.dtype == routes.dtype and np.array_equal(back, np.sort(routes, axis=-1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 90), st.integers(0, 99), st.booleans())
def test_the_compiled_coder_writes_the_bytes_of_the_plain_one(experts, k, rows, seed, equal):
    rng, k = np.random.default_rng(seed), min(k, experts)
    codes = np.zeros(experts, np.uint8) if equal else rng.integers(0, 256, experts).astype(np.uint8)
    weights, lanes = decode_weights(codes), 4 if seed % 2 else 1
    sets = np.sort(draw_sets(rng, rows, 1, k, experts)[:, 0], axis=-1)
    z, s = kernels.subset_sums(weights, k)
    out = np.zeros(k * rows + 2 * kernels.LANES + 1, np.uint32)
    words = out[kernels.encode(np.ascontiguousarray(sets.T), z, s, lanes, out) :]
    assert words.tolist() == reference.encode(sets, weights, k, lanes)
    assert np.array_equal(reference.decode(words, weights, rows, k, lanes), sets)
    back = np.zeros_like(sets)
    assert kernels.decode(words.copy(), z, s, kernels.guesses(z, k), lanes, back) and np.array_equal(back, sets)


@pytest.mark.parametrize(("skew", "most"), [(0.0, 1.0036), (1.0, 0.8)])
def test_size_is_at_the_bound_for_uniform_routes_and_below_for_skewed_ones(skew, most):
    """The bound is 97,083 bytes. One segment takes 0.08 % more; each of seven others 36 bytes (13 in the header, 23 for the states of four coders), 0.26 %."""
    routes = draw_sets(np.random.default_rng(0), 16000, 1, 8, 256, skew)
    assert len(encode_routes(routes)) * 8 <= most * 16000 * log2(comb(256, 8))


def test_repeated_text_takes_next_to_nothing():
    once = draw_sets(np.random.default_rng(0), 100, 2, 8, 256)
    routes = np.tile(once, (40, 1, 1))
    blob = encode_routes(routes)
    assert len(blob) < 3 * once.size and np.array_equal(decode_routes(blob), np.sort(routes, axis=-1))


class Counted:
    """A blob that notes which of its bytes are read."""

    def __init__(self, blob):
        self.blob, self.touched, self.reads = blob, [], 0

    def __len__(self):
        return len(self.blob)

    def __getitem__(self, part):
        self.touched.extend(range(*part.indices(len(self.blob))))
        self.reads += 1
        return self.blob[part]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reading_some_layers_and_rows_equals_slicing_and_touches_nothing_else(data):
    layers = data.draw(st.integers(1, 9))
    rows = data.draw(st.sampled_from([30, 400, 1500, 2048, 4097, 5000]))  # all layers, two layers, one layer in a section; up to three segments
    routes = draw_sets(np.random.default_rng(1), rows, layers, 3, 16, data.draw(st.sampled_from([0.0, 2.0])))
    source = Counted(encode_routes(routes))
    first = data.draw(st.integers(0, layers))
    chosen = data.draw(st.sampled_from([None, slice(first, None), slice(None, first), slice(None, None, 2), range(first, layers), [layers - 1]]))
    near = st.sampled_from([b for b in (0, 1, 2047, 2048, 2049, 4096, rows - 1, rows) if b <= rows])
    bounds = sorted(data.draw(st.lists(st.one_of(near, st.integers(0, rows)), min_size=0, max_size=6).filter(lambda b: len(b) % 2 == 0)))
    ranges = data.draw(st.sampled_from([None, list(zip(bounds[::2], bounds[1::2], strict=True))]))
    reader = RouteReader(source)
    index = np.arange(rows) if ranges is None else np.concatenate([np.arange(0), *(np.arange(*r) for r in ranges)])
    columns = slice(None) if chosen is None else chosen if isinstance(chosen, slice) else list(chosen)
    assert np.array_equal(reader.read(chosen, ranges), np.sort(routes, axis=-1)[index][:, columns])
    assert len(source.touched) == len(set(source.touched)) == reader.size(chosen, ranges)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_a_context_parallel_rank_reads_its_share_of_the_bytes_with_a_read_for_each_of_its_ranges(skew):
    """Of 16384 rows, rank 1 of 4 holds chunks 1 and 6 of eight, which are segments 1 and 6; a pipeline stage besides half of the layers."""
    blob = encode_routes(draw_sets(np.random.default_rng(3), 16384, 4, 8, 64, skew))
    source = Counted(blob)
    reader, ranges = RouteReader(source), [(2048, 4096), (12288, 14336)]
    assert source.reads == 2  # header and table
    part = reader.read([2, 3], ranges)
    assert np.array_equal(part, decode_routes(blob)[np.r_[2048:4096, 12288:14336], 2:])
    assert source.reads == 2 + 2 + (skew > 0)  # and the weights
    assert reader.size([2, 3], ranges) - len(reader.header) < 1.01 * (len(blob) - len(reader.header)) / 8 + 2 * 64


@pytest.mark.parametrize("ranges", [[(0, 6)], [(3, 2)], [(2, 4), (3, 5)], [(-1, 2)]])
def test_rows_that_are_not_there_or_not_in_order_are_refused(ranges):
    blob = encode_routes(draw_sets(np.random.default_rng(1), 5, 2, 2, 8))
    with pytest.raises(StructureError, match="of routes with 5 rows"):
        decode_routes(blob, rows=ranges)


def test_layers_that_are_not_there_are_refused():
    blob = encode_routes(draw_sets(np.random.default_rng(1), 5, 2, 2, 8))
    with pytest.raises(StructureError, match=r"layers \[1, 2\] of routes with 2 layers"):
        decode_routes(blob, [1, 2])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_found(data):
    rng = np.random.default_rng(2)
    kind = data.draw(st.sampled_from(["uniform", "weighted", "repeated", "few"]))
    routes = draw_sets(rng, {"few": 6, "weighted": 2100}.get(kind, 500), 2, 4, 32, 2.0 if kind == "weighted" else 0.0)
    if kind == "repeated":
        routes[:] = routes[:1]
    blob = encode_routes(routes)
    how = data.draw(st.sampled_from(["flip", "cut", "longer"]))
    if how == "flip":
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    blob = blob[: data.draw(st.integers(0, len(blob) - 1))] if how == "cut" else np.append(blob, np.uint8(0)) if how == "longer" else blob
    with pytest.raises(StructureError):
        decode_routes(blob)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=0, max_size=400), st.integers(1, 70), st.integers(1, 4), st.integers(4, 12), st.sampled_from([1, 4]))
def test_the_decoder_survives_any_words(data, rows, k, experts, lanes):
    """Digests aside: it says no, or gives experts; it reads and writes nothing outside its arrays."""
    words = np.frombuffer(data[: len(data) // 4 * 4], np.uint32).copy()
    z, s = kernels.subset_sums(np.ones(experts), k)
    out = np.zeros((rows + 2, k), np.uint8)
    kernels.decode(words, z, s, kernels.guesses(z, k), lanes, out[1:-1])
    assert not out[0].any() and not out[-1].any()


def test_other_arrays_are_refused():
    with pytest.raises(StructureError, match="int32"):
        encode_routes(np.zeros((3, 2, 2), np.int32))
