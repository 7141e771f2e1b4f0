"""The report as a page: one HTML file that asks for nothing from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

from freewheel.show.figures.common import Figure, tools
from freewheel.show.figures.palette import SVG_DASHES
from freewheel.show.report.content import Section
from freewheel.show.report.figures import all_figures
from freewheel.show.shown import Shown
from freewheel.show.tables import Table

OPEN = 16
"""A single run's table of so many workers is shown at once; a longer one is folded."""


def page(
    runs: Sequence[Shown], sections: Sequence[Section], title: str, command: str, replay: str = ""
) -> str:
    """The sections as HTML, with the figures that a page can draw, and a page that plays the runs."""
    figures, omitted = all_figures(runs)
    body = []
    for section in sections:
        if section.kind == "see" and command:
            body.append(f'<pre class="command"><code>{escape(command)}</code></pre>')
        if section.kind == "figures":
            body.append(places(section.title, runs, figures, omitted))
        else:
            body.append(_section(section, len(runs) == 1))
        if section.kind == "see" and replay:
            page = f'<iframe title="Replay" loading="lazy" srcdoc="{escape(replay)}"></iframe>'
            body.append(f"<section><h2>Replay</h2>{page}</section>")
    return document(title, "\n".join(body), figures)


def document(title: str, body: str, figures: dict[str, Figure]) -> str:
    """A page that draws figures into the `places` of its body."""
    # Plotly is imported when a report is made, not with the package: it is large.
    from plotly.offline import get_plotlyjs

    drawn = {name: {key: figure[key] for key in ("data", "layout")} for name, figure in figures.items()}
    parts = {
        "title": escape(title),
        "css": _part("page.css"),
        "plotly": get_plotlyjs(),
        "body": body,
        # Inside a script the browser escapes nothing, so no "<" may stand there.
        "data": json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": tools() + _part("page.js"),
    }
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _prose(said: str, kind: str = "") -> str:
    """A paragraph in which no line begins with a lonely per cent sign."""
    words = escape(said).replace(" %", "&nbsp;%")
    return f'<p class="{kind}">{words}</p>' if kind else f"<p>{words}</p>"


def _section(section: Section, alone: bool) -> str:
    """live, lead, footer: a paragraph of its kind; see: a box; each, settings: tables that may be folded."""
    if section.kind in ("live", "lead"):
        return _prose(section.said[0], section.kind)
    if section.kind == "footer":
        return f'<footer class="note">{escape(section.said[0])}</footer>'
    tables = [table for table in section.tables if table.rows]
    folded = section.kind == "settings" or (
        section.kind == "each" and not (alone and len(tables[0].rows) <= OPEN)
    )
    shown = [
        _folded(table, section.kind == "settings", alone) if folded else _table(table) for table in tables
    ]
    note = _prose(section.note, "note") if section.note else ""
    inside = "".join([f"<h2>{escape(section.title)}</h2>", *map(_prose, section.said), *shown, note])
    return f'<section class="see">{inside}</section>' if section.kind == "see" else inside


def _folded(table: Table, settings: bool, alone: bool) -> str:
    body = f"<summary>{escape(table.name)}</summary>{_table(table, 'settings' if settings else '')}"
    return f"<details{' open' if settings and alone else ''}>{body}</details>"


def _table(table: Table, kind: str = "") -> str:
    def look(at: int, mark: str = "") -> str:
        kinds = " ".join(filter(None, ("l" if at in table.left else "", mark)))
        return f' class="{kinds}"' if kinds else ""

    def row(place: int, first: str, *rest: str) -> str:
        colour = _swatch(table.whose[place]) if table.whose else ""
        cells = [f'<th scope="row"{look(0)}>{colour}{escape(first)}</th>']
        for at, text in enumerate(rest, start=1):
            holds = {"✓ yes": "yes", "✗ no": "no"}.get(text, "")
            mark = "best" if (place, at) in table.marks else holds
            cells.append(f"<td{look(at, mark)}>{escape(text)}</td>")
        return f"<tr>{''.join(cells)}</tr>"

    heads = "".join(f"<th{look(at)}>{escape(head)}</th>" for at, head in enumerate(table.heads))
    rows = "".join(row(place, *cells) for place, cells in enumerate(table.rows))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.name)}">'
        f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def places(title: str, runs: Sequence[Shown], figures: dict[str, Figure], omitted: str = "") -> str:
    """The places that figures are drawn into, under one legend for all of them."""
    boxes = "".join(
        f"<figure><figcaption><b>{escape(figure['title'])}</b><span>{escape(figure['said'])}</span></figcaption>"
        f'<div class="plot" id="figure-{name}" style="min-height:{figure["height"]}px"></div></figure>'
        for name, figure in figures.items()
    )
    chips = "".join(
        f'<button type="button" data-run="{run.place}" aria-pressed="true">'
        f"{_swatch(run)}{escape(run.label)}</button>"
        for run in runs
    )
    hint = "Click: hide or show in all figures. Double-click: only this one, or all again."
    legend = f'<div class="legend" title="{hint}">{chips}</div>{_prose(hint, "note")}'
    return (
        f"<section><h2>{title}</h2>{_prose(omitted, 'note') if omitted else ''}"
        f'{legend if len(runs) > 1 else ""}<div class="figures">{boxes}</div></section>'
        "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>"
    )


def _swatch(run: Shown) -> str:
    """A short line in a run's colour and dash."""
    return (
        '<svg width="26" height="8" aria-hidden="true"><line x1="1" y1="4" x2="25" y2="4" stroke-width="3" '
        f'stroke="{run.colour}" stroke-dasharray="{SVG_DASHES[run.style]}"/></svg>'
    )
