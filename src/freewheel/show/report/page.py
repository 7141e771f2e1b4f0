"""The report as a page: one HTML file that asks for nothing from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources

from freewheel.show.report.figures import all_figures, figure_box, legend, swatch
from freewheel.show.report.runs import Shown, same_budget, unlike
from freewheel.show.report.tables import (
    Table,
    events_table,
    records_table,
    results_table,
    settings_tables,
    theory_table,
    versions,
    workers_table,
)
from freewheel.show.report.words import clock, findings, scenario_in_words, still_running

OPEN = 16
"""A single run's table of so many workers is shown at once; a longer one is folded."""


def page(runs: Sequence[Shown], title: str, command: str) -> str:
    """What was run, figures, who did what, and how it compares with theory."""
    # Plotly is imported when a report is made, not with the package: it is large.
    from plotly.offline import get_plotlyjs

    results = [run.result for run in runs]
    figures, omitted = all_figures(runs)
    drawn = {name: {key: figure[key] for key in ("data", "layout")} for name, figure in figures.items()}
    # Inside a script the browser escapes nothing, so no "<" may stand there.
    data = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    live, records = still_running(runs), records_table(runs)
    said, compared = theory_table(runs)
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="live">{_prose(live)}</p>' if live else "",
        f'<p class="lead">{_prose(scenario_in_words(results))}</p>',
        f'<pre class="command"><code>{escape(command)}</code></pre>' if command else "",
        f'<section class="see"><h2>What you see</h2>{"".join(map(_paragraph, findings(runs)))}</section>',
        "<h2>Figures of all runs</h2>" if len(runs) > 1 else "<h2>Figures of the run</h2>",
        _html(results_table(runs)),
        f'<p class="note">{_prose(_note(runs))}</p>',
        f"<section><h2>{'Over time and side by side' if len(runs) > 1 else 'Over time'}</h2>",
        f'<p class="note">{_prose(omitted)}</p>' if omitted else "",
        legend(runs) if len(runs) > 1 else "",
        f'<div class="figures">{"".join(figure_box(*item) for item in figures.items())}</div></section>',
        "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>",
        *_folded("What happened", [t for run in runs if (t := events_table(run))], len(runs) == 1),
        *_folded("Workers", [t for run in runs if (t := workers_table(run)).rows], len(runs) == 1),
        "<h2>Measured against theory</h2>",
        _paragraph(said),
        _html(compared) if compared else "",
        "<h2>Settings</h2>",
        *(_details(table, "settings", len(runs) == 1) for table in settings_tables(runs)),
        f"<h2>Records</h2>{_html(records)}" if records else "",
        f'<footer class="note">{escape(versions())}</footer>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # The page asks for nothing from anywhere, and the browser holds it to that.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
        "form-action 'none'; base-uri 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_part('page.css')}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + f'\n</main>\n<script type="application/json" id="figure-data">{data}</script>\n'
        f"<script>{_part('page.js')}</script>\n</body>\n</html>\n"
    )


def _prose(said: str) -> str:
    """Words in which no line begins with a lonely per cent sign."""
    return escape(said).replace(" %", "&nbsp;%")


def _paragraph(said: str) -> str:
    return f"<p>{_prose(said)}</p>"


def _note(runs: Sequence[Shown]) -> str:
    said = f"Times are {clock([run.result for run in runs])} seconds. "
    if len(runs) > 1 and not unlike(runs):
        said += "Marked: the best of a column. "
        said += (
            ""
            if same_budget(runs)
            else "The runs made different numbers of steps: what depends on it is not. "
        )
    said += "Discrepancy is the largest distance between two replicas. "
    return said + "Staleness is counted in each strategy’s own measure, named in its settings below."


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# -- tables --


def _html(table: Table, kind: str = "") -> str:
    heads = "".join(f"<th{_side(table, at)}>{escape(head)}</th>" for at, head in enumerate(table.heads))
    rows = "".join(f"<tr>{_row(table, place)}</tr>" for place in range(len(table.rows)))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.name)}">'
        f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _row(table: Table, place: int) -> str:
    first, *rest = table.rows[place]
    look = swatch(table.whose[place]) if table.whose else ""
    cells = [f'<th scope="row"{_side(table, 0)}>{look}{escape(first)}</th>']
    for at, text in enumerate(rest, start=1):
        cells.append(f"<td{_side(table, at, _mark(table, place, at, text))}>{escape(text)}</td>")
    return "".join(cells)


def _mark(table: Table, place: int, at: int, text: str) -> str:
    if (place, at) in table.marks:
        return "best"
    return {"✓ yes": "yes", "✗ no": "no"}.get(text, "")


def _side(table: Table, at: int, mark: str = "") -> str:
    kinds = " ".join(kind for kind in ("l" if at in table.left else "", mark) if kind)
    return f' class="{kinds}"' if kinds else ""


def _folded(title: str, tables: Sequence[Table], alone: bool) -> list[str]:
    """A section with a table for each run: shown at once where there is one run and it is short."""
    if not tables:
        return []
    if alone and len(tables[0].rows) <= OPEN:
        return [f"<h2>{title}</h2>", _html(tables[0])]
    return [f"<h2>{title}</h2>", *map(_details, tables)]


def _details(table: Table, kind: str = "", shown: bool = False) -> str:
    body = f"<summary>{escape(table.name)}</summary>{_html(table, kind)}"
    return f"<details{' open' if shown else ''}>{body}</details>"
