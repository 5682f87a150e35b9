"""Live display of a run: a progress bar and the last steps on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles.cluster.progress import Progress, outcome, progress
from miles.rundir import RunDir

POLL_S = 1.0
COLUMNS = {  # heading -> (column of the steps table, format)
    "step": ("step", "d"), "reward": ("reward_mean", ".3f"), "loss": ("loss", ".4f"), "grad": ("grad_norm", ".3f"), "stale": ("staleness_max", "d"),
    "logprob diff": ("logprob_diff_mean", ".1e"), "wait s": ("wait_s", ".1f"), "step s": ("step_s", ".1f"),
}


def follow(run: RunDir, console: Console, alive: Callable[[], bool] | None = None) -> int:
    """Show the run until nothing works on it any more. Returns 0 when it finished, else the exit code of its last attempt.

    `alive` overrides what the files say, for a caller that holds the job or process itself.
    """
    now = show_while(run, console, alive)
    if now.finished:
        console.print(f"finished: {now.step} steps, {len(now.attempts)} attempt{'s' * (len(now.attempts) > 1)}, {now.run}", soft_wrap=True)
        return 0
    last = now.attempts[-1] if now.attempts else {}
    console.print(f"not finished: {last.get('text') or now.job_reason or 'the job left no cause'}\n  logs: miles-submit logs {now.run}\n"
                  f"  go on: miles-submit resume {now.run}", soft_wrap=True)
    return outcome(run)


def show_while(run: RunDir, console: Console, alive: Callable[[], bool] | None = None) -> Progress:
    """Show the run until `alive` says no; returns how it stood then."""
    show = _Live(console) if console.is_terminal else _Lines(console)
    with show:
        while True:
            still = alive() if alive else None  # asked before the files are read: what ended meanwhile is in them
            now = progress(run)
            show.update(now)
            if not (now.alive if still is None else still):
                return now
            time.sleep(POLL_S)


def cells(row: dict) -> list[str]:
    return [format(int(row[c]) if f == "d" else row[c], f) if c in row else "-" for c, f in COLUMNS.values()]


def headline(p: Progress) -> str:
    where = f"job {p.job_id} {p.job_state or 'unknown'}" + (f" ({p.job_reason})" if p.job_reason not in (None, "", "None") else "") if p.job_id else "local"
    return f"{p.run}  {where}  attempt {len(p.attempts)}"


class _Live:
    def __init__(self, console: Console):
        self.live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self):
        self.live.__enter__()

    def __exit__(self, *error):
        self.live.__exit__(*error)

    def update(self, p: Progress) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in p.rows[-8:]:
            table.add_row(*cells(row))
        recent = [r["step_s"] for r in p.rows[-8:] if "step_s" in r]
        left = f"  about {(p.steps - p.step) * sum(recent) / len(recent) / 60:.0f} min left" if recent and p.step < p.steps else ""
        self.live.update(Group(Text(headline(p)), ProgressBar(total=p.steps, completed=p.step, width=60), Text(f"step {p.step} of {p.steps}{left}"), table))


class _Lines:
    """For pipes and job logs: says each thing once."""

    def __init__(self, console: Console):
        self.console, self.headline, self.shown = console, "", 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def update(self, p: Progress) -> None:
        if headline(p) != self.headline:
            self.headline = headline(p)
            self.console.print(self.headline, soft_wrap=True, highlight=False)
        for row in p.rows:
            if row["step"] > self.shown:
                self.shown = row["step"]
                self.console.print("  ".join(f"{n} {v}" for n, v in zip(COLUMNS, cells(row))) + f"  of {p.steps}", soft_wrap=True, highlight=False)
