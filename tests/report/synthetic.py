"""Rows, logs and journals of synthetic runs."""

from miles.buffer.view import journal_name
from miles.log import RunLog
from miles.rundir import JournalWriter


def step_row(step, epoch, **changes):
    """Defaults of a `steps` row; the step's number shows in some of its values."""
    return {
        "step": step,
        "version": step - 1,
        "epoch": epoch,
        "start": 1000.0 + step,
        "wait_s": 1.0,
        "fetch_s": 0.5,
        "train_s": 2.0,
        "publish_s": 0.5,
        "published_s": 1.25,
        "checkpoint_s": 0.0,
        "step_s": 4.0,
        "groups": 1,
        "trajectories": 2,
        "leaves": 2,
        "tokens": 100,
        "sampled_tokens": 40,
        "reward_mean": step / 10,
        "reward_std": 0.1,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "loss": 0.1,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "queue_groups": 2,
        "dropped_stale": 0,
        "exact_tokens": 10,
        "exact_logprob_diff_mean": 1e-5,
        "exact_logprob_diff_max": 1e-4,
        "logprob_diff_mean": 1e-3,
        "logprob_diff_p99": 5e-3,
        "logprob_diff_max": 1e-2,
        "kl_mean": 1e-4,
        "reference_kl_mean": step / 100,
        "entropy_mean": 2.0 - step / 4,
        "ess": 0.99,
        "clip_fraction": 0.01,
        "importance_cut_fraction": 0.0,
        "advantage_abs_mean": 0.8,
        "routing_differs": step / 100,
        "routing_experts_differ": step / 400,
        "unaccounted_tokens": 0,
        **changes,
    }


def truth_row(step, staleness, tokens, **changes):
    return {
        "step": step,
        "version": step - 1,
        "staleness": staleness,
        "tokens": tokens,
        "logprob_diff_mean": 1e-3 * (1 + staleness),
        "logprob_diff_p99": 5e-3,
        "logprob_diff_max": 1e-2 * step,
        "kl_mean": 1e-4,
        "ess": 0.99,
        "clip_fraction": 0.01,
        **changes,
    }


def trajectory_row(group, sample, rank=0, **changes):
    return {
        "group_id": group,
        "sample": sample,
        "task_id": "count",
        "rank": rank,
        "reward": 1.0,
        "leaves": 1,
        "turns": 2,
        "tokens": 50,
        "sampled_tokens": 20,
        "prompt_tokens": 60,
        "cached_tokens": 30,
        "cacheable_tokens": 30,
        "reused_tokens": 30,
        "seconds": 2.0,
        "moves": 0,
        "resumed_turns": 0,
        "abandoned_turns": 0,
        "engine_s": 1.5,
        "env_s": 0.5,
        "oldest_version": 0,
        "newest_version": changes.get("oldest_version", 0),
        "finish": "done",
        "status": "ok",
        **changes,
    }


def weight_row(version, **changes):
    return {
        "version": version,
        "step": version,
        "transport": "disk",
        "bytes": 2_000_000,
        "wait_s": 0.1,
        "pull_s": 0.5,
        "pause_s": 0.6,
        "apply_s": 0.5,
        "verify_s": 0.2,
        "total_s": 1.4,
        "ok": True,
        **changes,
    }


def queue_row(in_flight, ready, blocked, age_mean=float("nan"), age_max=float("nan")):
    return {
        "in_flight": in_flight,
        "open_groups": 1,
        "ready_groups": ready,
        "taken_groups": 0,
        "trained_groups": 0,
        "dropped_groups": 0,
        "blocked": blocked,
        "waiting_age_mean": age_mean,
        "waiting_age_max": age_max,
    }


def write_log(run, attempt, role, rank, epoch, **tables):
    """Log file of one process; `tables` maps a table to its rows."""
    log = RunLog(run.log_path(attempt, role, rank, epoch), role=role, rank=rank, attempt=attempt, epoch=epoch)
    for name, rows in tables.items():
        for row in rows:
            log.row(name, **row)
    log.close()


def journal(run, role, epoch, *records):
    writer = JournalWriter(run.buffer_dir / "journal" / journal_name(role, epoch))
    writer.append(*records)
    writer.close()


def ready(group, oldest, reward=0.5, tokens=100):
    return {
        "kind": "ready",
        "group": group,
        "task": "count",
        "trajectories": 2,
        "samples": 2,
        "oldest_version": oldest,
        "tokens": tokens,
        "reward_mean": reward,
    }
