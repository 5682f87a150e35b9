import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core import StructureError
from miles.trainer.advantage import group_advantages, leaf_advantages


def test_advantage_is_reward_minus_group_mean_over_population_std():
    # group 7: rewards 1, 0, 0, 1: mean 0.5, std 0.5 -> +-1
    assert group_advantages([1, 0, 0, 1], [7, 7, 7, 7], eps=0.0).tolist() == [1, -1, -1, 1]


def test_without_std_it_is_the_plain_difference():
    # group 0: mean (1+0+2)/3 = 1; group 1: mean 4
    assert group_advantages([1, 3, 0, 2, 5], [0, 1, 0, 0, 1], normalize_std=False).tolist() == [0, -1, -1, 1, 1]


def test_uneven_interleaved_groups_are_normalised_on_their_own():
    # group 5 (two members, 0 and 1): mean 0.5, std 0.5; group 2 (three members, 0, 0, 3): mean 1, std sqrt(2)
    got = group_advantages([0, 0, 1, 0, 3], [5, 2, 5, 2, 2], eps=0.0)
    np.testing.assert_allclose(got, [-1, -1 / np.sqrt(2), 1, -1 / np.sqrt(2), 2 / np.sqrt(2)], rtol=1e-6)


def test_equal_rewards_and_groups_of_one_give_exactly_zero():
    assert group_advantages([0.1, 0.1, 0.1, 0.7], [0, 0, 0, 1]).tolist() == [0, 0, 0, 0]


def test_a_non_finite_reward_is_refused():
    with pytest.raises(StructureError, match="non-finite rewards"):
        group_advantages([0.0, np.nan], [0, 0])


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 4)), min_size=1, max_size=40))
def test_advantages_of_every_group_sum_to_zero(items):
    rewards, groups = zip(*items, strict=True)
    got = group_advantages(np.array(rewards), np.array(groups), normalize_std=False)
    for g in set(groups):
        members = got[np.array(groups) == g]
        assert abs(members.sum()) <= 1e-5 * max(1.0, np.abs(members).sum())


def test_a_sample_with_two_leaves_counts_once_in_its_group_and_both_have_its_advantage():
    # sample 4 has reward 1 and two leaves, sample 2 reward 0 and one: mean 1/2, std 1/2. Over leaves the mean would be 2/3.
    assert leaf_advantages([1, 1, 0], [4, 4, 2], normalize_std=False).tolist() == [0.5, 0.5, -0.5]
    np.testing.assert_allclose(leaf_advantages([1, 1, 0], [4, 4, 2]), np.array([0.5, 0.5, -0.5]) / (0.5 + 1e-6), rtol=1e-6)


def test_uneven_groups_with_uneven_leaves():
    # samples 0, 1, 3 with rewards 0, 0, 3 and 3, 1, 2 leaves: mean 1, std sqrt((1 + 1 + 4) / 3) = sqrt(2)
    got = leaf_advantages([0, 0, 0, 0, 3, 3], [0, 0, 0, 1, 3, 3])
    np.testing.assert_allclose(got, np.array([-1, -1, -1, -1, 2, 2]) / (np.sqrt(2) + 1e-6), rtol=1e-6)


def test_leaves_of_one_sample_with_different_rewards_are_refused():
    with pytest.raises(StructureError, match=r"a leaf of sample 7 with reward 0.5.*\n?.*1.0"):
        leaf_advantages([1, 0, 0.5], [7, 2, 7])
    with pytest.raises(StructureError, match="non-finite rewards"):
        leaf_advantages([np.nan, np.nan, 0], [7, 7, 2])


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 5)), min_size=1, max_size=8), st.booleans())
def test_the_number_of_leaves_changes_no_advantage(samples, normalize):
    rewards = np.array([r for r, _ in samples])
    leaves = np.repeat(np.arange(len(samples)), [n for _, n in samples])
    expected = group_advantages(rewards, np.zeros(len(samples), int), normalize_std=normalize)
    assert leaf_advantages(rewards[leaves], leaves, normalize_std=normalize).tolist() == expected[leaves].tolist()
