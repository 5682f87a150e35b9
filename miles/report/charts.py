"""Charts of a run as SVG text, drawn by matplotlib from the summary alone: `charts(summary) -> {title: svg}`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from miles.report.summary import MOVING_WINDOW

_SIZE = (7.2, 2.6)  # inches
_PHASES = (("wait_s", "wait"), ("fetch_s", "fetch"), ("train_s", "train"), ("publish_s", "publish"), ("checkpoint_s", "checkpoint"))
_COLORS = {"wait": "#c9c9c9", "fetch": "#8fb8de", "train": "#2a6f97", "publish": "#e09f3e", "checkpoint": "#9e2a2b"}


def charts(s: dict[str, Any]) -> dict[str, str]:
    """Every chart that has data. Titles are unique and in reading order."""
    steps, out = s["series"]["steps"], {}
    if steps.get("step"):
        out["Reward"] = _draw(lambda ax: _reward(ax, s))
        out["Where the trainer's time goes"] = _draw(lambda ax: _phases(ax, steps))
        out["Staleness of trained trajectories"] = _draw(lambda ax: _staleness(ax, s))
        out["Log-probability difference, trainer and engine"] = _draw(lambda ax: _logprobs(ax, steps))
    if s["series"].get("queue"):
        out["Queue"] = _draw(lambda ax: _queue(ax, s))
        if s["staleness"]["waiting_max_over_time"]["count"]:
            out["Staleness of waiting groups"] = _draw(lambda ax: _waiting(ax, s))
    if s["weights"]["transports"]:
        out["Weight update, medians"] = _draw(lambda ax: _waterfall(ax, s["weights"]["transports"]))
    if s["files"]:
        out["Timeline of processes"] = _draw(lambda ax: _timeline(ax, s), height=1.2 + 0.22 * len(_bars(s)))
    return out


def _draw(draw: Callable, height: float = _SIZE[1]) -> str:
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "miles", "font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _floats(values: list) -> list[float]:
    return [float("nan") if v is None else v for v in values]


def _reward(ax, s: dict[str, Any]) -> None:
    steps, r = s["series"]["steps"], s["reward"]
    x, mean, std = steps["step"], _floats(steps["reward_mean"]), _floats(steps["reward_std"])
    ax.fill_between(
        x,
        [m - d for m, d in zip(mean, std, strict=True)],
        [m + d for m, d in zip(mean, std, strict=True)],
        alpha=0.15,
        lw=0,
        color="#2a6f97",
        label="± std of trajectories",
    )
    ax.plot(x, mean, ".-", lw=0.8, color="#2a6f97", label="mean of a step")
    ax.plot(
        x[r["moving_window"] - 1 :],
        r["moving_average"],
        lw=2,
        color="#9e2a2b",
        label=f"average of the last {min(MOVING_WINDOW, r['moving_window'])} steps",
    )
    ax.set(xlabel="step", ylabel="reward")
    ax.legend(frameon=False)


def _phases(ax, steps: dict[str, list]) -> None:
    bottom = [0.0] * len(steps["step"])
    for key, name in _PHASES:
        values = [v or 0.0 for v in steps[key]]
        ax.bar(steps["step"], values, bottom=bottom, width=0.9, color=_COLORS[name], label=name)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    rest = sorted(bottom[1:]) or bottom
    ax.set(xlabel="step", ylabel="seconds", ylim=(0, 1.3 * rest[-1] or 1))  # the first step waits for engines to start: cut
    if bottom[0] > 1.3 * rest[-1]:
        ax.annotate(f"first step: {bottom[0]:.0f} s", (steps["step"][0], 1.05 * rest[-1]))
    ax.legend(frameon=False, ncols=5, loc="upper right")


def _staleness(ax, s: dict[str, Any]) -> None:
    steps = s["series"]["steps"]
    ax.plot(steps["step"], _floats(steps["staleness_mean"]), ".-", lw=0.8, color="#2a6f97", label="mean")
    ax.plot(steps["step"], _floats(steps["staleness_max"]), ".", color="#e09f3e", label="max")
    ax.axhline(s["staleness"]["limit"], lw=1, ls="--", color="#9e2a2b", label="limit")
    ax.set(xlabel="step", ylabel="versions")
    ax.legend(frameon=False)


def _logprobs(ax, steps: dict[str, list]) -> None:
    for key, label, color in (
        ("exact_logprob_diff_mean", "exact tokens, mean", "#2a6f97"),
        ("logprob_diff_mean", "all tokens, mean", "#e09f3e"),
        ("logprob_diff_p99", "all tokens, p99", "#9e2a2b"),
    ):
        if steps.get(key):
            ax.plot(steps["step"], [v if v and v > 0 else float("nan") for v in steps[key]], ".-", lw=0.8, color=color, label=label)
    ax.set(xlabel="step", ylabel="|difference|, nats", yscale="log")
    ax.legend(frameon=False)


def _queue(ax, s: dict[str, Any]) -> None:
    q = s["series"]["queue"]
    minutes = [t / 60 for t in q["seconds"]]
    ax.plot(minutes, q["in_flight"], lw=0.9, color="#2a6f97", label="trajectories in flight")
    ax.plot(minutes, q["ready_groups"], lw=0.9, color="#e09f3e", label="groups ready")
    top = max([*q["in_flight"], *q["ready_groups"], 1])
    ax.fill_between(
        minutes,
        0,
        top,
        where=[bool(b) for b in q["blocked"]],
        step="mid",
        alpha=0.2,
        lw=0,
        color="#9e2a2b",
        label="held back by a full buffer",
    )
    ax.set(xlabel="minutes", ylabel="count")
    ax.legend(frameon=False, ncols=3)


def _waiting(ax, s: dict[str, Any]) -> None:
    q = s["series"]["queue"]
    minutes = [t / 60 for t in q["seconds"]]
    ax.plot(minutes, _floats(q["waiting_age_mean"]), lw=0.9, color="#2a6f97", label="mean")
    ax.plot(minutes, _floats(q["waiting_age_max"]), lw=0.9, color="#e09f3e", label="oldest")
    ax.axhline(s["staleness"]["limit"], lw=1, ls="--", color="#9e2a2b", label="limit")
    ax.set(xlabel="minutes", ylabel="versions")
    ax.legend(frameon=False)


def _waterfall(ax, transports: dict[str, Any]) -> None:
    for row, (_, t) in enumerate(transports.items()):
        left = 0.0
        for phase, color in (("wait_s", "#c9c9c9"), ("pull_s", "#8fb8de"), ("pause_s", "#9e2a2b"), ("verify_s", "#e09f3e")):
            width = t[phase].get("median") or 0.0
            ax.barh(row, width, left=left, color=color, height=0.5, label=phase.removesuffix("_s") if row == 0 else None)
            left += width
    ax.set(yticks=range(len(transports)), yticklabels=list(transports), xlabel="seconds since publication", ylim=(-0.5, len(transports)))
    ax.legend(frameon=False, ncols=4)


def _bars(s: dict[str, Any]) -> list[dict[str, Any]]:
    known = [f for f in s["files"] if f["started"] and f["last"]]
    return sorted(known, key=lambda f: (f["role"], f["rank"], f["epoch"]))[:60]


def _timeline(ax, s: dict[str, Any]) -> None:
    bars = _bars(s)
    start = min((f["started"] for f in bars), default=0.0)
    for row, f in enumerate(bars):
        ax.barh(
            row,
            (f["last"] - f["started"]) / 60,
            left=(f["started"] - start) / 60,
            color="#2a6f97" if f["role"] == "trainer" else "#e09f3e",
            height=0.7,
        )
    ax.set(yticks=range(len(bars)), yticklabels=[f"{f['role']} {f['rank']}, epoch {f['epoch']}" for f in bars], xlabel="minutes")
    ax.invert_yaxis()
