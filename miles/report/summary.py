"""From tables to numbers: `summarize(RunData) -> dict`, pure and JSON-ready. Docstrings say how each figure is made.

Numbers that cannot be computed (no rows yet) are None, never 0. Every mean comes with its count, and with its spread where that says
something.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from miles.buffer import Status
from miles.report.alarms import alarms, next_commands
from miles.report.drafts import course, drafts
from miles.report.read import RunData, Table
from miles.report.rows import clean, finished_trajectories, lineage_rows, mismatches, queue_rows, spread, truth_rows, weighted_mean

MOVING_WINDOW = 9  # steps of the moving average, as in the reference case study
SERIES_POINTS = 400  # points kept of series that have a row a second

STEP_SERIES = (
    "step",
    "version",
    "reward_mean",
    "reward_std",
    "step_s",
    "wait_s",
    "fetch_s",
    "train_s",
    "publish_s",
    "published_s",
    "checkpoint_s",
    "staleness_mean",
    "staleness_max",
    "queue_groups",
    "exact_logprob_diff_mean",
    "logprob_diff_mean",
    "logprob_diff_p99",
    "kl_mean",
    "reference_kl_mean",
    "entropy_mean",
    "ess",
    "clip_fraction",
    "importance_cut_fraction",
    "routing_differs",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "sampled_tokens",
)


def summarize(data: RunData) -> dict[str, Any]:
    """All figures of a run. Keys are listed in docs/report.md."""
    steps = lineage_rows(data)
    ok = finished_trajectories(data)
    out: dict[str, Any] = {
        "run": _run(data),
        "steps": len(data.lineage.steps),
        "steps_planned": data.config.run.steps,
        "steps_undone": data.lineage.undone,
        "steps_without_log": sorted(set(data.lineage.steps) - set(steps["step"].astype(int).tolist()))
        if steps
        else sorted(data.lineage.steps),
        "reward": reward(steps),
        "logprob_abs_diff": logprob_difference(steps),
        "staleness": staleness_figures(data, steps, ok),
        **cache(ok),
        "step_time": step_time(steps),
        "tokens": tokens(steps),
        "attempts": len(data.attempts),
        "attempt_list": [_attempt(a) for a in data.attempts],
        "restarts": {role: max(0, n - 1) for role, n in data.epochs.items()},
        "epochs": data.epochs,
        "weights": weights(data, steps),
        "turns": turns(data, steps),
        "dropped": data.buffer.dropped_by_reason(),
        "dropped_detail": dropped_detail(data),
        "groups": data.buffer.counts(),
        "groups_trained": len(data.lineage.trained_groups),
        "groups_trained_twice": len(data.lineage.trained_twice),
        "trajectories": trajectories(data, ok),
        "engines": engines(data, ok),
        "queue": queue(data),
        "waits": waits(data, steps),
        "truth": {name: spread(steps.get(name)) for name in ("kl_mean", "ess", "clip_fraction", "importance_cut_fraction", "grad_norm", "loss")},
        "truth_by_staleness": truth_by_staleness(truth_rows(data)),
        "routing": routing(steps),
        "policy": policy(steps),
        "drafts": drafts(steps, ok),
        "tasks": tasks(ok),
        "series": series(data, steps),
        "files": list(data.files),
        "unreadable": list(data.unreadable),
    }
    out["alarms"] = alarms(out, data.config)
    out["next"] = next_commands(out, data.path)
    return clean(out)


# -- figures -----------------------------------------------------------------------------------------------------------------
def reward(steps: Table) -> dict[str, Any]:
    """Mean reward of the first and last third of the steps (n // 3 steps each, at least one), each sample counting once, with the
    standard deviation between the steps' means; moving average over 9 steps."""
    if not steps:
        return {"first_third": None, "last_third": None, "count": 0}
    means, n = steps["reward_mean"].astype(float), steps["trajectories"].astype(float)
    third = max(1, len(means) // 3)
    first, last = weighted_mean(means[:third], n[:third]), weighted_mean(means[-third:], n[-third:])
    window = min(MOVING_WINDOW, len(means))
    return {
        "first_third": first,
        "last_third": last,
        "gain": None if first is None or last is None else last - first,
        "third_steps": third,
        "first_third_std": means[:third].std(),
        "last_third_std": means[-third:].std(),
        "mean": weighted_mean(means, n),
        "count": len(means),
        "trajectories": int(n.sum()),
        "moving_window": window,
        "moving_average": np.convolve(means, np.ones(window) / window, mode="valid"),
    }


def policy(steps: Table) -> dict[str, Any]:
    """entropy (nats a sampled token) and, with a reference policy, the divergence from it: first and last step, and the spread over steps."""
    return {name: course(steps, name) for name in ("entropy_mean", "reference_kl_mean")}


def routing(steps: Table) -> dict[str, Any]:
    """Mixture of experts, the trainer's own routers against the experts that the engines recorded: `differs`, the share of (token, layer) with another set;
    `experts_differ`, the share of the recorded experts that are left out. First and last step, and the spread over steps."""
    return {name: course(steps, f"routing_{name}") for name in ("differs", "experts_differ")}


def logprob_difference(steps: Table) -> dict[str, Any]:
    """|trainer - engine| of log-probabilities. mean and max: over tokens of trajectories that come whole from the version being trained
    (weighted by `exact_tokens`); all_tokens_*: over every sampled token, so the drift of stale weights is in it."""
    if not steps:
        return {"mean": None, "max": None, "tokens": 0, "all_tokens_mean": None}
    exact, sampled = steps["exact_tokens"].astype(float), steps["sampled_tokens"].astype(float)
    has = exact > 0
    return {
        "mean": weighted_mean(steps["exact_logprob_diff_mean"], exact),
        "max": steps["exact_logprob_diff_max"][has].max() if has.any() else None,
        "tokens": int(exact.sum()),
        "all_tokens_mean": weighted_mean(steps["logprob_diff_mean"], sampled),
        "all_tokens": int(sampled.sum()),
        "all_tokens_p99": spread(steps["logprob_diff_p99"]).get("median"),
        "all_tokens_max": spread(steps["logprob_diff_max"]).get("max"),
    }


def truth_by_staleness(rows: Table) -> list[dict[str, Any]]:
    """For each staleness of a sampled token (versions between the one that sampled it and the one trained; 3: 3 or more) its tokens and their share, and
    over them, weighted by tokens: |trainer - engine| of log-probabilities, KL, effective sample size, clipped share; p99 is the median over steps."""
    if not rows:
        return []
    out, tokens = [], rows["tokens"].astype(float)
    for age in np.unique(rows["staleness"].astype(int)).tolist():
        here = rows["staleness"].astype(int) == age
        n = tokens[here]
        mean = {name: weighted_mean(rows[name][here].astype(float), n) for name in ("logprob_diff_mean", "kl_mean", "ess", "clip_fraction")}
        out.append({
            "staleness": age, "steps": int(here.sum()), "tokens": int(n.sum()), "share": n.sum() / tokens.sum(), **mean,
            "logprob_diff_p99": spread(rows["logprob_diff_p99"][here]).get("median"), "logprob_diff_max": spread(rows["logprob_diff_max"][here]).get("max"),
        })
    return out


def staleness_figures(data: RunData, steps: Table, ok: Table) -> dict[str, Any]:
    """Versions of weights between those that sampled and the one being trained (miles.buffer.versions), of the farthest token, at training time. mean over samples; `histogram` counts trained
    samples by age (joined from the journal, so it may hold fewer when rollout logs are lost; of a sample's versions the logs name the lowest and the highest). Of ready groups, which are as old as they would be if they were
    trained at the newest version: `waiting_histogram` and `waiting_max` now, `waiting_mean_over_time` and `waiting_max_over_time` a value a second while
    there were some."""
    newest = max(data.lineage.versions.values(), default=None)
    waiting = data.buffer.waiting_ages(newest) if newest is not None else []
    table, counts = queue_rows(data), Counter(waiting)
    out = {
        "limit": data.config.buffer.max_staleness,
        "max": None,
        "mean": None,
        "histogram": {},
        "waiting_max": max(waiting, default=None),
        "waiting_histogram": {str(k): counts[k] for k in sorted(counts)},
        "waiting_mean_over_time": spread(table.get("waiting_age_mean")),
        "waiting_max_over_time": spread(table.get("waiting_age_max")),
    }
    if steps:
        out |= {
            "max": int(steps["staleness_max"].max()),
            "mean": weighted_mean(steps["staleness_mean"], steps["trajectories"].astype(float)),
        }
    trained = data.lineage.trained_groups
    if ok:
        ages = Counter(
            data.buffer.lineage.staleness(data.lineage.versions[trained[g]], versions)
            for g, *versions in zip(*(ok[k].astype(int).tolist() for k in ("group_id", "oldest_version", "newest_version")), strict=True)
            if g in trained
        )
        out["histogram"] = {str(int(k)): ages[k] for k in sorted(ages)}
    return out


def cache(ok: Table) -> dict[str, Any]:
    """prefix_cache_hit_rate = reused / cacheable tokens, where cacheable is the prefix that this engine had already computed for this
    session, and reused the part of it that came from the cache (counted turn by turn: what the cache holds from other sessions, such as the
    system prompt, does not make up for a miss). prompt_cache_share = all cached tokens / all prompt tokens."""
    if not ok or not ok["prompt_tokens"].sum():
        return {"prefix_cache_hit_rate": None, "prompt_cache_share": None}
    cacheable = ok["cacheable_tokens"].sum()
    return {
        "prefix_cache_hit_rate": ok["reused_tokens"].sum() / cacheable if cacheable else None,
        "prompt_cache_share": ok["cached_tokens"].sum() / ok["prompt_tokens"].sum(),
    }


def step_time(steps: Table) -> dict[str, Any]:
    """Seconds of a whole step. The first (engines still start) stands apart: median and spread are over the others."""
    if not steps:
        return {"first": None, "median": None, "count": 0}
    rest = spread(steps["step_s"][1:])
    return {
        "first": steps["step_s"][0],
        "median": rest.get("median"),
        **{k: rest.get(k) for k in ("mean", "std", "p90", "max")},
        "count": rest["count"],
    }


def tokens(steps: Table) -> dict[str, Any]:
    """Tokens of trained trajectories, given and sampled; unaccounted = recorded in the buffer but not seen by the training step, or the
    reverse."""
    if not steps:
        return {"trained": 0, "sampled": 0, "unaccounted": None}
    seconds = steps["step_s"][1:].sum()
    return {
        "trained": int(steps["tokens"].sum()),
        "sampled": int(steps["sampled_tokens"].sum()),
        "unaccounted": int(steps["unaccounted_tokens"].sum()),
        "trained_per_second": steps["tokens"][1:].sum() / seconds if seconds else None,
    }


def weights(data: RunData, steps: Table) -> dict[str, Any]:
    """versions: distinct versions seen (published, applied or on disk). Per transport: seconds of each phase per engine, over applied
    versions; total_s counts from publication; pause_s is what generation loses. The first version of each rollout process stands apart
    (`first_load_s`: pull and pause), because it waits for the engine's start. trainer: seconds of each version that the trainer waited
    (`publish_s`), and until the version was there (`published_s`), some of them beside its next step."""
    applied = data.tables.get("weights") or {}
    seen = set(data.versions_on_disk) | set(applied.get("version", np.array([])).astype(int).tolist())
    if "published_version" in steps:
        seen |= set(steps["published_version"].astype(int).tolist())
    out: dict[str, Any] = {
        "versions": len({v for v in seen if v >= 0}),
        "applied": 0,
        "failed": 0,
        "first_load_s": spread(None),
        "trainer": {k: spread(steps.get(k)) for k in ("publish_s", "published_s")},
        "transports": {},
    }
    if not applied:
        return out
    good, first = applied["ok"].astype(bool), np.zeros(len(applied["ok"]), bool)
    processes: set[tuple[int, int]] = set()
    for i, process in enumerate(zip(applied["file_rank"].tolist(), applied["file_epoch"].tolist(), strict=True)):
        first[i] = process not in processes
        processes.add(process)
    out |= {
        "applied": int(good.sum()),
        "failed": int((~good).sum()),
        "first_load_s": spread((applied["pull_s"] + applied["pause_s"])[first & good]),
    }
    for transport in np.unique(applied["transport"][~first & good]).tolist():
        rows = (applied["transport"] == transport) & good & ~first
        times = {k: spread(applied[k][rows]) for k in ("wait_s", "pull_s", "pause_s", "apply_s", "verify_s", "total_s")}
        busy = applied["pull_s"][rows].sum() + applied["apply_s"][rows].sum()
        out["transports"][transport] = {
            "count": int(rows.sum()),
            "bytes_median": spread(applied["bytes"][rows]).get("median"),
            "mb_per_s": applied["bytes"][rows].sum() / 1e6 / busy if busy else None,
            **times,
        }
    return out


def dropped_detail(data: RunData) -> dict[str, Any]:
    """Mean length of a sequence and reward of a sample, in dropped groups beside trained ones: how much dropping favours short ones. retried: those whose
    prompt was sampled again."""

    def facts(groups):
        known = [g for g in groups if g.trajectories]
        return {
            "groups": len(groups),
            "retried": sum(g.retried for g in groups),
            "tokens_mean": np.mean([g.tokens / g.trajectories for g in known]) if known else None,
            "reward_mean": np.average([g.reward_mean for g in known], weights=[g.samples for g in known]) if known else None,
        }

    by_reason: dict[str, list] = {}
    for g in data.buffer.with_status(Status.DROPPED):
        by_reason.setdefault(g.dropped, []).append(g)
    return {
        "trained": facts(data.buffer.with_status(Status.TRAINED)),
        **{reason: facts(groups) for reason, groups in sorted(by_reason.items())},
    }


def trajectories(data: RunData, ok: Table) -> dict[str, Any]:
    """Every ended sample by status (`ok`, `retried:<cause>`, `dropped:<cause>`) and, of the finished ones, by how it ended; figures of a sample are
    sums over its leaves."""
    table = data.tables.get("trajectories")
    if not table:
        return {"count": 0, "status": {}, "finish": {}, "mismatches": {}, "moved": 0, "resumed": {"count": 0, "turns": 0, "abandoned_turns": 0}}
    return {
        "count": len(table["status"]),
        "status": dict(Counter(table["status"].tolist())),
        "finish": dict(Counter(ok["finish"].tolist())) if ok else {},
        "mismatches": mismatches(data),
        "moved": int((ok["moves"] > 0).sum()) if ok else 0,  # their engine died, another went on
        "resumed": {  # begun by a process that was killed: turns that were taken from disk, and turns there that the environment made useless
            "count": int((ok["resumed_turns"] > 0).sum()) if ok else 0,
            "turns": int(ok["resumed_turns"].sum()) if ok else 0,
            "abandoned_turns": int(ok["abandoned_turns"].sum()) if ok else 0,
        },
        "leaves": spread(ok.get("leaves")),
        "turns": spread(ok.get("turns")),
        "tokens": spread(ok.get("tokens")),
        "seconds": spread(ok.get("seconds")),
        "engine_s": spread(ok.get("engine_s")),
        "env_s": spread(ok.get("env_s")),
    }


def engines(data: RunData, ok: Table) -> dict[str, Any]:
    """Work of each engine (one per rollout rank) and balance = largest over mean. restarts: of the engine process, within living ranks."""
    table, out = data.tables.get("engine"), []
    ranks = sorted(set(ok["rank"].tolist()) if ok else set()) or (sorted(set(table["rank"].tolist())) if table else [])
    for rank in ranks:
        mine = {k: v[ok["rank"] == rank] for k, v in ok.items()} if ok else {}
        entry = {
            "rank": int(rank),
            "trajectories": len(mine.get("rank", ())),
            "sampled_tokens": int(mine["sampled_tokens"].sum()) if mine else 0,
            **cache(mine),
            "restarts": 0,
            "active_mean": None,
        }
        if table:
            rows = table["rank"] == rank
            peak: dict[int, int] = {}
            for epoch, count in zip(table["file_epoch"][rows].tolist(), table["restarts"][rows].tolist(), strict=True):
                peak[epoch] = max(peak.get(epoch, 0), int(count))
            entry |= {"restarts": sum(peak.values()), "active_mean": spread(table["active"][rows]).get("mean")}
        out.append(entry)

    def balance(key):
        values = [e[key] for e in out]
        return max(values) / np.mean(values) if values and sum(values) else None

    return {"count": len(out), "list": out, "balance_trajectories": balance("trajectories"), "balance_tokens": balance("sampled_tokens")}


def queue(data: RunData) -> dict[str, Any]:
    """In-flight trajectories and ready groups; `in_flight_free` leaves out the seconds in which a full buffer held rollout back."""
    table = queue_rows(data)
    out = {"capacity": data.config.buffer.capacity_groups, "in_flight_cap": data.config.rollout.in_flight}
    if not table:
        return out | {"ready": spread(None), "in_flight": spread(None), "in_flight_free": spread(None)}
    free = table["blocked"] == 0
    return out | {
        "ready": spread(table["ready_groups"]),
        "in_flight": spread(table["in_flight"]),
        "in_flight_free": spread(table["in_flight"][free]),
    }


def waits(data: RunData, steps: Table) -> dict[str, Any]:
    """Which side is the bottleneck. trainer_wait_share: seconds the trainer waited for groups over seconds of its steps, without the first
    step; rollout_blocked_share: share of the rollout leader's seconds in which a full buffer held it back. The side that waits less is the
    bottleneck."""
    table = queue_rows(data)
    blocked = float(table["blocked"].mean()) if table else None
    out: dict[str, Any] = {"trainer_wait_share": None, "rollout_blocked_share": blocked, "bottleneck": "unknown", "trainer_time": {}}
    if not steps or len(steps["step_s"]) < 2:
        return out
    total = steps["step_s"][1:].sum()
    turn = ("turn", "resume", "release") if data.config.cluster.placement == "shared" else ()
    phases = ("wait", "fetch", "train", "publish", "checkpoint", *turn)
    share = {k: float(steps[f"{k}_s"][1:].sum() / total) for k in phases} if total else {}
    out |= {"trainer_wait_share": share.get("wait"), "trainer_time": share}
    if share and blocked is not None:
        wait = share["wait"]
        out["bottleneck"] = "balanced" if max(wait, blocked) < 0.1 else "rollout" if wait > blocked else "trainer"
    return out


def turns(data: RunData, steps: Table) -> dict[str, Any] | None:
    """Shared GPUs: seconds of handing them over, a value a step or a turn. Trainer: waiting until the engines have released, its memory back, its memory
    released. Engines: memory released, the time without it, memory taken again. None with disjoint GPUs."""
    if data.config.cluster.placement != "shared":
        return None
    table = data.tables.get("turns") or {}
    return {
        "trainer": {k: spread(steps.get(k) if steps else None) for k in ("turn_s", "resume_s", "release_s")},
        "engines": {k: spread(table.get(k)) for k in ("release_s", "away_s", "resume_s")},
    }


def tasks(ok: Table) -> list[dict[str, Any]]:
    """Mean reward of each task over its first and its last half of trajectories, in time order."""
    out = []
    for task in np.unique(ok["task_id"]).tolist() if ok else []:
        r = ok["reward"][ok["task_id"] == task]
        half = len(r) // 2
        out.append(
            {
                "task": task,
                "trajectories": len(r),
                "reward": r.mean(),
                "first_half": r[:half].mean() if half else None,
                "last_half": r[half:].mean(),
            }
        )
    return sorted(out, key=lambda t: t["reward"])


def series(data: RunData, steps: Table) -> dict[str, Any]:
    """What the charts draw: a value a step, and the queue thinned to at most 400 points."""
    out: dict[str, Any] = {"steps": {name: steps[name] for name in STEP_SERIES if name in steps}}
    table = data.tables.get("queue")
    if table and len(table["time"]):
        every = max(1, -(-len(table["time"]) // SERIES_POINTS))
        out["queue"] = {
            "seconds": (table["time"] - table["time"][0])[::every],
            **{k: table[k][::every] for k in ("in_flight", "ready_groups", "blocked", "waiting_age_mean", "waiting_age_max") if k in table},
        }
    return out


# -- the run -----------------------------------------------------------------------------------------------------------------
def _run(data: RunData) -> dict[str, Any]:
    started = min((f["started"] for f in data.files if f["started"]), default=None)
    last = max((f["last"] for f in data.files if f["last"]), default=None)
    return {
        "name": data.config.run.name,
        "path": str(data.path),
        "mode": data.config.run.mode,
        "model": data.config.model.path,
        "precision": [data.config.model.trainer_precision, data.config.model.rollout_precision],
        "finished": data.finished,
        "started": started,
        "last_row": last,
        "wall_s": last - started if started and last else None,
    }


def _attempt(a: dict[str, Any]) -> dict[str, Any]:
    begin, end = a["begin"], a["exit"]
    return {
        "attempt": a["number"],
        "launcher": begin.get("launcher"),
        "job_id": begin.get("job_id"),
        "nodes": begin.get("nodes"),
        "started": begin.get("started"),
        "ended": end.get("ended"),
        "outcome": end.get("outcome"),
        "cause": end.get("text"),
    }
