"""A report: one HTML file that shows what runs measured. It needs no network and no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.observe.files import write_whole
from freewheel.observe.report.figures import all_figures, figure_box, legend
from freewheel.observe.report.runs import named_runs
from freewheel.observe.report.tables import results_table, settings_tables, theory_table, versions
from freewheel.observe.report.words import clock, findings, scenario_in_words
from freewheel.observe.result import Result

__all__ = ["html", "write"]


def write(path: Path, results: Sequence[Result], *, title: str, command: str) -> None:
    """Write the report of some runs to a file: wholly, or not at all."""
    write_whole(path, html(results, title=title, command=command))


def html(results: Sequence[Result], *, title: str, command: str) -> str:
    """The report as one page: what was run, figures, and how they compare with theory."""
    if not results:
        raise ConfigError("a report needs at least one result; none was given.")
    # Plotly is imported when a report is made, not with the package: it is large.
    from plotly.offline import get_plotlyjs

    runs = named_runs(results)
    figures, omitted = all_figures(runs)
    # Inside a script the browser escapes nothing, so no "<" may stand there.
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(scenario_in_words(results))}</p>',
        f'<pre class="command"><code>{escape(command)}</code></pre>',
        f'<section class="see"><h2>What you see</h2><p>{escape(findings(runs))}</p></section>',
        "<h2>Figures of all runs</h2>",
        results_table(runs),
        f'<p class="note">Times are {clock(results)} seconds. Marked: the best of a column. Discrepancy is '
        "the largest distance between two replicas. Staleness is counted in each strategy’s own measure, "
        "named in its settings below.</p>",
        "<section><h2>Over time and side by side</h2>",
        f'<p class="note">{escape(omitted)}</p>' if omitted else "",
        legend(runs),
        f'<div class="figures">{"".join(figure_box(*item) for item in figures.items())}</div></section>',
        "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>",
        "<h2>Measured against theory</h2>",
        theory_table(runs),
        "<h2>Settings</h2>",
        settings_tables(runs),
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


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
