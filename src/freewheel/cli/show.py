"""``freewheel watch``, ``dashboard``, ``report`` and ``replay``: runs in the terminal and on pages."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from freewheel.cli.options import RUNS, argument, option
from freewheel.cli.results import output
from freewheel.errors import ConfigError, at_least
from freewheel.records.files import check_writable, write_whole
from freewheel.records.result import Result
from freewheel.records.run import STARTING_S, Choice, Run, all_runs, find_run, written_s
from freewheel.show import replay as replays
from freewheel.show import report as reports
from freewheel.show.dashboard import PORT, Dashboard
from freewheel.show.dashboard.board import Board
from freewheel.show.rates import result_of
from freewheel.show.terminal import event_line, plain_line, screen

REFRESH_S = 0.5
PLAIN_S = 1.0
PATIENCE_S = 10.0
"""A run without a living worker is over after so long: until then one may be started again."""
STALLED_S = 60.0
"""Nor does a run go on in which nobody has written for so long."""


def watch(
    folder: Path | None = argument(
        None,
        "The folder of a run, or of several; default: the newest in runs.",
        metavar="[RUN]",
        show_default=False,
    ),
    once: bool = option(False, "Print how it stands now, and end.", "--once"),
    wait_s: float = option(300.0, "How long to wait for a run that is starting."),
) -> None:
    """Watch a run: who trains, how fast, how far apart they are, and what happens to them."""
    at_least("wait-s", wait_s, 0)
    # Leave the terminal as it was.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _watch(folder or Path("runs"), once, wait_s)
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)  # taking torch apart lasts longer than Ctrl-C may
    except BrokenPipeError:  # whoever read our output has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(folder: Path, once: bool, wait_s: float) -> None:
    console = output()
    run, note = _begun(folder, 0.0 if once else wait_s, lambda text: console.print(Text(text, style="dim")))
    real = console.is_terminal and not console.is_dumb_terminal

    def leave() -> None:
        # rich takes every dumb terminal for one of 80 columns; a file is as wide as somebody says.
        width = console.width if real else shutil.get_terminal_size((console.width, 24)).columns
        for line in screen(run, width, note=note, ascii_only=console.options.ascii_only):
            console.print(line, soft_wrap=True)

    try:
        if once or _over(run):
            pass
        elif real:
            _show(console, run, note)
        else:
            _tell(run, note)
    except KeyboardInterrupt:
        leave()
        raise
    leave()
    if _gone(run):
        raise ConfigError(
            f"{str(run.folder)!r} is gone: it was deleted or renamed. This is how it stood last."
        )
    if _over(run) and any(run.state(rank) not in ("finished", "dead") for rank in run.ranks):
        print(f"Nobody has written for {run.quiet_s:,.0f} s: the run was killed, or it hangs.")


def _begun(folder: Path, wait_s: float, say: Callable[[str], None]) -> tuple[Run, str]:
    """The run, once a worker has written something; and a word on others that are live."""
    until_s, said = time.monotonic() + wait_s, False
    while True:
        choice = find_run(folder)
        run = choice.run
        if run.workers:
            for what in choice.broken:
                print(f"freewheel: left out: {what}", file=sys.stderr)
            return run, _note(folder, choice)
        if time.time() - written_s(run.folder) > STARTING_S:
            raise ConfigError(
                f"{str(run.folder)!r} is a run in which no worker has ever written anything: it ended "
                "before training began. What its workers printed says why."
            )
        if time.monotonic() >= until_s:
            raise ConfigError(
                f"{str(run.folder)!r} is a run that is still starting: no worker has written anything "
                "yet. Try again in a moment, or give --wait-s more seconds."
            )
        if not said:
            say(f"{run.folder} is starting; waiting for its workers")
            said = True
        time.sleep(REFRESH_S)


def _note(folder: Path, choice: Choice) -> str:
    shown = choice.run.folder
    if not choice.others:
        return "" if shown == folder else str(shown)
    return f"{shown}; also live: {', '.join(map(str, choice.others))}"


def _gone(run: Run) -> bool:
    """Whether its folder was deleted, or is called something else now."""
    return not run.folder.is_dir()


def _over(run: Run) -> bool:
    if run.live:
        return run.quiet_s > STALLED_S
    if run.clock == "virtual" or all(run.state(rank) == "finished" for rank in run.ranks):
        return True
    silent = any(run.state(rank) == "silent" for rank in run.ranks)  # it may be held up, and go on
    return run.quiet_s > (STALLED_S if silent else PATIENCE_S)


def _news(run: Run, every_s: float) -> Iterator[bool]:
    """Read the run every so often until it is over, or gone."""
    while not _over(run) and not _gone(run):
        time.sleep(every_s)
        yield run.poll()


def _show(console: Console, run: Run, note: str) -> None:
    """Fill the terminal, and leave it as it was."""
    with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:

        def draw() -> None:
            size = console.size
            lines = screen(run, size.width, size.height, note=note, ascii_only=console.options.ascii_only)
            live.update(Group(*lines), refresh=True)

        draw()
        for _ in _news(run, REFRESH_S):
            draw()


def _tell(run: Run, note: str) -> None:
    """A line a second, and each event when it comes."""
    if note:
        print(note, flush=True)
    told = {id(event) for event in run.events[:-5]}  # an event may come late, before others
    for _ in _news(run, PLAIN_S):
        for event in run.events:
            if id(event) not in told:
                print(event_line(run, event).plain, flush=True)
                told.add(id(event))
        print(plain_line(run), flush=True)


# -- on pages --
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
