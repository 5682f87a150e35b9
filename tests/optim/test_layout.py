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


@given(SIZES, st.integers(1, 4000))
def test_blocks_are_whole_pages_and_hold_their_bucket(sizes, bucket):
    layout = BucketLayout(sizes, bucket)
    assert layout.block_bytes % 4096 == 0
    assert all(p.at + p.count <= layout.stride for pieces in layout.pieces() for p in pieces)


@given(st.lists(st.integers(1, 50), max_size=6), st.integers(1, 40))
def test_a_cut_keeps_every_element_in_its_place(counts, most):
    pieces, at = [], 0
    for tensor, count in enumerate(counts):
        pieces.append(Piece(tensor, 3 * tensor, at, count))
        at += count
    parts = list(cut(pieces, most))
    assert all(sum(x.count for x in part) == most for part in parts[:-1]) and all(0 < sum(x.count for x in part) <= most for part in parts)
    elements = [(x.tensor, x.start + i, x.at + i) for part in parts for x in part for i in range(x.count)]
    assert elements == [(x.tensor, x.start + i, x.at + i) for x in pieces for i in range(x.count)]
