import io
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core import StructureError
from miles.core.compiled import compiled
from miles.weights import kernels
from miles.weights.digest import BLOCK_BYTES, bits, blocks, digest
from miles.weights.kernels import Changes
from miles.weights.patch import Patch, encode_patch, write_patch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.float64]
UNSIGNED = [np.uint8, np.uint16, np.uint32, np.uint64]
SCRATCH = kernels.Scratch(1 << 16)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.patch"


def write(path, new, old, **kw):
    with open(path, "wb") as f:
        return write_patch(f, encode_patch(new.items(), old, **kw))


def copy(state):
    return {n: t.clone() for n, t in state.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and torch.equal(bits(a[n]), bits(b[n])) for n in a)


def described(tensor):
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "digest": digest(tensor)}


def random_bits(generator, n, dtype):
    return torch.from_numpy(generator.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(f"i{dtype.itemsize}")).view(dtype)


def moved(generator, tensor, density, largest=1):
    new = tensor.clone()
    flat = bits(new).numpy()
    at = np.flatnonzero(generator.random(len(flat)) < density)
    flat[at] += generator.integers(1, largest + 1, len(at)).astype(flat.dtype) * generator.choice([-1, 1], len(at)).astype(flat.dtype)
    return new


# -- kernels -----------------------------------------------------------------------------------------------------------------
@settings(max_examples=80, deadline=None)
@given(st.sampled_from(UNSIGNED), st.integers(0, 3000), st.sampled_from([0, 0.0005, 0.01, 0.3, 1]), st.integers(0, 63), st.integers(0, 7), st.integers(0, 2**32))
def test_compiled_kernels_give_what_their_numpy_definitions_give(dtype, n, density, largest, offset, seed):
    g = np.random.default_rng(seed)
    old = g.integers(0, 256, (n + offset) * dtype().itemsize, dtype=np.uint8).view(dtype)[offset:]  # words need not be aligned
    new = old.copy()
    at = g.random(n) < density
    new[at] += g.integers(0, 2 ** min(largest, 8 * dtype().itemsize - 1) + 1, n, dtype=np.uint64).astype(dtype)[at]
    (found, result), defined = kernels.find(new, old, SCRATCH), kernels.find_numpy(new, old)
    for a, b in zip(found, defined, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b))
    block = old.copy()
    kernels.scatter_numpy(block, defined)
    assert np.array_equal(block, new)
    kernels.scatter_numpy(block, defined, undo=True)
    assert np.array_equal(block, old)
    assert kernels.scatter(block, found, aside=True) == result == xxhash.xxh3_128_digest(new) and np.array_equal(block, old)
    assert kernels.scatter(block, found) == result and np.array_equal(block, new)
    assert kernels.scatter(block, found, undo=True) == xxhash.xxh3_128_digest(old) and np.array_equal(block, old)
    kernels.find(new, block, SCRATCH, advance=True)
    assert np.array_equal(block, new)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_digests_are_xxh3_of_blocks_that_end_anywhere(dtype):
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    for size in {*range(0, 340), *(k * 1024 + i for k in (1, 2, 4) for i in range(-68, 69))}:
        block = data[:size // dtype().itemsize * dtype().itemsize].view(dtype)
        changes, result = kernels.find(block, block.copy(), SCRATCH)
        assert result == kernels.scatter(block, changes) == kernels.scatter(block, changes, aside=True) == xxhash.xxh3_128_digest(block), size


def test_gaps_signs_and_magnitudes_by_hand():
    old = np.full(600, 10, np.uint16)
    new = old.copy()
    new[[0, 3, 300]] = 11, 8, 10 + 256
    (symbols, signs, magnitudes), _ = kernels.find(new, old, SCRATCH)
    assert symbols.tolist() == [0, 2, 255, 41] and symbols.dtype == np.uint8  # 296 = 255 + 41 unchanged elements between 3 and 300
    assert signs.tolist() == [0b010] and magnitudes.tolist() == [0, 1, 255]


def test_without_a_cache_folder_kernels_are_compiled_all_the_same(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    before = numba.config.CACHE_DIR
    double = compiled(lambda x: 2 * x)
    assert double(21) == 42 and numba.config.CACHE_DIR == before


def test_rare_changes_take_two_byte_gaps():
    old = np.zeros(70000, np.uint8)
    new = old.copy()
    new[69999] = 1
    (symbols, _, magnitudes), _ = kernels.find(new, old, kernels.Scratch(1 << 17))
    assert symbols.tolist() == [65535, 69999 - 65535] and symbols.dtype == np.uint16 and magnitudes is None


def test_compiled_code_is_cached_for_the_user_and_not_beside_the_sources():
    kernels.find(np.ones(800, np.uint8), np.zeros(800, np.uint8), SCRATCH)
    assert list(Path(kernels.__file__).parent.rglob("*.nb[ic]")) == []


# -- the file ----------------------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 3000), st.sampled_from([0, 0.001, 0.05, 0.5, 1]), st.sampled_from([1, 40, 2**15, 2**40]), st.integers(0, 2**32))
def test_a_patch_rebuilds_the_new_bits_exactly_is_idempotent_and_can_be_taken_back(tmp_path_factory, dtype, n, density, largest, seed):
    path = tmp_path_factory.mktemp("patch") / "p"
    g = np.random.default_rng(seed)
    old = {"a": random_bits(g, n, dtype)}
    new = {"a": moved(g, old["a"], density, min(largest, 2 ** (8 * dtype.itemsize - 1) - 1))}
    written = write(path, new, old)
    assert written.size == path.stat().st_size and written.tensors == {"a": described(new["a"])}
    snapshot = copy(old)
    assert write(path, new, snapshot, advance=True) == written and equal(snapshot, new)
    held = copy(old)
    patch = Patch(path, written.size, written.digest)
    state, changed = patch.apply(held, {"a": digest(old["a"])})
    assert equal(state, new) and changed == ({"a"} if not equal(new, old) else set())
    again, _ = Patch(path).apply(state)
    assert equal(again, new)
    patch.undo()
    assert equal(held, old)


def test_a_snapshot_that_is_moved_on_has_the_new_names_and_shapes_alone(path):
    old = {"gone": torch.ones(3), "other": torch.ones(3), "same": torch.ones(2)}
    new = {"other": torch.zeros(2, 2), "same": torch.ones(2), "new": torch.zeros(1)}
    write(path, new, old, advance=True)
    assert equal(old, new)


def test_blocks_of_one_tensor_may_be_same_sparse_or_dense(path):
    g = np.random.default_rng(0)
    n = BLOCK_BYTES // 2
    old = {"a": random_bits(g, 3 * n + 5, torch.bfloat16)}
    new = copy(old)
    new["a"][n:2 * n] = random_bits(g, n, torch.bfloat16)
    bits(new["a"])[2 * n + 7] += 1
    bits(new["a"])[-1] -= 1
    write(path, new, old)
    assert [b.kind for b in Patch(path)._tensors[0].blocks] == ["same", "dense", "sparse", "sparse"]
    held = copy(old)
    state, _ = Patch(path).apply(held)
    assert equal(state, new) and equal(held, old)  # a tensor with a dense block is made anew


def test_sparse_changes_are_made_in_place(path):
    g = np.random.default_rng(0)
    old = {"a": random_bits(g, 999, torch.float32).view(27, 37)}
    new = {"a": moved(g, old["a"], 0.1)}
    write(path, new, old)
    held = copy(old)
    state, _ = Patch(path).apply(held)
    assert state["a"].data_ptr() == held["a"].data_ptr() and equal(held, new)


def test_tensors_that_share_memory_or_are_not_contiguous_are_patched_once_each(path):
    g = np.random.default_rng(0)
    one = random_bits(g, 600, torch.bfloat16).view(20, 30)
    old = {"a": one, "tied": one, "turned": random_bits(g, 600, torch.bfloat16).view(20, 30).T}
    new = {"a": moved(g, one, 0.1), "tied": moved(g, one, 0.2), "turned": moved(g, old["turned"].contiguous(), 0.1)}
    write(path, new, old)
    state, _ = Patch(path).apply(old)
    assert equal(state, new)


def test_new_and_reshaped_tensors_go_whole_and_missing_ones_go(path):
    g = np.random.default_rng(0)
    old = {"a": torch.zeros(4), "gone": torch.zeros(2), "typed": torch.zeros(3)}
    new = {"a": torch.zeros(2, 2), "scalar": torch.tensor(3.0), "typed": torch.zeros(3).bfloat16(), "empty": torch.zeros(0, 5), "fresh": random_bits(g, 9, torch.int8)}
    written = write(path, new, old)
    assert written.tensors == {n: described(t) for n, t in new.items()}
    state, changed = Patch(path).apply(copy(old))
    assert equal(state, new) and changed == set(new)


def test_one_step_in_the_last_place_costs_gap_and_sign(path):
    g = np.random.default_rng(0)
    old = {"a": random_bits(g, 1 << 20, torch.bfloat16)}
    new = {"a": moved(g, old["a"], 0.01)}
    bound = ((1 << 20) * 0.0808 + (1 << 20) * 0.01) / 8  # H(0.01) = 0.0808 bits per element, one bit per change
    assert write(path, new, old).size < 1.1 * bound


# -- damage ------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def small(path):
    g = np.random.default_rng(3)
    old = {"a": random_bits(g, 500, torch.bfloat16), "b": random_bits(g, 90, torch.float32), "c": random_bits(g, 40, torch.uint8)}
    new = {"a": moved(g, old["a"], 0.1), "b": random_bits(g, 90, torch.float32), "c": moved(g, old["c"], 0.2, 3)}
    return old, new, write(path, new, old)


def refused_or_exact(path, old, new, written=None):
    """Applies the file. Returns whether it was refused, in which case nothing may have changed."""
    held = copy(old)
    try:
        state, _ = Patch(path, *(written.size, written.digest) if written else ()).apply(held)
    except StructureError:
        assert equal(held, old)
        return True
    assert equal(state, new)
    return False


@pytest.mark.parametrize("known", [True, False], ids=["with its manifest", "alone"])
def test_a_flipped_bit_in_any_byte_is_refused(path, small, known):
    old, new, written = small
    data = path.read_bytes()
    for i in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        path.write_bytes(flipped)
        assert refused_or_exact(path, old, new, written if known else None), i


def test_a_check_finds_a_flipped_bit_in_any_byte_without_a_base(path, small):
    data = path.read_bytes()
    Patch(path).check()
    for i in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        path.write_bytes(flipped)
        with pytest.raises(StructureError):
            Patch(path).check()


def test_every_truncation_and_a_longer_file_are_refused(path, small):
    old, new, _ = small
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        assert refused_or_exact(path, old, new)
    path.write_bytes(data + b"\0")
    assert refused_or_exact(path, old, new)
    path.unlink()
    assert refused_or_exact(path, old, new)


def test_another_whole_patch_in_its_place_is_refused(path, small):
    old, new, written = small
    write(path, old, new)
    assert refused_or_exact(path, old, new, written)


@pytest.mark.parametrize("base", [
    {}, {"a": torch.zeros(500).bfloat16()}, "shape", "dtype", "one bit",
], ids=["none", "others missing", "shape", "dtype", "one bit"])
def test_a_wrong_or_missing_base_is_refused_and_left_as_it_was(path, small, base):
    old, _, _ = small
    if base == "shape":
        base = {**old, "a": old["a"].view(50, 10)}
    elif base == "dtype":
        base = {**old, "a": old["a"].view(torch.float16)}
    elif base == "one bit":
        base = copy(old)
        bits(base["c"])[39] ^= 1
    held = copy(base)
    with pytest.raises(StructureError):
        Patch(path).apply(held)
    assert equal(held, base)


def test_a_base_of_another_digest_is_refused_before_anything_is_read(path, small):
    old, _, _ = small
    with pytest.raises(StructureError, match="its base") as e:
        Patch(path).apply(copy(old), {n: digest(t) if n != "c" else "0" for n, t in old.items()})
    assert e.value.cause == "patch-base"


def test_a_state_that_is_half_new_is_completed(path, small):
    old, new, _ = small
    state, _ = Patch(path).apply({**copy(old), "a": new["a"].clone()})
    assert equal(state, new)


@pytest.mark.parametrize("symbols", [[250], [0, 249], [255, 0], [255], [3, 255]], ids=str)
def test_positions_outside_are_refused_before_they_are_used(path, monkeypatch, symbols):
    """A writer gone wrong: every digest of the file is right, the positions are not. A block of 250 elements."""
    monkeypatch.setattr("miles.weights.patch.find", lambda *_, **__: (Changes(np.array(symbols, np.uint8), np.zeros(1, np.uint8), None), bytes(16)))
    old = {"a": torch.zeros(250).bfloat16()}
    write(path, {"a": torch.ones(250).bfloat16()}, old)
    held = copy(old)
    with pytest.raises(StructureError, match="outside|do not fit"):
        Patch(path).apply(held)
    assert equal(held, old)


def test_a_stream_that_would_unpack_to_more_is_refused(path, monkeypatch):
    monkeypatch.setattr("miles.weights.patch._pack", lambda plane: zstandard.compress(bytes(1 << 20)))
    old = {"a": torch.zeros(2500).bfloat16()}
    new = {"a": torch.ones(2500).bfloat16()}
    write(path, new, old)
    assert refused_or_exact(path, old, new)


# -- digests -----------------------------------------------------------------------------------------------------------------
def test_a_digest_depends_on_every_block_and_on_their_order():
    g = np.random.default_rng(0)
    t = random_bits(g, 2 * BLOCK_BYTES + 3, torch.uint8)
    swapped = torch.cat([t[BLOCK_BYTES:2 * BLOCK_BYTES], t[:BLOCK_BYTES], t[2 * BLOCK_BYTES:]])
    flipped = t.clone()
    flipped[-1] ^= 1
    assert len({digest(x) for x in (t, swapped, flipped, t[:-1])}) == 4 and digest(t) == digest(t.clone())
    assert [len(b) for b in blocks(t)] == [BLOCK_BYTES, BLOCK_BYTES, 3]


def test_writing_needs_no_seek():
    class Pipe(io.RawIOBase):
        def __init__(self):
            self.data = b""

        def write(self, data):
            self.data += bytes(data)
            return len(data)

    pipe = Pipe()
    written = write_patch(pipe, encode_patch([("a", torch.ones(9))], {}))
    assert len(pipe.data) == written.size


def test_the_span_of_gap_symbols_is_that_of_what_they_mean():
    assert kernels.span(np.array([0, 0, 2], np.uint8)) == (3, 5)
    assert kernels.span(np.array([255, 1, 255, 255, 0], np.uint8)) == (2, 255 + 1 + 1 + 255 + 255 + 1)
    assert kernels.span(np.array([65535, 7], np.uint16)) == (1, 65543)
    assert kernels.span(np.array([3, 255], np.uint8)) == kernels.span(np.array([], np.uint8)) == (0, 0)
