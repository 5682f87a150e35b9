"""One self-contained HTML file: the text report's figures, charts embedded as SVG, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from miles.report.charts import charts
from miles.report.text import render_text

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}
h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
pre{font-size:12.5px;line-height:1.4;overflow-x:auto;background:#f6f6f4;padding:1rem}
.cards{display:flex;flex-wrap:wrap;gap:.7rem}
.card{border:1px solid #ddd;border-radius:6px;padding:.5rem .9rem;min-width:8.5rem}
.card b{display:block;font-size:1.25rem}
.error{border-left:4px solid #9e2a2b}
.warning{border-left:4px solid #e09f3e}
.note{border-left:4px solid #8fb8de}
.alarm{padding:.35rem .8rem;margin:.3rem 0;background:#f6f6f4}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(500px,1fr));gap:0 1.2rem}
svg{max-width:100%;height:auto}"""


def render_html(s: dict[str, Any]) -> str:
    """The dict of `miles.report.report` as one HTML page."""
    cards = "".join(f"<div class=card><b>{escape(value)}</b>{escape(name)}</div>" for name, value in _cards(s))
    alarms = (
        "".join(f"<div class='alarm {a['level']}'>{escape(a['level'])}: {escape(a['text'])}</div>" for a in s["alarms"])
        or "<div class='alarm note'>no alarm</div>"
    )
    pictures = "".join(f"<figure style='margin:0'><h2>{escape(title)}</h2>{svg}</figure>" for title, svg in charts(s).items())
    title = escape(f"{s['run']['name']}: {s['steps']} of {s['steps_planned']} steps")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><div class=cards>{cards}</div><h2>Alarms</h2>{alarms}<div class=charts>{pictures}</div>"
        f"<h2>All figures</h2><pre>{escape(render_text(s))}</pre></html>\n"
    )


def _cards(s: dict[str, Any]) -> list[tuple[str, str]]:
    def show(value, form):
        return "-" if value is None else f"{value:{form}}"

    r, wait = s["reward"], s["waits"]
    return [
        ("reward, first third", show(r["first_third"], ".3f")),
        ("reward, last third", show(r["last_third"], ".3f")),
        ("mean |logprob difference|", show(s["logprob_abs_diff"]["mean"], ".1e")),
        ("staleness, mean / max", f"{show(s['staleness']['mean'], '.2f')} / {show(s['staleness']['max'], 'd')}"),
        ("prefix-cache hit rate", show(s["prefix_cache_hit_rate"], ".1%")),
        ("median step, s", show(s["step_time"]["median"], ".1f")),
        ("bottleneck", wait["bottleneck"]),
        ("tokens unaccounted", show(s["tokens"]["unaccounted"], "d")),
    ]
