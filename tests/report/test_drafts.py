"""Speculative decoding and the draft layer in the report."""

import numpy as np
import pytest

from miles.report import render_text, report
from miles.report.drafts import drafts


def test_acceptance_over_all_samples_and_over_their_first_and_last_third():
    ok = {"draft_passes": np.array([10, 10, 20, 40, 0, 20]), "drafted_tokens": np.array([20, 20, 40, 80, 0, 40]), "accepted_tokens": np.array([10, 6, 20, 30, 0, 4])}
    found = drafts({}, ok)
    assert (found["acceptance_rate"], found["acceptance_length"], found["drafted_tokens"]) == (70 / 200, 1.7, 200)
    assert found["first_third"] == {"acceptance_rate": 16 / 40, "acceptance_length": 1.8}
    assert found["last_third"] == {"acceptance_rate": 4 / 40, "acceptance_length": 1.2}


def test_without_speculation_and_without_a_trained_draft_layer_there_are_no_figures():
    for ok in ({}, {name: np.zeros(4) for name in ("draft_passes", "drafted_tokens", "accepted_tokens")}, {"reward": np.ones(2)}):
        found = drafts({"mtp_loss": np.full(3, np.nan)}, ok)
        assert found["acceptance_rate"] is found["acceptance_length"] is found["last_third"]["acceptance_rate"] is None
        assert found["mtp_loss"] == {"first": None, "last": None, "count": 0} == found["mtp_agreement"]


def test_the_page_says_what_was_accepted_and_what_the_draft_layer_learned(run):
    page = report(run.path)
    assert "drafts:" not in render_text(page) and "draft layer:" not in render_text(page)
    steps = {"mtp_loss": np.array([2.5, np.nan, 1.25]), "mtp_agreement": np.array([0.25, np.nan, 0.5])}
    ok = {"draft_passes": np.array([10, 10, 10]), "drafted_tokens": np.array([10, 10, 10]), "accepted_tokens": np.array([5, 7, 9])}
    page["drafts"] = drafts(steps, ok)
    text = render_text(page)
    assert "draft layer: loss 2.5 -> 1.25 nats a token, right 25.0% -> 50.0%" in text
    assert "drafts: 70.0% accepted (first third of the samples 50.0%, last 90.0%), 1.70 tokens a pass" in text
    assert page["drafts"]["mtp_loss"]["mean"] == pytest.approx(1.875)
