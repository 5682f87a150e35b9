"""Where elements lie in a state file."""

from hypothesis import given
from hypothesis import strategies as st

from miles.optim import BucketLayout, Piece
from miles.optim.layout import cut

SIZES = st.lists(st.integers(0, 5000), max_size=12).map(tuple)


def test_tensors_are_cut_where_buckets_end():
    layout = BucketLayout((3, 6), 4)
    assert list(layout.pieces()) == [[Piece(0, 0, 0, 3), Piece(1, 0, 3, 1)], [Piece(1, 1, 0, 4)], [Piece(1, 5, 0, 1)]]
    assert (layout.stride, layout.block_bytes, layout.file_bytes) == (1024, 3 * 4096, 3 * 3 * 4096)


@given(SIZES, st.integers(1, 4000))
def test_every_element_lies_in_one_place_and_places_are_in_order(sizes, bucket):
    layout = BucketLayout(sizes, bucket)
    flat = [b * bucket + p.at + i for b, pieces in enumerate(layout.pieces()) for p in pieces for i in (0, p.count - 1)]
    assert flat == sorted(flat) and sum(p.count for pieces in layout.pieces() for p in pieces) == sum(sizes)
    for tensor, size in enumerate(sizes):
        mine = [p for pieces in layout.pieces() for p in pieces if p.tensor == tensor]
        assert [p.start for p in mine] == [sum(q.count for q in mine[:i]) for i in range(len(mine))] and sum(p.count for p in mine) == size


def test_bf16_moments_take_half_the_room_and_begin_on_pages():
    layout = BucketLayout((3, 6), 4, "bf16")
    assert (layout.stride, layout.block_bytes, layout.file_bytes) == (2048, 4 * 4096, 3 * 4 * 4096)  # a page of bf16 is 2048 elements, two of float32
    assert [layout.offset(field) for field in range(3)] == [0, 2 * 4096, 3 * 4096] and layout.offset(2, 5) == 3 * 4096 + 10


@given(SIZES, st.integers(1, 4000), st.sampled_from(["fp32", "bf16"]))
def test_blocks_are_whole_pages_and_hold_their_bucket(sizes, bucket, moments):
    layout = BucketLayout(sizes, bucket, moments)
    assert layout.block_bytes % 4096 == 0 and all(layout.offset(field) % 4096 == 0 for field in range(3))
    assert all(p.at + p.count <= layout.stride for pieces in layout.pieces() for p in pieces)


@given(st.integers(1, 300), st.integers(1, 40))
def test_a_cut_keeps_every_element_in_its_place(count, most):
    parts = list(cut(Piece(2, 30, 7, count), most))
    assert all(x.count == most for x in parts[:-1]) and 0 < parts[-1].count <= most
    assert [(x.tensor, x.start + i, x.at + i) for x in parts for i in range(x.count)] == [(2, 30 + i, 7 + i) for i in range(count)]
