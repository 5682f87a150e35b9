import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core import ConfigError, StructureError
from miles.trainer.algorithms.advantage import (
    NAMED,
    dr_grpo,
    grpo,
    load_advantage,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    step_advantages,
)


def of(function, rewards, groups, **kw):
    return function(np.array(rewards, float), np.array(groups), **kw).tolist()


# -- by hand -----------------------------------------------------------------------------------------------------------------
def test_grpo_is_reward_minus_group_mean_over_population_std():
    # group 7: rewards 1, 0, 0, 1: mean 0.5, std 0.5 -> +-1
    assert of(grpo, [1, 0, 0, 1], [7, 7, 7, 7], eps=0.0) == [1, -1, -1, 1]


def test_dr_grpo_is_the_plain_difference():
    # group 0: mean (1+0+2)/3 = 1; group 1: mean 4
    assert of(dr_grpo, [1, 3, 0, 2, 5], [0, 1, 0, 0, 1]) == [0, -1, -1, 1, 1]


def test_rloo_compares_with_the_others():
    # group 0: 1 - (0+2)/2, 0 - (1+2)/2, 2 - (1+0)/2; group 1: a group of one has nobody to compare with
    assert of(rloo, [1, 0, 2, 9], [0, 0, 0, 1]) == [0, -1.5, 1.5, 0]


def test_reinforce_pp_normalises_over_the_step():
    # mean (0+0+0+4)/4 = 1, std sqrt((1+1+1+9)/4) = sqrt(3)
    np.testing.assert_allclose(of(reinforce_pp, [0, 0, 0, 4], [0, 0, 1, 1], eps=0.0), np.array([-1, -1, -1, 3]) / np.sqrt(3))


def test_reinforce_pp_with_baseline_takes_the_groups_mean_away_first():
    # group 0: 0, 2 -> -1, 1; group 1: 5, 5 -> 0, 0. Then mean 0, std sqrt(2/4)
    np.testing.assert_allclose(of(reinforce_pp_baseline, [0, 2, 5, 5], [0, 0, 1, 1], eps=0.0), np.array([-1, 1, 0, 0]) * np.sqrt(2))


def test_uneven_interleaved_groups_are_normalised_on_their_own():
    # group 5 (two members, 0 and 1): mean 0.5, std 0.5; group 2 (three members, 0, 0, 3): mean 1, std sqrt(2)
    np.testing.assert_allclose(of(grpo, [0, 0, 1, 0, 3], [5, 2, 5, 2, 2], eps=0.0), [-1, -1 / np.sqrt(2), 1, -1 / np.sqrt(2), 2 / np.sqrt(2)])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce++_baseline"])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(name):
    assert of(NAMED[name], [0.1, 0.1, 0.1, 0.7], [0, 0, 0, 1]) == [0, 0, 0, 0]


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 4)), min_size=1, max_size=40), st.sampled_from([dr_grpo, rloo]))
def test_advantages_of_every_group_sum_to_zero(items, function):
    rewards, groups = (np.array(x) for x in zip(*items, strict=True))
    got = function(rewards, groups)
    for g in set(groups):
        members = got[groups == g]
        assert abs(members.sum()) <= 1e-9 * max(1.0, np.abs(rewards).sum())


# -- samples and their leaves ------------------------------------------------------------------------------------------------
def test_a_sample_with_two_leaves_counts_once_in_its_group_and_both_have_its_advantage():
    # sample 4 has reward 1 and two leaves, sample 2 reward 0 and one: mean 1/2. Over leaves the mean would be 2/3.
    assert step_advantages([1, 1, 0], [9, 9, 9], [4, 4, 2], dr_grpo).tolist() == [0.5, 0.5, -0.5]


def test_uneven_groups_with_uneven_leaves():
    # group 0: samples 0, 1, 3 with rewards 0, 0, 3 and 3, 1, 2 leaves: mean 1, std sqrt((1 + 1 + 4) / 3) = sqrt(2); group 1: sample 0, 5: 1 and 3
    got = step_advantages([0, 0, 0, 0, 3, 3, 1, 3], [0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 3, 3, 0, 5], grpo)
    np.testing.assert_allclose(got, np.array([*np.array([-1, -1, -1, -1, 2, 2]) / (np.sqrt(2) + 1e-6), *np.array([-1, 1]) / (1 + 1e-6)]), rtol=1e-6)


def test_the_same_sample_number_in_two_groups_is_two_samples():
    assert step_advantages([1, 0, 5, 7], [0, 0, 1, 1], [0, 1, 0, 1], dr_grpo).tolist() == [0.5, -0.5, -1, 1]


def test_leaves_of_one_sample_with_different_rewards_and_non_finite_rewards_are_refused():
    with pytest.raises(StructureError, match=r"a leaf of sample 7 of group 3 with reward 0.5.*\n?.*1.0"):
        step_advantages([1, 0, 0.5], [3, 3, 3], [7, 2, 7], grpo)
    with pytest.raises(StructureError, match="non-finite rewards"):
        step_advantages([np.nan, np.nan, 0], [0, 0, 0], [7, 7, 2], grpo)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=8), st.sampled_from(sorted(NAMED)))
def test_the_number_of_leaves_changes_no_advantage(samples, name):
    rewards, groups = np.array([r for r, _, _ in samples]), np.array([g for _, g, _ in samples])
    leaves = np.repeat(np.arange(len(samples)), [n for _, _, n in samples])
    expected = step_advantages(rewards, groups, np.arange(len(samples)), NAMED[name])
    assert step_advantages(rewards[leaves], groups[leaves], leaves, NAMED[name]).tolist() == expected[leaves].tolist()


# -- a user's own ------------------------------------------------------------------------------------------------------------
def doubled(rewards, groups):
    return 2 * rewards


def too_few(rewards, groups):
    return rewards[:1]


def test_a_users_function_is_called_once_for_the_step_and_what_it_returns_is_checked():
    assert step_advantages([1, 3], [0, 1], [0, 0], load_advantage(f"{__name__}.doubled")).tolist() == [2, 6]
    with pytest.raises(StructureError, match="2 finite numbers, one per sample"):
        step_advantages([1, 3], [0, 1], [0, 0], load_advantage(f"{__name__}.too_few"))
    with pytest.raises(ConfigError, match=r"algorithm.advantage = 'nowhere.at.all'"):
        load_advantage("nowhere.at.all")
