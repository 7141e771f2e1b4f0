"""``freewheel watch``, ``dashboard``, ``report`` and ``replay``: runs in the terminal and on pages."""

import contextlib
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from freewheel.cli.options import argument, option, output
from freewheel.errors import ConfigError, at_least
from freewheel.numbers import count
from freewheel.records.files import check_writable, write_whole
from freewheel.records.result import Result
from freewheel.records.run import STARTING_S, Run, all_runs, find_run, written_s
from freewheel.show import replay as replays
from freewheel.show import report as reports
from freewheel.show.dashboard import PORT, Dashboard
from freewheel.show.dashboard.board import Board
from freewheel.show.rates import result_of
from freewheel.show.terminal import event_line, plain_line, screen

REFRESH_S, PLAIN_S = 0.5, 1.0
STALLED_S = 60.0  # a run is over if nobody has written for so long
RUNS = argument(..., "Folders of runs, or folders with runs in them.", metavar="RUN...")


def watch(
    folder: Path = argument(
        Path("runs"), "The folder of a run, or of several; default: the newest in runs.", metavar="[RUN]"
    ),
    once: bool = option(False, "Print how it stands now, and end.", "--once"),
    wait_s: float = option(300.0, "How long to wait for a run that is starting."),
) -> None:
    """Watch a run: who trains, how fast, how far apart they are, and what happens to them."""
    at_least("wait-s", wait_s, 0)
    run, note = _begun(folder, 0.0 if once else wait_s)
    console = output()
    show = partial(screen, run, note=note, ascii_only=console.options.ascii_only)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave the screen
    try:
        if console.is_terminal and not once and not _over(run):
            with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
                live.update(Group(*show(*console.size)), refresh=True)
                for _ in _news(run, REFRESH_S):
                    live.update(Group(*show(*console.size)), refresh=True)
        elif not once:  # a line a second, and each event when it comes
            if note:
                print(note, flush=True)
            told = {id(event) for event in run.events[:-5]}  # an event may come late, before others
            for _ in _news(run, PLAIN_S):
                for event in run.events:
                    if id(event) not in told:
                        print(event_line(run, event).plain, flush=True)
                        told.add(id(event))
                print(plain_line(run), flush=True)
    finally:  # after Ctrl-C, too; COLUMNS may set the width of a file
        signal.signal(signal.SIGTERM, before)
        width = console.width
        if not console.is_terminal:
            width = shutil.get_terminal_size((width, 24)).columns
        for line in show(width):
            console.print(line, soft_wrap=True)
    if _over(run) and any(run.state(rank) not in ("finished", "dead") for rank in run.ranks):
        print(f"Nobody has written for {run.quiet_s:,.0f} s: the run was killed, or it hangs.")


def _begun(folder: Path, wait_s: float) -> tuple[Run, str]:
    """Wait until a worker has written something; return the run, and a note on others that are live."""
    until_s, said = time.monotonic() + wait_s, False
    while True:
        choice = find_run(folder)
        run = choice.run
        if run.workers:
            for what in choice.broken:
                _warn(f"left out: {what}")
            also = f"; also live: {', '.join(map(str, choice.others))}" if choice.others else ""
            return run, f"{run.folder}{also}" if also or run.folder != folder else ""
        if time.monotonic() >= until_s or time.time() - written_s(run.folder) > STARTING_S:
            raise ConfigError(
                f"{str(run.folder)!r} is a run that is still starting, or ended before training began: no "
                "worker has written anything. See what its workers printed, or give --wait-s more seconds."
            )
        if not said:
            print(f"{run.folder} is starting; waiting for its workers", flush=True)
            said = True
        time.sleep(REFRESH_S)


def _over(run: Run) -> bool:
    simulated_or_done = run.clock == "virtual" or all(run.state(rank) == "finished" for rank in run.ranks)
    return (simulated_or_done and not run.live) or run.quiet_s > STALLED_S


def _news(run: Run, every_s: float) -> Iterator[bool]:
    while not _over(run):
        time.sleep(every_s)
        yield run.poll()


def report(
    folders: list[Path] = RUNS,
    out: Path | None = option(
        None, "Where to write; default: report.html, and the terminal for markdown.", "--output", "-o"
    ),
    as_markdown: bool = option(False, "Tables and words for a README or an issue, no figures.", "--markdown"),
) -> None:
    """Write one page on what runs measured, or markdown: figures, workers, events, settings, theory."""
    path = out if out is not None or as_markdown else Path("report.html")
    check_writable(path)
    with Console(stderr=True).status("drawing"):
        results, runs = _read(all_runs(folders))
        said = [run.about.get("command", "") for run in runs]  # once for all runs of one command
        typed = dict.fromkeys(shlex.join(one) if isinstance(one, list) else str(one) for one in said)
        words = {"title": f"Freewheel: {replays.title_of(runs)}", "command": "\n".join(filter(None, typed))}
        text = (reports.markdown if as_markdown else reports.html)(results, runs, **words)
    if path is None:
        sys.stdout.write(text)
        return
    write_whole(path, text)
    print(f"Report: {path.resolve()}")


def _read(folders: Sequence[Path]) -> tuple[list[Result], list[Run]]:
    """The runs that have figures; the others are named on stderr, or refused where there is only one."""
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
            _warn(f"{str(folder)!r}: {count(run.broken, 'damaged line')} left out.")
    if not runs:
        raise ConfigError("none of these runs can be reported.")
    return results, runs


def _warn(said: str) -> None:
    print(f"freewheel: {said}", file=sys.stderr)


def replay(
    folders: list[Path] = RUNS,
    out: Path = option(Path("replay.html"), "Where to write.", "--output", "-o"),
    perfetto: Path | None = option(None, "Instead of a page, write a trace for ui.perfetto.dev here."),
) -> None:
    """Write a page that plays runs: who computes, who waits, who meets whom, and what they have learned."""
    out = perfetto or out
    check_writable(out)
    _, runs = _read(all_runs(folders))
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
        Path("runs"), "The folder of a run, or one with runs in it; default: runs.", metavar="[RUN]"
    ),
    port: int | None = option(None, f"Which port; default: {PORT}, or a free one."),
    browser: bool = option(True, "Open the page in a browser."),
) -> None:
    """Show runs on a page of this machine, live or ended, and compare them; Ctrl-C ends it."""
    server = Dashboard(Board(folder), port)
    with contextlib.suppress(KeyboardInterrupt):
        print(f"{folder} is shown at {server.address}\nCtrl-C ends this, and no run.", flush=True)
        if browser and {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        server.serve_forever(poll_interval=0.1)
    os._exit(0)  # threads that answer need not be waited for
