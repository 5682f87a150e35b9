"""How benchmarks tell what they found (tools/bench/table.py)."""

import json
import os

import pytest

from tools.bench.table import figure, tell

CPUS = os.cpu_count()


def test_a_table_has_the_facts_of_the_run_then_one_row_a_figure_then_its_facts(capsys):
    figures = [
        figure("put + get", "MB/s", 812.345, 1000.0, 1200.0, least=0.8, of_ratio=True, each=[1.5, 2.25], codec="zstd"),
        figure("bytes", "", 3_150_000, 12_600_000, 2_982_386, most=3_200_000),
        figure("simulator", "", 98.0, 100.0, 100.0, within=0.15),
        figure("time", "s", 0.00012345),
    ]
    assert tell("buffer", figures, as_json=False, state_bytes=268_435_456) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"buffer: cpus {CPUS}, state_bytes 268,435,456",
        "figure                                                        value     baseline    ratio        limit     target",
        "put + get [MB/s]                                              812.3        1,000   0.8123        1,200     >= 0.8 (ratio)",
        "    each 1.5 2.25, codec zstd",
        "bytes                                                     3,150,000   12,600,000     0.25    2,982,386 <= 3,200,000",
        "simulator                                                        98          100     0.98          100    +- 0.15 (ratio)",
        "time [s]                                                  0.0001234",
    ]


def test_a_missed_target_is_said_in_its_row_and_by_the_exit_status(capsys):
    figures = [figure("slow", "ms", 2.5, most=2.0), figure("quick", "ms", 1.5, most=2.0)]
    assert tell("session", figures, as_json=False) == 1
    assert [line.endswith("MISSED") for line in capsys.readouterr().out.splitlines()[2:]] == [True, False]


def test_json_has_the_facts_of_the_run_beside_its_figures_and_the_same_exit_status(capsys):
    figures = [figure("put + get", "MB/s", 60.0, 80.0, 80.0, least=0.8, of_ratio=True, fsyncs=3), figure("time", "s", 2.0)]
    assert tell("buffer", figures, as_json=True, threads=2) == 1
    assert json.loads(capsys.readouterr().out) == {"bench": "buffer", "cpus": CPUS, "threads": 2, "figures": [
        {"figure": "put + get", "unit": "MB/s", "value": 60.0, "baseline": 80.0, "ratio": 0.75, "limit": 80.0, "target": 0.8, "target_is": "least",
         "target_of": "ratio", "ok": False, "facts": {"fsyncs": 3}},
        {"figure": "time", "unit": "s", "value": 2.0, "baseline": None, "ratio": None, "limit": None, "target": None, "target_is": None,
         "target_of": None, "ok": True, "facts": {}},
    ]}


@pytest.mark.parametrize(("value", "target", "ok"), [
    (5.0, {"least": 5.0}, True), (4.9, {"least": 5.0}, False), (5.0, {"most": 5.0}, True), (5.1, {"most": 5.0}, False),
    (8.0, {"least": 0.8, "of_ratio": True}, True), (7.9, {"least": 0.8, "of_ratio": True}, False),
    (8.0, {"most": 0.8, "of_ratio": True}, True), (8.1, {"most": 0.8, "of_ratio": True}, False),
    (8.6, {"within": 0.15}, True), (8.4, {"within": 0.15}, False), (11.4, {"within": 0.15}, True), (11.6, {"within": 0.15}, False),
    (1e9, {}, True),
])
def test_a_target_is_met_at_its_bound_and_missed_beyond(value, target, ok):
    assert figure("f", "", value, 10.0, **target)["ok"] is ok


def test_what_could_not_be_measured_misses_its_target(capsys):
    figures = [figure("metadata calls", "", None, 1, 1, most=6, missing="strace is not installed")]
    assert tell("buffer", figures, as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "metadata calls                                                                 1                     1       <= 6 MISSED",
        "    missing strace is not installed",
    ]
