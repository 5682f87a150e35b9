"""Every figure against values worked by hand on the synthetic run of conftest.py."""

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest

from miles.config import load_config
from miles.core import ConfigError, Role
from miles.report import read_run, render_html, render_text, report
from miles.report.read import concatenate
from miles.report.rows import lineage_rows, spread, weighted_mean
from miles.report.text import size, sparkline
from miles.rundir import RunDir
from tests.report.synthetic import journal, queue_row, ready, step_row, write_log


def test_a_step_trained_again_after_a_restart_counts_once_with_the_newest_epoch(run):
    s = report(run.path)
    assert (s["steps"], s["steps_undone"], s["steps_without_log"]) == (4, 1, [])
    rows = lineage_rows(read_run(run.path))
    assert rows["step"].tolist() == [1, 2, 3, 4]
    assert rows["file_epoch"].tolist() == [1, 1, 2, 2]
    assert s["staleness"]["max"] == 2  # the undone step 3 had 9


def test_steps_undone_and_not_yet_trained_again_do_not_count(run):
    run.new_epoch(Role.TRAINER)
    journal(run, Role.TRAINER, 3, {"kind": "restore", "step": 1})
    s = report(run.path)
    assert (s["steps"], s["steps_undone"]) == (1, 1 + 3)
    assert s["series"]["steps"]["step"] == [1]


def test_a_trained_step_that_its_killed_process_did_not_log_is_counted_and_named(run):
    journal(run, Role.TRAINER, 3, {"kind": "restore", "step": 4}, {"kind": "trained", "groups": [8], "step": 5, "version": 4})
    s = report(run.path)
    assert (s["steps"], s["steps_without_log"]) == (5, [5])
    assert any("killed before it logged" in a["text"] for a in s["alarms"])


def test_rewards_of_the_thirds_and_moving_average(run):
    r = report(run.path)["reward"]
    # step means 0.1 0.2 0.3 0.4 with 2, 2, 6, 2 trajectories; a third of 4 steps is 1
    assert (r["first_third"], r["last_third"], r["third_steps"], r["count"]) == (0.1, 0.4, 1, 4)
    assert r["gain"] == pytest.approx(0.3)
    assert r["mean"] == pytest.approx((0.1 * 2 + 0.2 * 2 + 0.3 * 6 + 0.4 * 2) / 12)
    assert r["moving_average"] == [pytest.approx(0.25)]  # window of 4, all there is


def test_logprob_difference_is_weighted_by_exact_tokens(run):
    d = report(run.path)["logprob_abs_diff"]
    # exact tokens 0, 30, 10, 0 with means -, 1e-5, 5e-5, -
    assert d["mean"] == pytest.approx((30 * 1e-5 + 10 * 5e-5) / 40)
    assert (d["max"], d["tokens"]) == (3e-4, 40)
    assert d["all_tokens_mean"] == pytest.approx(1e-3)


def test_truth_by_staleness_is_weighted_by_tokens_and_of_the_lineage_alone(run):
    rows = report(run.path)["truth_by_staleness"]
    # tokens: 40 + 30 + 40 of staleness 0, 10 + 30 of 1, 10 of 3; the 1000 of the undone step 3 are not in it
    assert [(r["staleness"], r["tokens"], r["steps"]) for r in rows] == [(0, 110, 3), (1, 40, 2), (3, 10, 1)]
    assert [r["share"] for r in rows] == pytest.approx([110 / 160, 40 / 160, 10 / 160])
    assert rows[1]["logprob_diff_mean"] == pytest.approx((10 * 2e-3 + 30 * 6e-3) / 40) and rows[1]["ess"] == pytest.approx((10 * 0.99 + 30 * 0.91) / 40)
    assert rows[0]["logprob_diff_p99"] == 5e-3 and rows[0]["logprob_diff_max"] == pytest.approx(4e-2)  # median of 5, 5, 7; largest of steps 1, 2, 4
    page = render_text(report(run.path))
    assert "by staleness of the token" in page and "1                    25.0%            40     5.00e-03   5.0e-03   3.0e-02   1.0e-04    0.93    1.00%" in page
    assert "3 or more " in page


def test_a_run_without_figures_by_staleness_has_no_block_for_them(empty):
    s = report(empty.path)
    assert s["truth_by_staleness"] == [] and "by staleness" not in render_text(s)


def test_staleness_mean_is_over_trajectories_and_the_histogram_joins_journal_and_log(run):
    age = report(run.path)["staleness"]
    assert age["mean"] == pytest.approx((0.5 * 2 + 0.5 * 2 + 1.5 * 6 + 0.5 * 2) / 12)
    # groups 1 (step 1 at v0, made at v0), 2 (v1, v0), 4 (v2, v1), 5 (v3, v3), two samples each; 3 was undone, so it waits
    assert age["histogram"] == {"0": 4, "1": 4}
    assert (age["limit"], age["waiting_max"]) == (4, 3 - 1)


def test_staleness_of_waiting_groups_now_and_over_the_seconds_in_which_some_waited(run):
    age = report(run.path)["staleness"]
    assert age["waiting_histogram"] == {"2": 1}
    over = age["waiting_mean_over_time"], age["waiting_max_over_time"]
    assert [(o["count"], o["mean"], o["max"]) for o in over] == [(3, 1.0, 1.5), (3, 2.0, 3.0)]
    assert "staleness of waiting: mean" in render_text(report(run.path)) and "groups now by age 2: 1" in render_text(report(run.path))


def test_cache_hits_are_capped_at_what_could_hit(run):
    s = report(run.path)
    # eight rows 30 of 30; one row 50 of 30, capped to 30; one row 0 of 30
    assert s["prefix_cache_hit_rate"] == pytest.approx(270 / 300)
    assert s["prompt_cache_share"] == pytest.approx((8 * 30 + 50 + 0) / (8 * 60 + 90 + 60))


def test_step_time_keeps_the_first_step_apart(run):
    t = report(run.path)["step_time"]
    assert (t["first"], t["median"], t["max"], t["count"]) == (30.0, 4.0, 6.0, 3)


def test_tokens_waits_and_bottleneck(run):
    s = report(run.path)
    assert (s["tokens"]["trained"], s["tokens"]["sampled"], s["tokens"]["unaccounted"]) == (400, 160, 0)
    assert s["tokens"]["trained_per_second"] == pytest.approx(300 / 14)
    # steps 2-4 take 4 + 4 + 6 s, 1 + 1 + 5 of them waiting; the buffer was full in one of four seconds
    assert s["waits"]["trainer_wait_share"] == pytest.approx(0.5)
    assert s["waits"]["rollout_blocked_share"] == 0.25
    assert s["waits"]["bottleneck"] == "rollout"
    assert s["queue"]["in_flight"]["max"] == 24 and s["queue"]["in_flight_free"]["min"] == 20
    assert s["queue"]["in_flight"]["count"] == 4  # not the second before the first trajectory


def test_attempts_restarts_and_causes(run):
    s = report(run.path)
    assert s["attempts"] == 2
    assert s["epochs"] == {"trainer": 2, "rollout": 1}
    assert s["restarts"] == {"trainer": 1, "rollout": 0}
    assert [(a["outcome"], a["cause"]) for a in s["attempt_list"]] == [("requeue", "time limit"), (None, None)]


def test_weight_updates_without_the_first_load_of_each_process(run):
    w = report(run.path)["weights"]
    # rank 0: version 0 (its first), 1, 2 (refused), 3
    assert (w["versions"], w["applied"], w["failed"]) == (4, 3, 1)
    assert w["first_load_s"]["max"] == pytest.approx(60.6)
    assert (w["trainer"]["publish_s"]["median"], w["trainer"]["published_s"]["median"]) == (0.5, 1.25)
    disk = w["transports"]["disk"]
    assert (disk["count"], disk["pull_s"]["median"], disk["total_s"]["max"]) == (2, 0.6, 1.6)
    assert disk["mb_per_s"] == pytest.approx(4 / (0.5 + 0.7 + 0.5 + 0.5))


def test_dropped_by_reason_with_length_and_reward(run):
    s = report(run.path)
    assert s["dropped"] == {"stale": 1}
    assert s["dropped_detail"]["stale"] == {"groups": 1, "retried": 0, "tokens_mean": 150.0, "reward_mean": 0.0}
    assert s["dropped_detail"]["trained"]["tokens_mean"] == 50.0
    assert s["trajectories"]["status"] == {"ok": 10, "retried:engine": 1}
    assert s["trajectories"]["finish"] == {"done": 10}


def test_entropy_and_divergence_from_the_reference_from_the_first_step_to_the_last(run):
    s = report(run.path)
    steps = s["steps"]
    assert (s["policy"]["entropy_mean"]["first"], s["policy"]["entropy_mean"]["last"]) == (1.75, 2.0 - steps / 4)
    assert (s["policy"]["reference_kl_mean"]["first"], s["policy"]["reference_kl_mean"]["max"]) == (0.01, steps / 100)
    assert f"entropy 1.75 -> {2 - steps / 4:.3g} nats a token; KL to the reference 1.00e-02 -> {steps / 100:.2e}, max {steps / 100:.2e}" in render_text(s)


def test_how_far_the_trainers_routing_is_from_the_engines(run):
    s = report(run.path)
    assert (s["routing"]["differs"]["first"], s["routing"]["differs"]["last"], s["routing"]["differs"]["count"]) == (0.01, 0.04, 4)
    assert s["routing"]["experts_differ"]["mean"] == pytest.approx(0.025 / 4) and s["series"]["steps"]["routing_differs"] == [0.01, 0.02, 0.03, 0.04]
    assert "choose other experts than the engines did at 2.50% of (token, layer), first step 1.00%, last 4.00%; 0.62% of the experts" in render_text(s)


def test_leaves_and_the_causes_of_branches_and_refusals(run):
    s = report(run.path)
    assert s["trajectories"]["mismatches"] == {"branched": {"content": 5, "rewind": 1}, "refused": {"history:tools": 1}}
    assert (s["trajectories"]["leaves"]["count"], s["trajectories"]["leaves"]["mean"], s["trajectories"]["leaves"]["max"]) == (10, 1.2, 3)
    text = render_text(s)
    assert "  requests branched: content 5, rewind 1\n  requests refused: history:tools 1\n" in text
    assert "leaves median 1, p90 1, max 3 (n = 10)" in text


def test_rewards_of_dropped_groups_are_over_samples(run):
    journal(run, Role.ROLLOUT, 2, {**ready(7, 0, reward=0.8), "samples": 8}, {"kind": "drop", "group": 7, "reason": "stale"})
    # group 6: two samples with mean 0; group 7: eight with mean 0.8
    assert report(run.path)["dropped_detail"]["stale"]["reward_mean"] == pytest.approx(8 * 0.8 / 10)


def test_groups_are_trained_once_and_a_second_time_is_an_error(run):
    s = report(run.path)
    assert (s["groups_trained"], s["groups_trained_twice"]) == (4, 0)
    assert s["groups"] == {"open": 0, "ready": 1, "taken": 0, "trained": 4, "dropped": 1}
    journal(run, Role.TRAINER, 3, {"kind": "restore", "step": 4}, {"kind": "trained", "groups": [5], "step": 5, "version": 4})
    s = report(run.path)
    assert s["groups_trained_twice"] == 1
    assert s["alarms"][0] == {"level": "error", "text": "1 groups were trained more than once on the lineage of the final weights"}


def test_engines_and_their_balance(run):
    e = report(run.path)["engines"]
    assert [(x["rank"], x["trajectories"], x["sampled_tokens"], x["restarts"]) for x in e["list"]] == [(0, 8, 160, 1), (1, 2, 60, 0)]
    assert e["balance_trajectories"] == pytest.approx(8 / 5)
    assert e["balance_tokens"] == pytest.approx(160 / 110)


def test_alarms_name_what_is_wrong(run):
    write_log(
        run,
        2,
        "trainer",
        0,
        3,
        steps=[step_row(5, 3, staleness_max=7, unaccounted_tokens=12, exact_logprob_diff_mean=0.5, exact_tokens=1000)],
    )
    journal(run, Role.TRAINER, 3, {"kind": "restore", "step": 4}, {"kind": "trained", "groups": [3], "step": 5, "version": 4})
    texts = [a["text"] for a in report(run.path)["alarms"] if a["level"] == "error"]
    assert texts[0] == "12 tokens are not accounted for between buffer and training step"
    assert texts[1] == "staleness reached 7, the limit is 4"
    assert texts[2].startswith("mean |log-probability difference| 0.48 over 1040 exact tokens, expected below 0.001 for fp32")


def test_too_many_dropped_groups_and_a_waiting_side_are_warned_of(run):
    warnings = [a["text"] for a in report(run.path)["alarms"] if a["level"] == "warning"]
    assert "1 of 5 finished groups were dropped (stale: 1)" in warnings
    assert not any("waits for" in w for w in warnings)
    write_log(run, 2, "trainer", 0, 3, steps=[step_row(5, 3, wait_s=200.0, step_s=203.0)])
    journal(run, Role.TRAINER, 3, {"kind": "restore", "step": 4}, {"kind": "trained", "groups": [3], "step": 5, "version": 4})
    assert "the trainer waits for trajectories 95% of the time" in [a["text"] for a in report(run.path)["alarms"]]


def test_a_truncated_and_a_foreign_file_are_named_and_the_rest_is_read(run):
    logs = run.attempt_dir(1) / "logs"
    whole = logs / "rollout-1.e0001.h5"
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    (logs / "rollout-2.e0001.h5").write_bytes(b"")
    (logs / "notes.h5").write_bytes(b"x")
    s = report(run.path)
    assert [u.split(":")[0] for u in s["unreadable"]] == [
        "attempts/0001/logs/notes.h5",
        "attempts/0001/logs/rollout-1.e0001.h5",
        "attempts/0001/logs/rollout-2.e0001.h5",
    ]
    assert s["trajectories"]["status"]["ok"] == 8
    assert any("3 files could not be read" in a["text"] for a in s["alarms"])


def test_a_log_that_is_still_written_is_readable(empty):
    run = empty
    run.new_attempt()
    with h5py.File(run.log_path(1, "trainer", 0, 1), "w", libver="earliest", locking=False) as f:
        f.attrs["started"] = 5.0
        f.create_group("tables").create_dataset(
            "steps", data=np.array([(1.0, 1)], dtype=[("time", "f8"), ("step", "i8")]), maxshape=(None,), chunks=(4,)
        )
        f.flush()
        data = read_run(run.path)
        assert data.unreadable == ()
        assert data.tables["steps"]["step"].tolist() == [1]


def test_a_run_in_which_nothing_happened_has_a_report(empty):
    s = report(empty.path)
    assert (s["steps"], s["attempts"], s["reward"]["first_third"], s["prefix_cache_hit_rate"], s["tokens"]["unaccounted"]) == (
        0,
        0,
        None,
        None,
        None,
    )
    assert "0 of 48 steps" in render_text(s)
    assert "<html" in render_html(s)


def test_a_run_without_a_trained_step_but_with_trajectories_has_a_report(empty):
    run = empty
    run.new_attempt()
    journal(run, Role.ROLLOUT, 1, ready(1, 0))
    write_log(run, 1, "rollout", 0, 1, queue=[queue_row(0, 0, 1), queue_row(3, 0, 0)])
    s = report(run.path)
    assert (s["waits"]["bottleneck"], s["waits"]["rollout_blocked_share"]) == ("unknown", 0.0)
    assert "miles-submit logs" in " ".join(s["next"])
    assert "Queue" in render_html(s)


def test_a_path_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        report(tmp_path)


def test_the_promised_json_keys_are_there_and_the_dict_is_json(run):
    s = json.loads(json.dumps(report(run.path), allow_nan=False))
    for key in (
        "steps",
        "reward.first_third",
        "reward.last_third",
        "logprob_abs_diff.mean",
        "staleness.max",
        "staleness.mean",
        "prefix_cache_hit_rate",
        "step_time.first",
        "step_time.median",
        "tokens.unaccounted",
        "attempts",
        "weights.versions",
        "dropped",
    ):
        value = s
        for part in key.split("."):
            value = value[part]
        assert value is not None, key


def test_the_text_is_one_page_and_says_the_main_figures(run):
    text = render_text(report(run.path))
    assert len(text.splitlines()) < 60
    for part in (
        "4 of 48 steps",
        "gain +0.300",
        "bottleneck: rollout",
        "twice 0",
        "limit 4",
        "90.0% of what could hit",
        "WARNING: 1 of 5 finished groups",
    ):
        assert part in text, part


def test_the_html_is_self_contained_and_holds_every_chart(run):
    page = render_html(report(run.path))
    for title in ("Reward", "Where the trainer", "Staleness of trained", "Staleness of waiting", "Log-probability difference", "Queue", "Weight update", "Timeline"):
        assert f"<h2>{title}" in page
    assert page.count("<svg") == 8
    assert "<script" not in page and "src=" not in page and "@import" not in page


def test_the_package_needs_neither_torch_nor_mpi():
    code = "import sys, miles.report, miles.report.html; print(sorted({'torch', 'mpi4py', 'sglang', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_helpers():
    assert spread(np.array([np.nan])) == {"count": 0}
    assert weighted_mean(np.array([1.0, np.nan]), np.array([0.0, 1.0])) is None
    assert sparkline([0.0, None, 1.0]) == "▁ █"
    assert [size(v) for v in (None, 40, 1500, 2e13)] == ["-", "40 B", "1.5 kB", "20 TB"]
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert len(sparkline(list(range(1000)))) == 60
    joined = concatenate([{"time": np.array([2.0]), "a": np.array([1])}, {"time": np.array([1.0]), "b": np.array(["x"])}])
    assert joined["time"].tolist() == [1.0, 2.0] and joined["b"].tolist() == ["x", ""] and np.isnan(joined["a"][0])


def test_turns_on_shared_gpus_are_shown_and_their_waiting_is_no_alarm(tmp_path):
    run = RunDir.create(load_config("configs/tiny_colocated.toml", (f"run.root={tmp_path}",)))
    run.new_attempt(), run.new_epoch("trainer"), run.new_epoch("rollout")
    journal(run, Role.ROLLOUT, 1, *(ready(g, g - 1) for g in (1, 2, 3)))
    journal(run, Role.TRAINER, 1, *({"kind": "trained", "groups": [s], "step": s, "version": s - 1} for s in (1, 2, 3)))
    write_log(run, 1, "trainer", 0, 1, steps=[step_row(s, 1, wait_s=3.0, turn_s=s / 10, resume_s=0.2, release_s=0.1) for s in (1, 2, 3)])
    write_log(run, 1, "rollout", 0, 1, turns=[{"rank": 0, "version": v, "release_s": 0.5 * v, "away_s": 4.0, "resume_s": 1.0} for v in (1, 2, 3)],
              queue=[queue_row(8, 2, 1) for _ in range(3)])
    s = report(run.path)
    assert s["turns"]["trainer"]["turn_s"]["median"] == pytest.approx(0.2) and s["turns"]["trainer"]["release_s"]["count"] == 3
    assert (s["turns"]["engines"]["release_s"]["median"], s["turns"]["engines"]["away_s"]["max"]) == (1.0, 4.0)
    assert s["waits"]["trainer_time"]["turn"] == pytest.approx((0.2 + 0.3) / 8) and s["waits"]["trainer_wait_share"] == pytest.approx(0.75)
    assert "engines release 1.000 s, are without for 4.000 s" in render_text(s)
    assert not any("waits" in a["text"] or "held back" in a["text"] for a in s["alarms"]) and not any("idles" in line for line in s["next"])


def test_with_disjoint_gpus_there_are_no_turns(run):
    s = report(run.path)
    assert s["turns"] is None and "shared GPUs" not in render_text(s)
