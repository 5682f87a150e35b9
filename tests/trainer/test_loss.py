import math

import pytest
import torch

from miles.trainer.loss import MAXIMA, SUMS, LossSettings, policy_loss, quantile_of_histogram, truth_sums

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, tis_low=0.5, tis_high=2.0)


def log(*values):
    return torch.tensor(values).log()


def test_loss_by_hand_with_truncated_weights():
    # two tokens, pi = pi_old, weights 1/2 each. Token 1: pi 0.4, rollout 0.25, w = 1.6; token 2: pi 0.4, rollout 0.1, w = 4 cut to 2.
    # loss = -(0.5 * 1.6 * 1 * 3 + 0.5 * 2 * 1 * -1) = -1.4
    new = log(0.4, 0.4).requires_grad_()
    loss, clipped, cut = policy_loss(new, new.detach(), log(0.25, 0.1), torch.tensor([3.0, -1.0]), torch.tensor([0.5, 0.5]), SETTINGS)
    assert float(loss.detach()) == pytest.approx(-1.4, abs=1e-6)
    assert clipped.tolist() == [False, False]
    assert cut.tolist() == [False, True]
    loss.backward()  # d loss / d log pi = -weight * w * r * A
    assert new.grad.tolist() == pytest.approx([-2.4, 1.0], abs=1e-5)


def test_small_weights_are_raised_to_the_lower_bound():
    # pi_old / rollout = 0.1 / 0.4 = 0.25 -> 0.5; loss = -(1 * 0.5 * 1 * 2)
    loss, _, cut = policy_loss(log(0.1), log(0.1), log(0.4), torch.tensor([2.0]), torch.tensor([1.0]), SETTINGS)
    assert float(loss.detach()) == pytest.approx(-1.0, abs=1e-6)
    assert cut.tolist() == [True]


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope"), [
    (1.5, 1.0, 1.28, 0.0),  # above 1 + clip_high with a positive advantage: clipped, no gradient
    (1.2, 1.0, 1.2, 1.2),  # above 1 + clip_low but below 1 + clip_high: clip-higher leaves it free
    (1.5, -1.0, -1.5, -1.5),  # min takes the free branch: a bad token that became likelier is pushed back
    (0.5, -1.0, -0.8, 0.0),  # below 1 - clip_low with a negative advantage: clipped
    (0.5, 1.0, 0.5, 0.5),
])
def test_clipped_surrogate(ratio, advantage, value, slope):
    new = log(0.2 * ratio).requires_grad_()
    loss, clipped, _ = policy_loss(new, log(0.2), log(0.2), torch.tensor([advantage]), torch.tensor([1.0]), SETTINGS)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-value, abs=1e-6)
    assert float(new.grad) == pytest.approx(-slope, abs=1e-6)
    assert clipped.tolist() == [slope == 0.0]


def test_extreme_differences_stay_finite():
    new = torch.tensor([-1e4, -1e-3]).requires_grad_()
    loss, clipped, cut = policy_loss(new, new.detach(), torch.tensor([-1e-3, -1e4]), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]), SETTINGS)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert torch.isfinite(new.grad).all()
    sums, maxima, _ = truth_sums(new, torch.tensor([-1e-3, -1e4]), torch.ones(2), torch.ones(2, dtype=torch.bool), clipped, cut)
    assert torch.isfinite(sums).all()
    assert torch.isfinite(maxima).all()


def test_no_sampled_token_gives_zero_loss_and_zero_sums():
    new = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    loss, clipped, cut = policy_loss(new, new.detach(), empty, empty, empty, SETTINGS)
    loss.backward()
    sums, maxima, histogram = truth_sums(new, empty, empty, empty.bool(), clipped, cut)
    assert float(loss.detach()) == 0.0
    assert sums.tolist() == [0.0] * len(SUMS)
    assert maxima.tolist() == [0.0, 0.0]
    assert float(histogram.sum()) == 0.0
    assert quantile_of_histogram(histogram, 0.99) == 0.0


def test_truth_sums_by_hand():
    # ratios pi/rollout: 2 and 1/2; only the second token is exact
    new, rollout = log(0.4, 0.1), log(0.2, 0.2)
    none = torch.zeros(2, dtype=torch.bool)
    sums, maxima, _ = truth_sums(new, rollout, torch.tensor([-1.0, 3.0]), torch.tensor([False, True]), none, ~none)
    got = dict(zip(SUMS, sums.tolist(), strict=True)) | dict(zip(MAXIMA, maxima.tolist(), strict=True))
    ln2 = math.log(2)
    want = {"tokens": 2, "abs_diff": 2 * ln2, "kl": (2 - 1 - ln2) + (0.5 - 1 + ln2), "ratio": 2.5, "ratio_squared": 4.25, "clipped": 0, "cut": 2,
            "abs_advantage": 4, "exact_tokens": 1, "exact_abs_diff": ln2, "max_diff": ln2, "exact_max_diff": ln2}
    assert got == pytest.approx(want, abs=1e-6)


def test_quantile_of_histogram_is_right_to_one_bin():
    values = torch.arange(1, 1001) / 1000.0
    _, _, histogram = truth_sums(values, torch.zeros(1000), values, torch.zeros(1000, dtype=torch.bool), values > 2, values > 2)
    assert 0.99 <= quantile_of_histogram(histogram, 0.99) <= 0.99 * 1.024
