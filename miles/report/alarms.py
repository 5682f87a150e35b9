"""What a reader must not overlook, and what to do next. Pure functions of the summary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from miles.config import MilesConfig

LOGPROB_LIMIT = {"fp32": 1e-3, "bf16": 0.05}  # mean over exact tokens, by the rollout's precision
LOGPROB_LIMIT_LOW = 0.1  # fp8 and below; a published 744B run with fp8 rollouts had 0.037
HIT_RATE_LIMIT = 0.9
DROPPED_LIMIT = 0.1  # of the groups that were finished
FILTERED_LIMIT = 0.8  # of finished groups: more, and most of the rollout is thrown away
WAIT_LIMIT = 0.8
BALANCE_LIMIT = 1.5  # most loaded engine over the mean


def alarms(s: dict[str, Any], config: MilesConfig) -> list[dict[str, str]]:
    """`error`: the run trained on something it must not, or its record has a hole. `warning`: slow or wasteful. `note`: worth knowing."""
    out: list[dict[str, str]] = []

    def alarm(level: str, text: str):
        out.append({"level": level, "text": text})

    if s["groups_trained_twice"]:
        alarm("error", f"{s['groups_trained_twice']} groups were trained more than once on the lineage of the final weights")
    if s["tokens"]["unaccounted"]:
        alarm("error", f"{s['tokens']['unaccounted']} tokens are not accounted for between buffer and training step")
    if s["staleness"]["max"] is not None and s["staleness"]["max"] > s["staleness"]["limit"]:
        alarm("error", f"staleness reached {s['staleness']['max']}, the limit is {s['staleness']['limit']}")
    precision = config.model.rollout_precision
    limit = LOGPROB_LIMIT.get(precision, LOGPROB_LIMIT_LOW)
    diff = s["logprob_abs_diff"]["mean"]
    if diff is not None and diff > limit:
        alarm(
            "error",
            f"mean |log-probability difference| {diff:.2g} over {s['logprob_abs_diff']['tokens']} exact tokens, expected below {limit:g} "
            f"for {precision}",
        )
    elif diff is None and s["steps"]:
        alarm(
            "note",
            "no trained trajectory came whole from the version being trained: trainer and engine could not be compared on exact tokens",
        )
    broken = [name for name in ("loss", "grad_norm") if any(v is None or not math.isfinite(v) for v in s["series"]["steps"].get(name, ()))]
    if broken:
        alarm("error", f"{' and '.join(broken)} not finite in some steps, which changed nothing; what was fed to the first: attempts/*/nonfinite")
    if s["unreadable"]:
        alarm("warning", f"{len(s['unreadable'])} files could not be read; figures leave them out: {'; '.join(s['unreadable'][:3])}")
    if s["steps_without_log"]:
        alarm("note", f"steps {s['steps_without_log'][:10]} were trained, but their process was killed before it logged them")
    if s["prefix_cache_hit_rate"] is not None and s["prefix_cache_hit_rate"] < HIT_RATE_LIMIT:
        alarm(
            "warning",
            f"prefix-cache hit rate {s['prefix_cache_hit_rate']:.1%}, expected at least {HIT_RATE_LIMIT:.0%}: KV cache too small, or "
            f"sessions moved",
        )
    trained, filtered = s["groups_trained"], sum(n for reason, n in s["dropped"].items() if reason.startswith("filter:"))
    if filtered and filtered / (filtered + trained) > FILTERED_LIMIT:
        alarm("warning", f"buffer.filter dropped {filtered} of {filtered + trained} finished groups: the tasks are too easy or too hard for this model")
    dropped = sum(s["dropped"].values()) - filtered
    if dropped and dropped / (dropped + trained) > DROPPED_LIMIT:
        alarm(
            "warning",
            f"{dropped} of {dropped + trained} finished groups were dropped ({', '.join(f'{k}: {v}' for k, v in s['dropped'].items() if not k.startswith('filter:'))})",
        )
    in_turns = config.cluster.placement == "shared"  # each waits for the other by design
    for share, text in () if in_turns else (
        (s["waits"]["trainer_wait_share"], "the trainer waits for trajectories"),
        (s["waits"]["rollout_blocked_share"], "rollout is held back by a full buffer"),
    ):
        if share is not None and share > WAIT_LIMIT:
            alarm("warning", f"{text} {share:.0%} of the time")
    if s["weights"]["failed"]:
        alarm(
            "warning", f"{s['weights']['failed']} weight updates were not acknowledged with the right digest; those engines were restarted"
        )
    if s["engines"]["balance_tokens"] is not None and s["engines"]["balance_tokens"] > BALANCE_LIMIT:
        alarm("warning", f"the most loaded engine sampled {s['engines']['balance_tokens']:.2f} times the mean")
    gain = s["reward"].get("gain")
    if gain is not None and gain < 0 and s["steps"] >= 9:
        alarm("warning", f"reward of the last third is {-gain:.3f} below the first")
    engine_restarts = sum(e["restarts"] for e in s["engines"]["list"])
    if s["attempts"] > 1 or any(s["restarts"].values()) or engine_restarts:
        alarm(
            "note",
            f"{s['attempts']} attempts; restarts: trainer {s['restarts'].get('trainer', 0)}, rollout {s['restarts'].get('rollout', 0)}, "
            f"engines "
            f"{engine_restarts}; {s['steps_undone']} steps were trained again from an older checkpoint",
        )
    return out


def next_commands(s: dict[str, Any], path: Path) -> list[str]:
    """Commands worth typing now, the most useful first."""
    out = []
    if not s["run"]["finished"]:
        ended = s["attempt_list"] and s["attempt_list"][-1]["outcome"]
        out.append(f"miles-submit resume {path}" if ended in ("failed", "cancelled") else f"miles-submit status {path}")
    if s["unreadable"] or any(a["level"] == "error" for a in s["alarms"]) or not s["steps"]:
        out.append(f"miles-submit logs {path}")
    if s["waits"]["bottleneck"] == "rollout" and s["turns"] is None and (s["waits"]["trainer_wait_share"] or 0) > 0.5:
        out.append("next run: more rollout nodes (cluster.rollout.nodes) or rollout.in_flight; the trainer idles")
    if s["waits"]["bottleneck"] == "trainer" and s["turns"] is None and (s["waits"]["rollout_blocked_share"] or 0) > 0.5:
        out.append("next run: more trainer ranks, or fewer rollout nodes; rollout idles")
    out.append(f"miles-submit report {path} --html report.html")
    return out
