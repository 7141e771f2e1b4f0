"""A report: what runs measured, as one HTML file that needs no network and no other file, or as markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.records.files import write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show import replay
from freewheel.show.replay import title_of, two
from freewheel.show.report.content import content
from freewheel.show.report.markdown import text
from freewheel.show.report.page import page
from freewheel.show.shown import Shown, ranked

__all__ = ["html", "markdown", "recorded", "write"]


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
    shown = _shown(results, runs)
    return page(shown, content(shown), title, command, _replay([run for run in runs if run is not None]))


def _replay(runs: Sequence[Run]) -> str:
    """The page that plays the runs, of many the baseline and the fastest; nothing without timelines."""
    try:
        chosen = two(runs) if len(runs) > 2 else runs
        return replay.html(chosen, title_of(chosen)) if chosen else ""
    except ConfigError:
        return ""


def markdown(results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str) -> str:
    """The same without figures, for a README or an issue."""
    return text(content(_shown(results, runs)), title, command)


def _shown(results: Sequence[Result], runs: Sequence[Run | None]) -> list[Shown]:
    if not results:
        raise ConfigError("a report needs at least one result; none was given.")
    return ranked(results, runs)
