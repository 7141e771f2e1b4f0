"""What simulate, train and compare do with their results: a table, and files where those were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console

from freewheel.cli.options import command_line, option
from freewheel.records.files import write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.report import write
from freewheel.show.tables import results_tables
from freewheel.show.versus import versus

Json = Annotated[Path | None, option("--json", meaning="Write the figures here.", rare=True)]
Report = Annotated[Path | None, option(meaning="Write an HTML report here.")]
Force = Annotated[bool, option("--force", meaning="Overwrite records in --folder.", rare=True)]


def show(console: Console, results: Sequence[Result]) -> None:
    """Print the tables."""
    for table in results_tables(results, console.width):
        console.print(table, highlight=False)


def save(
    console: Console,
    results: Sequence[Result],
    runs: Sequence[Run | None],
    *,
    json_path: Path | None,
    report: Path | None,
    title: str,
) -> None:
    """Write the figures and a report; `runs` are the records of the results."""
    if json_path is not None:
        beside = versus(results)
        rows = beside.as_json() if beside is not None else [{}] * len(results)
        found = [{**result.as_json(), **row} for result, row in zip(results, rows, strict=True)]
        write_whole(json_path, json.dumps(found, indent=2) + "\n")
    if report is not None:
        write(report, results, runs, title=f"Freewheel: {title}", command=command_line())
        console.print(f"Report: {report.resolve()}", highlight=False, soft_wrap=True)
