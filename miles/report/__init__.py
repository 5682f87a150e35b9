"""Reading logs: tables, figures, alarms, timeline, one page of text or HTML.

    read.py      RUN -> RunData: log tables of all attempts, journal lineage, what could not be read
    rows.py      which rows count; small arithmetic
    summary.py   RunData -> dict: every figure, pure
    alarms.py    dict -> what must not be overlooked, next commands
    text.py, charts.py, html.py   dict -> a page

Owns every figure that is said about a run. Must not import torch or MPI; runs on a laptop on a copied run directory.
"""

from pathlib import Path
from typing import Any

from miles.report.read import RunData, read_run
from miles.report.summary import summarize
from miles.report.text import render_text

__all__ = ["RunData", "read_run", "render_html", "render_text", "report", "summarize"]


def report(path: str | Path) -> dict[str, Any]:
    """Every figure of a run, ready for JSON; `render_text` and `render_html` turn it into a page. Raises ConfigError for a path that is
    no run."""
    return summarize(read_run(path))


def render_html(summary: dict[str, Any]) -> str:
    """The dict of `report` as one self-contained HTML page."""
    from miles.report.html import render_html  # matplotlib takes a second to import; JSON and text do not need it

    return render_html(summary)
