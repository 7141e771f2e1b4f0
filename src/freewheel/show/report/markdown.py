"""The report as markdown, for a README or an issue: tables and words, no HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from freewheel.show.report.runs import Shown
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
from freewheel.show.report.words import findings, scenario_in_words, still_running
from freewheel.show.terminal import printable

ROWS = 32
"""A longer table of workers or events is cut: people read this in a browser they scroll in."""


def text(runs: Sequence[Shown], title: str, command: str) -> str:
    """The whole report, ending with a newline."""
    return "\n\n".join(part for part in _parts(runs, title, command) if part) + "\n"


def _parts(runs: Sequence[Shown], title: str, command: str) -> Iterator[str]:
    yield f"# {plain(title)}"
    yield plain(still_running(runs))
    yield plain(scenario_in_words([run.result for run in runs]))
    if command:
        fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", command)), default=0))
        yield f"{fence}\n{command}\n{fence}"
    yield from map(plain, findings(runs))
    yield table(results_table(runs))
    for run in runs:
        yield from _section(f"What happened: {run.label}", events_table(run))
    for run in runs:
        yield from _section(f"Workers: {run.label}", workers_table(run))
    said, compared = theory_table(runs)
    yield "## Measured against theory"
    yield plain(said)
    if compared:
        yield table(compared)
    for settings in settings_tables(runs):
        yield from _section(f"Settings: {settings.name}", settings, len(settings.rows))
    yield from _section("Records", records_table(runs))
    yield plain(versions())


def _section(title: str, shown: Table | None, most: int = ROWS) -> Iterator[str]:
    if shown is None or not shown.rows:
        return
    yield f"## {plain(title)}"
    cut = Table(shown.name, shown.heads, shown.rows[:most], shown.left)
    yield table(cut.without_empty())
    if len(shown.rows) > most:
        yield f"… and {len(shown.rows) - most:,} more; the page has all of them."


def table(shown: Table) -> str:
    """A table whose pipes stand below each other; the best figures are bold."""
    marked = [
        [f"**{plain(cell)}**" if (place, at) in shown.marks else plain(cell) for at, cell in enumerate(row)]
        for place, row in enumerate(shown.rows)
    ]
    lines = [[plain(head) for head in shown.heads], *marked]
    widths = [max(3, *(len(line[at]) for line in lines)) for at in range(len(shown.heads))]
    rule = ["-" * width if at in shown.left else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    padded = [
        [
            cell.ljust(width) if at in shown.left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def plain(said: str) -> str:
    """Text that markdown leaves as it is: on one line, with nothing that means anything to it."""
    said = " ".join(printable(said).split())
    said = re.sub(r"([\\`*\[\]<>|~&])", r"\\\1", said)
    return re.sub(r"(?<!\w)_|_(?!\w)|^(?=[#+-])", lambda found: f"\\{found.group()}", said)
