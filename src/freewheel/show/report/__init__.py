"""A report: what runs measured, as one HTML file that needs no network and no other file, or as markdown.

Its sections are sentences and tables (`words.py`); a page and markdown show the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.records.files import write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show import figures as charts
from freewheel.show import replay
from freewheel.show.figures import Figure, graph, page, tools
from freewheel.show.report import words
from freewheel.show.rows import printable
from freewheel.show.shown import SVG_DASHES, Shown, ranked, timed
from freewheel.show.tables import Table, results_table, unlike

MAX_GRAPHS = 6  # with more runs than this their graphs are left out: one would not find them
NOTE = (
    "Coloured or bold: the best of a column. The ideal is of all workers for the whole time. Discrepancy is "
    "the largest distance between two replicas. Staleness is counted in each strategy’s own measure."
)


@dataclass(frozen=True)
class Section:
    """A title, sentences and tables, which a page may fold."""

    title: str
    said: Sequence[str]
    tables: Sequence[Table] = ()
    folded: bool = False


def content(runs: Sequence[Shown]) -> list[Section]:
    """All sections; the first two stand above the figures."""
    theory, compared = words.theory_table(runs)
    several = len(runs) > 1
    happened = [table for table in map(words.events_table, runs) if table.columns[0].cells]
    sections = [
        Section("What you see", words.findings(runs)),
        Section("Figures of all runs", [NOTE], [results_table(runs)]),
        Section("What happened", [], happened, several),
        Section("Workers", [], [words.workers_table(run) for run in runs], several),
        Section("Measured against theory", [theory], [compared] if compared.columns[0].cells else []),
        Section("Settings and records", [], [words.settings_table(runs)], several),
    ]
    return [one for one in sections if one.said or one.tables]


def markdown(results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str) -> str:
    """The report without figures, for a README or an issue."""
    shown = ranked(results, runs)
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", command)), default=0))
    parts = [f"# {plain(title)}", *map(plain, words.lead(shown)), f"{fence}\n{command}\n{fence}"]
    for section in content(shown):
        parts += [f"## {plain(section.title)}", *map(plain, section.said)]
        for one in section.tables:
            parts += [f"### {plain(one.name)}"] if section.folded else []
            parts.append(table(one))
    return "\n\n".join(parts) + "\n"


def table(shown: Table) -> str:
    """A table whose pipes stand below each other; the best figures are bold."""
    columns = []
    for one in shown.columns:
        cells = [f"**{plain(cell)}**" if at in one.best else plain(cell) for at, cell in enumerate(one.cells)]
        width = max(3, len(plain(one.head)), *map(len, cells))
        rule = "-" * width if one.words else "-" * (width - 1) + ":"
        side = str.ljust if one.words else str.rjust
        columns.append([side(cell, width) for cell in (plain(one.head), rule, *cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def plain(said: str) -> str:
    """Text that markdown leaves as it is: on one line, with nothing that means anything to it."""
    said = " ".join(printable(said).split())
    said = re.sub(r"([\\`*\[\]<>|~&])", r"\\\1", said)
    return re.sub(r"(?<!\w)_|_(?!\w)|^(?=[#+-])", lambda found: f"\\{found.group()}", said)


def write(
    path: Path, results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str
) -> None:
    """Write the report of some runs to a file: wholly, or not at all."""
    write_whole(path, html(results, runs, title=title, command=command))


def html(results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str) -> str:
    """The report as one page. `runs` are the records of the results, in the same order, if there are any."""
    shown = ranked(results, runs)
    figures = _figures(shown)
    see, table, *rest = content(shown)
    body = [
        _prose(words.lead(shown)),
        f'<pre class="command"><code>{escape(command)}</code></pre>',
        f'<section class="see">{_section(see)}</section>',
        _replay([run for run in runs if run is not None]),
        _section(table),
        places("Over time and side by side", shown, figures),
        *map(_section, rest),
    ]
    return document(title, "\n".join(body), figures)


def _replay(runs: Sequence[Run]) -> str:
    """A frame that plays the runs, of many the baseline and the fastest; nothing without timelines."""
    chosen = replay.two(runs) if len(runs) > 2 else runs
    try:
        played = replay.html(chosen, replay.title_of(chosen)) if chosen else ""
    except ConfigError:
        return ""
    frame = f'<iframe title="Replay" loading="lazy" srcdoc="{escape(played)}"></iframe>'
    return f"<section><h2>Replay</h2>{frame}</section>" if played else ""


def document(title: str, body: str, figures: dict[str, Figure]) -> str:
    """A page that draws figures into the `places` of its body."""
    # Plotly is imported when a report is made, not with the package: it is large.
    from plotly.offline import get_plotlyjs

    drawn = {name: {key: figure[key] for key in ("data", "layout")} for name, figure in figures.items()}
    return page(__package__, drawn, title, body=body, plotly=get_plotlyjs(), tools=tools())


def _figures(runs: Sequence[Shown]) -> dict[str, Figure]:
    """The dashboard's figures, a graph of each run, and how fast they are; of those that show something."""
    figures = {"speed": charts.speed(runs)} if len(runs) > 1 and not unlike(runs) else {}
    if recorded := timed([run for run in runs if run.records is not None]):
        figures |= charts.figures(recorded)
        del figures["graph"]
        if len(recorded) <= MAX_GRAPHS:
            figures |= {f"graph-{run.place}": graph(run.run, run.label) for run in recorded}
    return {name: figure for name, figure in figures.items() if figure["data"]}


def _prose(said: Sequence[str]) -> str:
    return "".join(f"<p>{escape(one)}</p>" for one in said)


def _section(section: Section) -> str:
    tables = "".join(
        f"<details><summary>{escape(one.name)}</summary>{_table(one)}</details>"
        if section.folded
        else _table(one)
        for one in section.tables
    )
    return f"<h2>{escape(section.title)}</h2>{_prose(section.said)}{tables}"


def _table(table: Table) -> str:
    def cell(tag: str, at: int, text: str, row: int = -1) -> str:
        one = table.columns[at]
        kind = "l" * one.words + " best" * (row in one.best)
        return f'<{tag} class="{kind}">{escape(text)}</{tag}>'

    heads = "".join(cell("th", at, one.head) for at, one in enumerate(table.columns))
    rows = "".join(
        f"<tr>{''.join(cell('td' if at else 'th', at, text, row) for at, text in enumerate(cells))}</tr>"
        for row, cells in enumerate(zip(*(one.cells for one in table.columns), strict=True))
    )
    return f'<div class="scroll" tabindex="0"><table><tr>{heads}</tr>{rows}</table></div>'


def places(title: str, runs: Sequence[Shown], figures: dict[str, Figure]) -> str:
    """The places that figures are drawn into, under one legend for all of them."""
    boxes = "".join(
        f"<figure><figcaption><b>{escape(figure['title'])}</b><span>{escape(figure['said'])}</span></figcaption>"
        f'<div class="plot" id="figure-{name}" style="min-height:{figure["height"]}px"></div></figure>'
        for name, figure in figures.items()
    )
    chips = "".join(
        f'<button type="button" data-run="{run.place}" aria-pressed="true">'
        '<svg width="26" height="8" aria-hidden="true"><line x1="1" y1="4" x2="25" y2="4" stroke-width="3" '
        f'stroke="{run.colour}" stroke-dasharray="{SVG_DASHES[run.style]}"/></svg>'
        f"{escape(run.label)}</button>"
        for run in (runs if len(runs) > 1 else ())
    )
    hint = "Click: hide or show in all figures. Double-click: only this one, or all again."
    return (
        f'<section><h2>{title}</h2><div class="legend" title="{hint}">{chips}</div>'
        f'<div class="figures">{boxes}</div></section>'
        "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>"
    )


def recorded(folder: Path) -> Run | None:
    """The records of a run whose figures are known; None where a full disk has left none."""
    try:
        run = Run(folder)
    except ConfigError:
        return None
    return run if run.about and run.workers else None
