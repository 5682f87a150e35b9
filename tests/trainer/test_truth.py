import math
import re
from pathlib import Path

import pytest
import torch

import miles.report.text
from miles.trainer.algorithms.truth import STALENESS_BINS, SUMS, Apart, apart, quantile_of_histogram, truth_of

LN2 = math.log(2)


def log(*values):
    return torch.tensor(values).log()


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)


def test_truth_by_hand():
    # ratios pi/rollout: 2 and 1/2; only the second token is exact; the first was sampled by the weights of two versions ago
    none = flags(False, False)
    truth = truth_of(log(0.4, 0.1), log(0.2, 0.2), torch.tensor([-1.0, 3.0]), flags(False, True), torch.tensor([2, 0]), none, ~none)
    kl = (2 - 1 - LN2), (0.5 - 1 + LN2)
    first = {"tokens": 1, "abs_diff": LN2, "kl": kl[0], "ratio": 2, "ratio_squared": 4, "clipped": 0, "cut": 1, "abs_advantage": 1, "exact_tokens": 0, "exact_abs_diff": 0}
    second = {"tokens": 1, "abs_diff": LN2, "kl": kl[1], "ratio": 0.5, "ratio_squared": 0.25, "clipped": 0, "cut": 1, "abs_advantage": 3, "exact_tokens": 1,
              "exact_abs_diff": LN2}
    for row, want in zip(truth.sums.tolist(), (second, dict.fromkeys(SUMS, 0), first, dict.fromkeys(SUMS, 0)), strict=True):
        assert dict(zip(SUMS, row, strict=True)) == pytest.approx(want, abs=1e-6)
    assert truth.maxima.tolist() == pytest.approx([LN2, 0, LN2, 0, LN2], abs=1e-6)
    assert truth.histograms.sum(1).tolist() == [1, 0, 1, 0]
    both = apart(truth.sums.sum(0), truth.histograms.sum(0), LN2)
    assert both == pytest.approx(Apart(2, LN2, LN2, LN2, sum(kl) / 2, 2.5**2 / (2 * 4.25), 0.0), abs=1e-6)


def test_three_and_more_versions_are_one_bin_and_a_version_to_come_is_none():
    zero, none = torch.zeros(5), torch.zeros(5, dtype=torch.bool)
    truth = truth_of(zero, zero, zero, none, torch.tensor([3, 4, 100, 1, -1]), none, none)
    assert truth.sums[:, SUMS.index("tokens")].tolist() == [1, 1, 0, 3]


def test_what_is_not_finite_stays_in_its_bin():
    none = flags(False, False)
    truth = truth_of(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), torch.ones(2), none, torch.tensor([1, 0]), none, none)
    assert torch.isfinite(truth.sums[[0, 2, 3]]).all() and not torch.isfinite(truth.sums[1]).all()


def test_quantile_of_histogram_is_right_to_one_bin():
    values, none = torch.arange(1, 1001) / 1000.0, torch.zeros(1000, dtype=torch.bool)
    truth = truth_of(values, torch.zeros(1000), values, none, torch.zeros(1000, dtype=torch.int64), none, none)
    assert 0.99 <= quantile_of_histogram(truth.histograms[0], 0.99) <= 0.99 * 1.024


def test_extreme_differences_and_no_tokens_give_finite_sums():
    none = flags(False, False)
    truth = truth_of(torch.tensor([-1e4, -1e-3]), torch.tensor([-1e-3, -1e4]), torch.ones(2), ~none, torch.zeros(2, dtype=torch.int64), none, none)
    assert torch.isfinite(truth.sums).all() and torch.isfinite(truth.maxima).all()
    empty = torch.zeros(0)
    truth = truth_of(empty, empty, empty, empty.bool(), empty.long(), empty.bool(), empty.bool())
    assert not truth.sums.any() and not truth.maxima.any() and not truth.histograms.any()
    assert apart(truth.sums[0], truth.histograms[0], 0.0) == Apart(0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def test_the_report_which_imports_no_torch_knows_the_last_bin():
    assert miles.report.text.MOST_STALENESS == STALENESS_BINS - 1
    assert not re.search(r"^(import|from) (torch|miles\.trainer)", Path(miles.report.text.__file__).read_text(), re.MULTILINE)
