"""The command-line tools over miles.report."""

import subprocess
import sys


def tool(name, *args):
    return subprocess.run([sys.executable, f"tools/{name}", *map(str, args)], capture_output=True, text=True, check=False)


def test_dump_logs_lists_tables_and_prints_csv(run):
    listing = tool("dump_logs", run.path).stdout
    assert "steps: 5 rows: time, step, version" in listing
    assert tool("dump_logs", run.path, "steps", "step", "file_epoch").stdout.splitlines() == [
        "step,file_epoch",
        "1,1",
        "2,1",
        "3,1",
        "3,2",
        "4,2",
    ]


def test_dump_logs_names_the_valid_tables(run):
    result = tool("dump_logs", run.path, "step")
    assert result.returncode == 2
    assert "one of engine, mismatches, queue, steps, trajectories, truth, weights" in result.stderr


def test_plot_run_writes_a_file_per_chart(run, tmp_path):
    names = [line.rsplit("/", 1)[1] for line in tool("plot_run", run.path, tmp_path / "charts").stdout.splitlines()]
    assert "reward.svg" in names and len(names) == 8
    assert (tmp_path / "charts" / "reward.svg").read_text().startswith("<svg")
