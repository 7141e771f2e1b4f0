"""``freewheel report``, ``replay`` and ``dashboard``: pages on runs, written once or served live."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from freewheel.cli.options import RUNS, argument, option
from freewheel.errors import ConfigError
from freewheel.records.files import check_writable, write_whole
from freewheel.records.find_run import all_runs
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show import replay as replays
from freewheel.show import report as reports
from freewheel.show.dashboard import Board, Dashboard
from freewheel.show.dashboard.server import PORT
from freewheel.show.rates import result_of

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
        words = {"title": f"Freewheel: {replays.title_of(runs)}", "command": _commands(runs)}
        made = reports.markdown if as_markdown else reports.html
        text = made(results, runs, **words)
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


def replay(
    folders: list[Path] = RUNS,
    out: Path = option(Path("replay.html"), "Where to write.", "--output", "-o"),
    perfetto: Path | None = option(None, "Instead of a page, write a trace for ui.perfetto.dev here."),
) -> None:
    """Write a page that plays runs: who computes, who waits, who meets whom, and what they have learned."""
    out = perfetto or out
    check_writable(out)
    runs = [Run(one) for one in all_runs(folders)]
    if perfetto is not None:
        write_whole(out, replays.as_perfetto(runs))
        print(f"Trace, open it at ui.perfetto.dev: {out.resolve()}")
        return
    if len(folders) == 1 and len(runs) > 2:
        runs = replays.two(runs)
    if len(runs) > replays.MOST:
        raise ConfigError(f"a replay shows at most {replays.MOST} runs, not {len(runs)}; name some of them.")
    write_whole(out, replays.html(runs, replays.title_of(runs)))
    print(f"Replay: {out.resolve()}")


def dashboard(
    folder: Path = argument(
        Path("runs"),
        "The folder of a run, or one with runs in it; default: runs.",
        metavar="[RUN]",
        show_default=False,
    ),
    port: int | None = option(None, f"Which port; default: {PORT}, or a free one.", show_default=False),
    browser: bool = option(True, "Open the page in a browser."),
) -> None:
    """Show runs on a page of this machine, live or ended, and compare them; Ctrl-C ends it."""
    server = Dashboard(Board(folder), port)
    try:
        print(f"{folder} is shown at {server.address}\nCtrl-C ends this, and no run.", flush=True)
        # What is shown first is read while the browser starts.
        threading.Thread(target=server.board.answer, daemon=True).start()
        if browser and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(0)  # that is how it ends; taking torch apart would take longer than people wait
