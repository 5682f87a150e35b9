import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core import StructureError
from miles.platform.context_parallel import zigzag_positions
from miles.trainer.batching import Sequence, held_rows, pack, padded_rows, plan_batch, token_weights


def sequence(tokens, mask, logprobs=None, routes=None, advantage=1.0, exact=True):
    mask = np.array(mask, np.uint8)
    return Sequence(np.array(tokens, np.int32), mask, np.array(logprobs if logprobs is not None else mask * -1.0, np.float32),
                    np.where(mask, 0, -1).astype(np.int32), routes, advantage, exact, 0)


def test_longest_first_into_the_least_loaded_bin():
    # 2 ranks, 10 tokens a micro-batch, 20 tokens: one micro-batch of 10 on each
    plan = plan_batch([7, 3, 6, 4], 2, 10)
    assert plan.bins == (((0, 1),), ((2, 3),))


def test_every_rank_gets_equally_many_microbatches_even_without_work():
    plan = plan_batch([5], 4, 8)
    assert plan.microbatches == 1
    assert [plan.of_rank(r) for r in range(4)] == [(0,), (), (), ()]


def test_microbatches_are_added_until_all_sequences_fit():
    # 18 tokens fit 2 bins of 10 by volume, but 6+6 does not fit one bin: 2 micro-batches on each rank
    plan = plan_batch([6, 6, 6], 2, 10)
    assert plan.microbatches == 2
    assert sorted(i for r in range(2) for i in plan.of_rank(r)) == [0, 1, 2]


def test_a_sequence_that_fits_nowhere_is_refused_with_its_length():
    with pytest.raises(StructureError, match="11 tokens does not fit a micro-batch of 10"):
        plan_batch([3, 11], 2, 10)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8), st.integers(100, 300))
def test_every_sequence_is_placed_once_within_the_bound(lengths, ranks, limit):
    plan = plan_batch(lengths, ranks, limit)
    assert sorted(i for r in range(ranks) for i in plan.of_rank(r)) == list(range(len(lengths)))
    assert {len(bins) for bins in plan.bins} == {plan.microbatches}
    assert max(sum(lengths[i] for i in b) for bins in plan.bins for b in bins) <= limit


def test_tenfold_lengths_are_balanced_over_ranks():
    rng = np.random.default_rng(0)
    lengths = rng.integers(60, 600, 32).tolist()
    plan = plan_batch(lengths, 2, 2048)
    loads = [sum(lengths[i] for i in plan.of_rank(r)) for r in range(2)]
    assert max(loads) / (sum(loads) / 2) < 1.02


def wasted(lengths, bins, cp=1, tp=1):
    """Of the rows for which the ranks of a step compute or wait for the longest of them, the share that holds no token: padding of sequences and of
    micro-batches, and the wait of ranks whose micro-batch of that number is shorter."""
    align = math.lcm(padded_rows(1, cp), tp * cp)
    made = [sequence(np.zeros(n + 1), [0] * n + [1]) for n in lengths]
    rows = [[len(pack([made[i] for i in part], [1.0] * len(part), cp=cp, total_align=align).input_ids) for part in parts] for parts in bins]
    return 1 - sum(lengths) / (len(bins) * sum(map(max, zip(*rows, strict=True))))


def test_what_is_padded_and_waited_for_is_counted():
    assert wasted([10, 6, 4], [[(0,)], [(1, 2)]]) == 0
    assert wasted([10, 6], [[(0,)], [(1,)]]) == pytest.approx(4 / 20)
    # 10 tokens take 12 rows under cp 2, and 6 take 8; one rank has nothing in its second micro-batch, and pads 4 rows while the other works on 8
    assert wasted([10, 6, 6], [[(0,), ()], [(1,), (2,)]], cp=2) == pytest.approx(1 - 22 / (2 * (12 + 8)))


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_of_lengths_that_differ_tenfold_at_most_a_twentieth_is_padded_or_waited_for(ranks, cp):
    for seed in range(25):
        rng = np.random.default_rng(seed)
        for lengths in (rng.uniform(128, 1280, 16 * ranks), np.exp(rng.uniform(np.log(128), np.log(1280), 16 * ranks))):
            lengths = lengths.astype(int).tolist()
            plan = plan_batch([padded_rows(n, cp) for n in lengths], ranks, 2048 * cp)
            assert wasted(lengths, plan.bins, cp, tp=2) <= 0.05
            in_order = [[tuple(range(r + ranks * m, len(lengths), ranks * plan.microbatches)) for m in range(plan.microbatches)] for r in range(ranks)]
            assert wasted(lengths, in_order, cp, tp=2) > wasted(lengths, plan.bins, cp, tp=2)


def test_row_t_holds_token_t_its_successor_and_its_routes():
    routes = np.array([[[0, 1]], [[2, 3]], [[4, 5]]], np.uint8)
    packed = pack([sequence([10, 11, 12, 13], [0, 1, 0, 1], [0, -0.5, 0, -2], routes, advantage=3.0)], [0.25], routes_shape=(1, 2))
    assert packed.input_ids.tolist() == [10, 11, 12]
    assert packed.targets.tolist() == [11, 12, 13]
    assert packed.mask.tolist() == [True, False, True]
    assert packed.logprobs.tolist() == [-0.5, 0, -2]
    assert packed.weights.tolist() == [0.25, 0, 0.25]
    assert packed.advantages.tolist() == [3, 3, 3]
    assert packed.routes.tolist() == routes.tolist() and packed.recorded.all()
    assert packed.bounds.tolist() == [0, 3]


def test_sequences_are_padded_for_context_parallelism_and_padding_has_no_weight():
    packed = pack([sequence([1, 2, 3, 4], [0, 1, 1, 1]), sequence([5, 6], [0, 1])], [0.1, 0.2], cp=2, total_align=16)
    assert packed.bounds.tolist() == [0, 4, 8, 16]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, *range(8)]
    np.testing.assert_allclose(packed.weights, [0.1, 0.1, 0.1, 0, 0.2] + [0] * 11, rtol=1e-6)
    assert packed.longest == 8


@given(st.integers(1, 60), st.integers(1, 5))
def test_a_context_parallel_rank_holds_the_rows_of_its_two_chunks_without_padding(fed, cp):
    whole = padded_rows(fed, cp)
    for rank in range(cp):
        want = [row for row in (zigzag_positions(whole, cp, rank).tolist() if cp > 1 else range(fed)) if row < fed]
        assert [row for part in held_rows(fed, cp, rank) for row in range(*part)] == want


def test_routes_of_a_context_parallel_rank_lie_where_its_rows_do():
    """5 tokens take 8 rows in four chunks, of which rank 1 has the second and third: rows 2, 3 and 4, 5, the last of them padding. Then a sequence of 2 in
    chunks of one row: none of its own."""
    routes = np.arange(10, 20, dtype=np.uint8).reshape(5, 1, 2)
    batch = [sequence(range(6), [0, 1, 1, 1, 1, 1], routes=routes[[2, 3, 4]]), sequence([7, 8, 9], [0, 1, 1], routes=routes[[1]])]
    packed = pack(batch, [0.1, 0.1], cp=2, cp_rank=1, total_align=4, routes_shape=(1, 2))
    assert packed.bounds.tolist() == [0, 8, 12]
    assert packed.routes[:, 0].tolist() == [[14, 15], [16, 17], [18, 19], [0, 1], [12, 13], [0, 1]]
    assert packed.recorded.tolist() == [True, True, True, False, True, False]
    with pytest.raises(StructureError, match=r"\(5, 1, 2\).*6 tokens(?s:.)*\[3, 1, 2\], the rows of this context-parallel rank"):
        pack([sequence(range(6), [0, 1, 1, 1, 1, 1], routes=routes)], [0.1], cp=2, cp_rank=1, total_align=4, routes_shape=(1, 2))


def test_a_rank_without_sequences_packs_one_masked_row_with_valid_routes():
    packed = pack([], [], routes_shape=(3, 2))
    assert packed.input_ids.tolist() == [0]
    assert not packed.mask.any()
    assert packed.routes.tolist() == [[[0, 1]] * 3]


def test_a_sequence_without_routes_has_no_recorded_rows_where_none_are_needed():
    packed = pack([sequence([1, 2], [0, 1]), sequence([1, 2], [0, 1], routes=np.uint8([[[3, 4]]]))], [1.0, 1.0], routes_shape=(1, 2), routes_needed=False)
    assert (packed.routes.tolist(), packed.recorded.tolist()) == ([[[0, 1]], [[3, 4]]], [False, True])


def test_missing_routes_are_refused():
    with pytest.raises(StructureError, match="routes of shape None"):
        pack([sequence([1, 2], [0, 1])], [1.0], routes_shape=(2, 2))


def test_token_reduction_weighs_all_tokens_alike_and_sequence_reduction_all_rollouts():
    # four rollouts with 1, 3, 2 and 2 sampled tokens, 8 in all; this rank has the first two
    sampled = np.array([1, 3, 2, 2])
    assert token_weights([0, 1], sampled, "token", 1) == [0.125, 0.125]
    assert token_weights([0, 1], sampled, "sequence", 1) == [0.25, 0.25 / 3]


def test_constant_reduction_weighs_a_token_by_no_length():
    # three rollouts of 100 tokens at most; index 3 is no rollout
    assert token_weights([0, 1], np.array([1, 50, 2, 0]), "constant", 100) == [1 / 300, 1 / 300]


def test_the_leaves_of_a_rollout_share_its_weight_whichever_rank_has_them():
    # two rollouts in three sequences: rollout 0 has leaves of 3 and 1 sampled tokens, rollout 1 one of 2; index 2 is no rollout
    sampled = np.array([4, 2, 0])
    first, second = token_weights([0, 1], sampled, "sequence", 1), token_weights([0], sampled, "sequence", 1)
    assert first == [1 / (2 * 4), 1 / (2 * 2)] and second == [1 / (2 * 4)]
    assert 3 * first[0] + 1 * second[0] == 2 * first[1] == 0.5
    assert token_weights([0, 1], sampled, "token", 1) == [1 / 6, 1 / 6]


def test_a_plan_knows_how_many_sequences_the_step_has():
    assert plan_batch([7, 3, 6, 4, 5], 2, 10).sequences == 5
