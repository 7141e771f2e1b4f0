"""``freewheel report``: what runs measured, in one file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from freewheel.cli.options import RUNS, option
from freewheel.errors import ConfigError
from freewheel.records.files import check_writable, write_whole
from freewheel.records.find_run import all_runs
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.rates import result_of
from freewheel.show.replay import title_of
from freewheel.show.report import html, markdown

PAGE = Path("report.html")


def report(
    folders: list[Path] = RUNS,
    out: Path | None = option(
        None, "Where to write; default: report.html, and the terminal for markdown.", "--output", "-o"
    ),
    as_markdown: bool = option(False, "Tables and words for a README or an issue, no figures.", "--markdown"),
) -> None:
    """Write one page on what runs measured, or markdown: figures, workers, events, settings, theory."""
    path = out if out is not None or as_markdown else PAGE
    check_writable(path)
    errors = Console(stderr=True)
    with errors.status("reading"):
        results, runs = _read(all_runs(folders))
    with errors.status("drawing"):
        words = {"title": f"Freewheel: {title_of(runs)}", "command": _commands(runs)}
        text = markdown(results, runs, **words) if as_markdown else html(results, runs, **words)
    if path is None:
        sys.stdout.write(text)
        return
    write_whole(path, text)
    print(f"Report: {path.resolve()}")


def _read(folders: Sequence[Path]) -> tuple[list[Result], list[Run]]:
    """The runs that have something to tell; the others are named, or refused where there is only one."""
    results, runs = [], []
    for folder in folders:
        try:
            run = Run(folder)
            results.append(result_of(run))
        except ConfigError as error:
            if len(folders) == 1:
                raise
            _warn(f"left out: {error}")
            continue
        runs.append(run)
        if run.broken:
            lines = "1 damaged line was" if run.broken == 1 else f"{run.broken:,} damaged lines were"
            _warn(f"{str(folder)!r}: {lines} left out.")
    if not runs:
        raise ConfigError("none of these runs can be reported.")
    return results, runs


def _warn(said: str) -> None:
    print(f"freewheel: {said}", file=sys.stderr)


def _commands(runs: Sequence[Run]) -> str:
    """What was typed, once for all runs of one command."""
    said = [run.about.get("command", "") for run in runs]
    lines = [shlex.join(one) if isinstance(one, list) else str(one) for one in said]
    return "\n".join(dict.fromkeys(line for line in lines if line))
