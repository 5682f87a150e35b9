"""The one-page report as plain text: `render_text(summary) -> str`."""

from __future__ import annotations

import itertools
from typing import Any

from miles.rundir import POOL_RANKS

WIDTH = 100
MOST_STALENESS = 3  # the last bin of miles.trainer.algorithms.truth
_BARS = "▁▂▃▄▅▆▇█"


def render_text(s: dict[str, Any]) -> str:
    """One page: state, learning, truth, schedule, engines, weights, alarms, next command. Takes the dict of `miles.report.report`."""
    lines = [*_head(s), *_learning(s), *_truth(s), *_schedule(s), *_engines(s), *_weights(s), *_alarms(s)]
    return "\n".join(lines) + "\n"


def sparkline(values: list[float | None], width: int = 60) -> str:
    """Values as bars, thinned to `width` by means of neighbours; a missing value is a space."""
    if len(values) > width:
        cuts = [round(i * len(values) / width) for i in range(width + 1)]
        parts = [[v for v in values[a:b] if v is not None] for a, b in itertools.pairwise(cuts)]
        values = [sum(p) / len(p) if p else None for p in parts]
    known = [v for v in values if v is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(" " if v is None else _BARS[int((v - low) / span * 7.999)] if span else _BARS[3] for v in values)


def number(value: Any, form: str = ".3g", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _title(text: str) -> str:
    return f"\n{text} {'─' * (WIDTH - len(text) - 1)}"


def _spread(d: dict[str, Any], form: str = ".3g", unit: str = "") -> str:
    if not d.get("count"):
        return "-"
    return f"median {d['median']:{form}}{unit}, p90 {d['p90']:{form}}{unit}, max {d['max']:{form}}{unit} (n = {d['count']})"


def _head(s: dict[str, Any]) -> list[str]:
    run, wall = s["run"], s["run"]["wall_s"]
    state = "finished" if run["finished"] else "not finished"
    out = [
        f"{run['name']}  {state}: {s['steps']} of {s['steps_planned']} steps" + (f" in {wall / 60:.1f} min" if wall else ""),
        f"{run['path']}",
        f"{run['mode']}, {run['model']}, trainer {run['precision'][0]}, rollout {run['precision'][1]}",
    ]
    for a in s["attempt_list"]:
        out.append(
            f"attempt {a['attempt']}: {a['launcher'] or '?'}"
            + (f" job {a['job_id']}" if a["job_id"] else "")
            + f", {a['outcome'] or 'running or killed'}"
            + (f": {a['cause']}" if a["cause"] else "")
        )
    return out


def _learning(s: dict[str, Any]) -> list[str]:
    r = s["reward"]
    out = [_title("Learning")]
    if not r["count"]:
        return [*out, "no step yet"]
    out.append(
        f"reward  first third {number(r['first_third'], '.3f')} ± {number(r['first_third_std'], '.3f')}   last third "
        f"{number(r['last_third'], '.3f')} ± "
        f"{number(r['last_third_std'], '.3f')}   gain {number(r['gain'], '+.3f')}   ({r['third_steps']} steps each, ± between steps; "
        f"{r['trajectories']} trajectories)"
    )
    out.append(f"        per step {sparkline(s['series']['steps']['reward_mean'])}")
    average = r["moving_average"]
    out.append(f"        average of {r['moving_window']} steps: {average[0]:.3f} -> {average[-1]:.3f}; one run, an observation")
    weakest = [t for t in s["tasks"] if t["trajectories"] >= 4][:3]
    if weakest:
        out.append("weakest tasks: " + ", ".join(f"{t['task']} {t['reward']:.2f} (n = {t['trajectories']})" for t in weakest))
    t = s["truth"]
    out.append(f"loss {_spread(t['loss'])}; gradient norm {_spread(t['grad_norm'])}")
    mtp, agreement = s["drafts"]["mtp_loss"], s["drafts"]["mtp_agreement"]
    if mtp["count"]:
        out.append(f"draft layer: loss {mtp['first']:.3g} -> {mtp['last']:.3g} nats a token, right {agreement['first']:.1%} -> {agreement['last']:.1%}")
    entropy, distance = (s["policy"][name] for name in ("entropy_mean", "reference_kl_mean"))
    if entropy["count"]:
        out.append(
            f"entropy {entropy['first']:.3g} -> {entropy['last']:.3g} nats a token"
            + (f"; KL to the reference {distance['first']:.2e} -> {distance['last']:.2e}, max {distance['max']:.2e}" if distance["count"] else "")
        )
    return out


def _truth(s: dict[str, Any]) -> list[str]:
    d, t = s["logprob_abs_diff"], s["truth"]
    out = [
        _title("Truth"),
        f"|trainer - engine| log-probability: mean {number(d['mean'], '.2e')}, max {number(d['max'], '.2e')} over {d['tokens']} exact "
        f"tokens; "
        f"all sampled tokens, staleness included: {number(d['all_tokens_mean'], '.2e')}",
        f"tokens trained {s['tokens']['trained']} ({s['tokens']['sampled']} sampled), unaccounted "
        f"{number(s['tokens']['unaccounted'], 'd')}; "
        f"groups trained {s['groups_trained']}, trained twice {s['groups_trained_twice']}",
    ]
    mean = {k: v.get("mean") for k, v in t.items()}
    out.append(
        f"means per step: KL {number(mean['kl_mean'], '.2e')}, ESS {number(mean['ess'])}, clipped {number(mean['clip_fraction'], '.2%')}, "
        f"importance weights cut {number(mean['importance_cut_fraction'], '.2%')}"
    )
    differs, experts = s["routing"]["differs"], s["routing"]["experts_differ"]
    if differs["count"]:
        out.append(
            f"routers of the trainer choose other experts than the engines did at {number(differs['mean'], '.2%')} of (token, layer), first step "
            f"{number(differs['first'], '.2%')}, last {number(differs['last'], '.2%')}; {number(experts['mean'], '.2%')} of the experts"
        )
    rows = s["truth_by_staleness"]
    if rows:
        out.append(f"{'by staleness of the token':<26}{'tokens':>14}{'|diff| mean':>13}{'p99':>10}{'max':>10}{'KL':>10}{'ESS':>8}{'clipped':>9}")
    for x in rows:
        name = f"{x['staleness']}{' or more' if x['staleness'] == MOST_STALENESS else ''}"
        out.append(
            f"{name:<20}{x['share']:>6.1%}{x['tokens']:>14}{number(x['logprob_diff_mean'], '.2e'):>13}{number(x['logprob_diff_p99'], '.1e'):>10}"
            f"{number(x['logprob_diff_max'], '.1e'):>10}{number(x['kl_mean'], '.1e'):>10}{number(x['ess']):>8}{number(x['clip_fraction'], '.2%'):>9}"
        )
    return out


def _schedule(s: dict[str, Any]) -> list[str]:
    w, st, q, g = s["waits"], s["step_time"], s["queue"], s["groups"]
    out = [
        _title("Schedule"),
        f"bottleneck: {w['bottleneck']}   trainer waits {number(w['trainer_wait_share'], '.0%')} of its steps, rollout held back "
        f"{number(w['rollout_blocked_share'], '.0%')} of its time",
    ]
    out.append(
        f"step: first {number(st['first'], '.1f', ' s')}; then median {number(st['median'], '.2f', ' s')}, p90 "
        f"{number(st.get('p90'), '.2f', ' s')}, "
        f"max {number(st.get('max'), '.2f', ' s')} (n = {st['count']})"
    )
    if w["trainer_time"]:
        out.append("trainer's time: " + ", ".join(f"{k} {v:.0%}" for k, v in w["trainer_time"].items()))
    if t := s["turns"]:
        median = {f"{side} {k}": number(v.get("median"), ".3f", " s") for side, times in t.items() for k, v in times.items()}
        out.append(
            f"shared GPUs, medians: engines release {median['engines release_s']}, are without for {median['engines away_s']}, take again "
            f"{median['engines resume_s']}; trainer waits for that {median['trainer turn_s']}, takes {median['trainer resume_s']}, releases "
            f"{median['trainer release_s']}"
        )
    age = s["staleness"]
    histogram = ", ".join(f"{k}: {v}" for k, v in age["histogram"].items())
    out.append(
        f"staleness of trained: mean {number(age['mean'], '.2f')}, max {number(age['max'], 'd')}, limit {age['limit']}"
        + (f"   trajectories by age {histogram}" if histogram else "")
        + (f"; oldest waiting {age['waiting_max']}" if age["waiting_max"] is not None else "")
    )
    if age["waiting_mean_over_time"]["count"]:
        waiting = ", ".join(f"{k}: {v}" for k, v in age["waiting_histogram"].items())
        out.append(
            f"staleness of waiting: mean {_spread(age['waiting_mean_over_time'], '.2f')}, oldest {_spread(age['waiting_max_over_time'], '.0f')}"
            + (f"   groups now by age {waiting}" if waiting else "")
        )
    out.append(
        f"queue of {q['capacity']}: ready {_spread(q['ready'], '.0f')}; in flight {_spread(q['in_flight'], '.0f')}, cap "
        f"{q['in_flight_cap']}" + (" and what pools bring" if any(e["rank"] >= POOL_RANKS for e in s["engines"]["list"]) else "")
    )
    out.append(
        "groups: "
        + ", ".join(f"{k} {v}" for k, v in g.items())
        + (f"   dropped: {', '.join(f'{k} {v}' for k, v in s['dropped'].items())}" if s["dropped"] else "")
    )
    detail = {k: v for k, v in s["dropped_detail"].items() if k != "trained" and v["tokens_mean"]}
    if detail:
        base = s["dropped_detail"]["trained"]
        out.append(
            f"  length and reward, trained: {number(base['tokens_mean'], '.0f')} tokens, {number(base['reward_mean'], '.2f')}; "
            + "; ".join(f"{k}: {v['tokens_mean']:.0f} tokens, {v['reward_mean']:.2f}" + (f", retried {v['retried']}" if v["retried"] else "") for k, v in detail.items())
        )
    return out


def _engines(s: dict[str, Any]) -> list[str]:
    t, e = s["trajectories"], s["engines"]
    out = [
        _title("Rollout"),
        f"prefix cache: {number(s['prefix_cache_hit_rate'], '.1%')} of what could hit, {number(s['prompt_cache_share'], '.1%')} of all "
        f"prompt tokens",
    ]
    d = s["drafts"]
    if d["drafted_tokens"]:
        first, last = d["first_third"], d["last_third"]
        out.append(
            f"drafts: {number(d['acceptance_rate'], '.1%')} accepted (first third of the samples {number(first['acceptance_rate'], '.1%')}, last "
            f"{number(last['acceptance_rate'], '.1%')}), {number(d['acceptance_length'], '.2f')} tokens a pass"
        )
    if t["count"]:
        out.append(
            f"trajectories {t['count']}: "
            + ", ".join(f"{k} {v}" for k, v in sorted(t["status"].items()))
            + "   ended by: "
            + ", ".join(f"{k} {v}" for k, v in sorted(t["finish"].items()))
            + (f"   moved to another engine: {t['moved']}" if t["moved"] else "")
        )
        if t["resumed"]["turns"] or t["resumed"]["abandoned_turns"]:
            r = t["resumed"]
            out.append(f"  continued after a kill: {r['count']}, with {r['turns']} turns from disk; turns on disk that no longer fitted: {r['abandoned_turns']}")
        out.append(f"  turns {_spread(t['turns'], '.0f')}; tokens {_spread(t['tokens'], '.0f')}; seconds {_spread(t['seconds'], '.1f')}")
        if t["leaves"].get("max", 1) > 1:
            out.append(f"  leaves {_spread(t['leaves'], '.0f')}")
        for kind, causes in t["mismatches"].items():
            out.append(f"  requests {kind}: " + ", ".join(f"{k} {v}" for k, v in causes.items()))
    for x in e["list"][:16]:
        out.append(
            f"engine {x['rank']}: {x['trajectories']} trajectories, {x['sampled_tokens']} tokens sampled, hit rate "
            f"{number(x['prefix_cache_hit_rate'], '.1%')}, restarts {x['restarts']}"
        )
    if e["count"] > 1:
        out.append(
            f"balance (largest over mean of {e['count']}): trajectories {number(e['balance_trajectories'], '.2f')}, tokens "
            f"{number(e['balance_tokens'], '.2f')}"
        )
    return out


def _weights(s: dict[str, Any]) -> list[str]:
    w = s["weights"]
    out = [
        _title("Weights"),
        f"{w['versions']} versions; {w['applied']} applied by engines, {w['failed']} refused; first load "
        f"{_spread(w['first_load_s'], '.2f', ' s')}",
    ]
    if w["trainer"]["published_s"]["count"]:
        out.append(
            f"trainer: waits {_spread(w['trainer']['publish_s'], '.3f', ' s')} for a version, which is there after "
            f"{_spread(w['trainer']['published_s'], '.3f', ' s')}"
        )
    for name, t in w["transports"].items():
        median = {k: number(v.get("median"), ".3f", " s") for k, v in t.items() if isinstance(v, dict)}
        out.append(
            f"{name}: published to serving {_spread(t['total_s'], '.2f', ' s')}; {size(t['bytes_median'])}, "
            f"{number(t['mb_per_s'], '.0f', ' MB/s')}"
        )
        out.append(
            f"  medians: wait {median['wait_s']}, pull {median['pull_s']}, paused {median['pause_s']} (apply {median['apply_s']}), verify "
            f"{median['verify_s']}"
        )
    return out


def size(value: float | None) -> str:
    """Bytes with a decimal unit."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _alarms(s: dict[str, Any]) -> list[str]:
    out = [_title("Alarms")]
    out += [f"{a['level'].upper()}: {a['text']}" for a in s["alarms"]] or ["none"]
    return [*out, _title("Next"), *s["next"]]
