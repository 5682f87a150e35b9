import math

import pytest
import torch

from miles.trainer.algorithms.truth import MAXIMA, SUMS, quantile_of_histogram, truth_sums


def log(*values):
    return torch.tensor(values).log()


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


def test_extreme_differences_and_no_tokens_give_finite_sums():
    none = torch.zeros(2, dtype=torch.bool)
    sums, maxima, _ = truth_sums(torch.tensor([-1e4, -1e-3]), torch.tensor([-1e-3, -1e4]), torch.ones(2), ~none, none, none)
    assert torch.isfinite(sums).all() and torch.isfinite(maxima).all()
    empty = torch.zeros(0)
    sums, maxima, histogram = truth_sums(empty, empty, empty, empty.bool(), empty.bool(), empty.bool())
    assert sums.tolist() == [0.0] * len(SUMS) and maxima.tolist() == [0.0, 0.0]
    assert float(histogram.sum()) == 0.0 and quantile_of_histogram(histogram, 0.99) == 0.0
