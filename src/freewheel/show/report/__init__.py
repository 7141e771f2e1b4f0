"""A report: what runs measured, as one HTML file that needs no network and no other file, or as markdown.

Its sections are sentences and tables (`words.py`); a page and markdown show the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.numbers import listed, number, share
from freewheel.records.files import write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show import replay
from freewheel.show.figures import charts
from freewheel.show.figures.common import Figure, axis, bars, figure, page, tools
from freewheel.show.figures.graph import graph
from freewheel.show.replay import title_of, two
from freewheel.show.report.words import (
    clock,
    events_table,
    findings,
    records_table,
    scenario_in_words,
    settings_tables,
    still_running,
    theory_table,
    workers_table,
)
from freewheel.show.rows import printable
from freewheel.show.shown import FAINT, SVG_DASHES, Shown, ranked, timed
from freewheel.show.tables import Table, results_table, same_budget, unlike

MAX_GRAPHS = 6
"""With more runs than this their graphs are left out: one would not find them among each other."""


def all_figures(runs: Sequence[Shown]) -> tuple[dict[str, Figure], str]:
    """All figures that have something to show, by name; and what was left out, and why."""
    figures = {"speed": _speed(runs)} if len(runs) > 1 and not unlike(runs) else {}
    recorded = [run for run in runs if run.records is not None]
    figures |= _dashboards(timed(recorded)) if recorded else {}
    drawn = {name: figure for name, figure in figures.items() if figure["data"]}
    untrained = [run.label for run in runs if run.result.loss is None]
    if untrained:
        who = "these runs" if len(untrained) == len(runs) > 1 else listed(untrained)
        return drawn, f"Of {who} no loss was reported, only timing is shown."
    # Where nothing happened, nothing is missing.
    missing = [figures[name]["title"].lower() for name in figures if name not in (*drawn, "faults")]
    return drawn, f"Left out, since there is nothing to draw: {listed(missing)}." if missing else ""


def _dashboards(runs: list[Shown]) -> dict[str, Figure]:
    """The dashboard's figures, those that are about speed or about learning beside each other."""
    figures = charts.figures(runs)
    if len(runs) > 1:
        figures = {"blocked": figures["blocked"]} | figures
    first, happened = figures.pop("graph"), figures.pop("faults")
    for one in runs if len(runs) <= MAX_GRAPHS else ():
        drawn = first if one is runs[0] else graph(one.run, one.label)
        if len(drawn["data"]) > 1:  # else there are workers, and nobody met another
            figures[f"graph-{one.place}"] = drawn | ({"height": 340} if len(one.run.workers) <= 24 else {})
    return figures | {"faults": happened}


def _speed(runs: Sequence[Shown]) -> Figure:
    """Worker-steps per second, the fastest run on top, the ideal behind each."""
    order = sorted(runs, key=lambda run: -run.result.steps_per_s)
    data = []
    for run in order:
        rate, ideal = run.result.steps_per_s, run.result.ideal_share
        at = {"orientation": "h", "y": [escape(run.label)], "textposition": "outside", "cliponaxis": False}
        # The ideal stands behind each bar: runs of different scenarios have different ones.
        behind = {
            "width": 0.84,
            "marker": {"color": FAINT},
            "x": [rate / ideal if ideal else 0.0],
            "text": [""],
        }
        data.append(bars(run, "ideal %{x:,.4~r} steps/s", **at, **behind))
        said = f"%{{x:,.4~r}} steps/s, {share(ideal)} of the ideal"
        data.append(bars(run, said, **at, width=0.62, x=[rate], text=[number(rate)]))
    names = [escape(run.label) for run in order]
    # A fixed range: a run that is hidden leaves its row empty, and the other bars stay as they are.
    yaxis: Figure = {"categoryorder": "array", "categoryarray": names, "range": [len(names) - 0.4, -0.6]}
    # Invisible ticks keep a mark at zero clear of the name beside it.
    yaxis |= {"ticks": "outside", "ticklen": 8, "tickcolor": "rgba(0,0,0,0)", "showgrid": False}
    return figure(
        "Speed against the ideal",
        "The pale bar is the ideal Σ 1/t_i: every worker computes and none waits.",
        90 + 27 * len(order),
        data,
        barmode="overlay",
        xaxis=axis("worker-steps per second"),
        yaxis=yaxis,
        margin={"r": 74},
    )


@dataclass(frozen=True)
class Section:
    """A title, sentences, tables and a note. `kind` says how a page shows it: see `_section`."""

    title: str = ""
    said: Sequence[str] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    kind: str = ""


def content(
    results: Sequence[Result], records: Sequence[Run | None]
) -> tuple[Sequence[Shown], list[Section]]:
    """The runs, and all sections about them; those with nothing in them are left out."""
    if not results:
        raise ConfigError("a report needs at least one result; none was given.")
    runs = ranked(results, records)
    several = len(runs) > 1
    theory, compared = theory_table(runs)
    sections = [
        Section(said=[still_running(runs)], kind="live"),
        Section(said=[scenario_in_words([run.result for run in runs])], kind="lead"),
        Section("What you see", findings(runs), kind="see"),
        Section(
            "Figures of all runs" if several else "Figures of the run",
            tables=[results_table(runs)],
            note=_note(runs),
        ),
        Section("Over time and side by side" if several else "Over time", kind="figures"),
        Section("What happened", tables=[events_table(run) for run in runs], kind="each"),
        Section("Workers", tables=[workers_table(run) for run in runs], kind="each"),
        Section("Measured against theory", [theory], compared),
        Section("Settings", tables=settings_tables(runs), kind="settings"),
        Section("Records", tables=records_table(runs)),
        Section(said=[_versions()], kind="footer"),
    ]
    return runs, [
        one
        for one in sections
        if any(one.said) or any(table.rows for table in one.tables) or one.kind == "figures"
    ]


def _note(runs: Sequence[Shown]) -> str:
    said = [f"Times are {clock(runs)} seconds."]
    if len(runs) > 1 and not unlike(runs):
        said.append("Marked: the best of a column.")
        if not same_budget(runs):
            said.append("The runs made different numbers of steps: what depends on it is not.")
    said.append("Discrepancy is the largest distance between two replicas.")
    return " ".join(
        [*said, "Staleness is counted in each strategy’s own measure, named in its settings below."]
    )


def _versions() -> str:
    said = []
    for package in ("freewheel", "torch", "numpy", "plotly"):
        try:
            said.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # run from its sources
            continue
    return f"Made with {', '.join(said)}."


# -- as markdown --
ROWS = 32
"""A longer table of workers or events is cut: people read this in a browser they scroll in."""


def table(shown: Table) -> str:
    """A table whose pipes stand below each other; the best figures are bold."""
    marked = [
        [f"**{plain(cell)}**" if (place, at) in shown.marks else plain(cell) for at, cell in enumerate(row)]
        for place, row in enumerate(shown.rows)
    ]
    lines = [[plain(head) for head in shown.heads], *marked]
    widths = [max(3, *(len(line[at]) for line in lines)) for at in range(len(shown.heads))]
    sides = [str.ljust if at in shown.left else str.rjust for at in range(len(widths))]
    rule = ["-" * width if at in shown.left else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    padded = [
        [side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)] for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def plain(said: str) -> str:
    """Text that markdown leaves as it is: on one line, with nothing that means anything to it."""
    said = " ".join(printable(said).split())
    said = re.sub(r"([\\`*\[\]<>|~&])", r"\\\1", said)
    return re.sub(r"(?<!\w)_|_(?!\w)|^(?=[#+-])", lambda found: f"\\{found.group()}", said)


# -- as a page --
OPEN = 16
"""A single run's table of so many workers is shown at once; a longer one is folded."""


def document(title: str, body: str, figures: dict[str, Figure]) -> str:
    """A page that draws figures into the `places` of its body."""
    # Plotly is imported when a report is made, not with the package: it is large.
    from plotly.offline import get_plotlyjs

    drawn = {name: {key: figure[key] for key in ("data", "layout")} for name, figure in figures.items()}
    return page(__package__, drawn, title, body=body, plotly=get_plotlyjs(), tools=tools())


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
    return (
        '<svg width="26" height="8" aria-hidden="true"><line x1="1" y1="4" x2="25" y2="4" stroke-width="3" '
        f'stroke="{run.colour}" stroke-dasharray="{SVG_DASHES[run.style]}"/></svg>'
    )


def recorded(folder: Path) -> Run | None:
    """The records of a run whose figures are known; None where a full disk has left none."""
    try:
        run = Run(folder)
    except ConfigError:
        return None
    return run if run.about and run.workers else None


def write(
    path: Path, results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str
) -> None:
    """Write the report of some runs to a file: wholly, or not at all."""
    write_whole(path, html(results, runs, title=title, command=command))


def html(results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str) -> str:
    """The report as one page. `runs` are the records of the results, in the same order, if there are any."""
    shown, sections = content(results, runs)
    figures, omitted = all_figures(shown)
    played = _replay([run for run in runs if run is not None])
    body = []
    for section in sections:
        if section.kind == "see" and command:
            body.append(f'<pre class="command"><code>{escape(command)}</code></pre>')
        if section.kind == "figures":
            body.append(places(section.title, shown, figures, omitted))
        else:
            body.append(_section(section, len(shown) == 1))
        if section.kind == "see" and played:
            frame = f'<iframe title="Replay" loading="lazy" srcdoc="{escape(played)}"></iframe>'
            body.append(f"<section><h2>Replay</h2>{frame}</section>")
    return document(title, "\n".join(body), figures)


def _replay(runs: Sequence[Run]) -> str:
    """The page that plays the runs, of many the baseline and the fastest; nothing without timelines."""
    try:
        chosen = two(runs) if len(runs) > 2 else runs
        return replay.html(chosen, title_of(chosen)) if chosen else ""
    except ConfigError:
        return ""


def markdown(results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str) -> str:
    """The same without figures, for a README or an issue."""
    parts = [f"# {plain(title)}"]
    for section in content(results, runs)[1]:
        if section.kind == "figures":
            continue
        if section.kind == "see" and command:
            fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", command)), default=0))
            parts.append(f"{fence}\n{command}\n{fence}")
        of_each = section.kind in ("each", "settings")
        if section.title and not of_each:
            parts.append(f"## {plain(section.title)}")
        parts += map(plain, section.said)
        for shown in section.tables:
            if of_each and shown.rows:
                parts.append(f"## {plain(section.title)}: {plain(shown.name)}")
            most = ROWS if section.kind == "each" else len(shown.rows)
            parts.append(table(shown.cut(most)) if shown.rows else "")
            if len(shown.rows) > most:
                parts.append(f"… and {len(shown.rows) - most:,} more; the page has all of them.")
        parts.append(plain(section.note))
    return "\n\n".join(filter(None, parts)) + "\n"
