"""Figures of speculative decoding: what engines accepted, and what the trainer's draft layer (`trainer.mtp`) learned."""

from __future__ import annotations

from typing import Any

import numpy as np

from miles.report.read import Table
from miles.report.rows import spread

COLUMNS = ("draft_passes", "drafted_tokens", "accepted_tokens")


def drafts(steps: Table, ok: Table) -> dict[str, Any]:
    """acceptance_rate = accepted / proposed draft tokens; acceptance_length = tokens that a pass of the model which checks drafts gave: those it accepted, and one
    that it sampled itself. Over finished samples, and over the first and the last third of them; None where engines did not speculate. mtp_loss (nats) and
    mtp_agreement: `course` over steps."""
    sums = np.array([ok.get(name, []) for name in COLUMNS], dtype=float)
    third = sums.shape[1] // 3
    return {**_acceptance(sums), "first_third": _acceptance(sums[:, :third]), "last_third": _acceptance(sums[:, sums.shape[1] - third:]),
            "drafted_tokens": int(sums[1].sum()), **{name: course(steps, name) for name in ("mtp_loss", "mtp_agreement")}}


def course(steps: Table, name: str) -> dict[str, Any]:
    """A column of `steps`: the first and the last value that is a number, and the spread of all."""
    values = np.asarray(steps.get(name, []), dtype=float)
    known = values[np.isfinite(values)]
    return {"first": known[0] if len(known) else None, "last": known[-1] if len(known) else None, **spread(known)}


def _acceptance(sums: np.ndarray) -> dict[str, float | None]:
    passes, proposed, accepted = sums.sum(1)
    return {"acceptance_rate": accepted / proposed if proposed else None, "acceptance_length": 1 + accepted / passes if passes else None}
