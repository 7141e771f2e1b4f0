"""What a report says, in order: sections of sentences and tables. A page and markdown show the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from freewheel.show.report.tables import (
    events_table,
    records_table,
    settings_tables,
    theory_table,
    workers_table,
)
from freewheel.show.report.words import clock, findings, scenario_in_words, still_running
from freewheel.show.shown import Shown
from freewheel.show.tables import Table, results_table, same_budget, unlike


@dataclass(frozen=True)
class Section:
    """A title, sentences, tables and a note. `kind` says how a page shows it: see `page.py`."""

    title: str = ""
    said: Sequence[str] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    kind: str = ""


def content(runs: Sequence[Shown]) -> list[Section]:
    """All sections; those with nothing in them are left out."""
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
    return [
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
