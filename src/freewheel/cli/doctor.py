"""``freewheel doctor``: is this host ready for a run, and the way to the others?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from freewheel.cli.options import argument, option
from freewheel.errors import ConfigError, at_least
from freewheel.numbers import count

if TYPE_CHECKING:
    from freewheel.runtime.doctor.rules import Finding

COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}
WIDEST = 100
INDENT = 9  # before what was looked at: the width of a state


def doctor(
    hosts: list[str] | None = argument(
        None, "Hosts on which freewheel doctor --serve runs.", metavar="[HOST[:PORT]]..."
    ),
    workers: int | None = option(
        None, "Workers on each host; default: one for each core.", "-n", "--workers"
    ),
    model_mb: float | None = option(None, "The model's weights, for memory and links."),
    bind: str = option("127.0.0.1", "The address that workers, or --serve, listen on."),
    port: int | None = option(
        None, "Is this port free? With --serve: the one to serve on, default 29600.", min=0, max=65535
    ),
    folder: Path = option(Path("runs"), "Where records would go."),
    mb: float = option(64.0, "At most so much is sent each way to measure a link."),
    tls: Path | None = option(None, "Keys, as freewheel keys makes them."),
    serve: bool = option(False, "Let doctors on other hosts measure; Ctrl-C ends it.", "--serve"),
    as_json: bool = option(False, "Print JSON, not a table.", "--json"),
) -> None:
    """Check this host and the links to others, and say what to do about each problem.

    Ends with 0 when a run is possible, with 1 when something is in its way.
    """
    from freewheel.runtime.doctor import bandwidth
    from freewheel.runtime.doctor.probe import gather
    from freewheel.runtime.doctor.rules import diagnose
    from freewheel.runtime.membership.place import parse_address

    if serve:
        if hosts or as_json:
            raise ConfigError("--serve stands alone: measure from another host, with freewheel doctor HOST.")
        asyncio.run(_serve(bind, bandwidth.PORT if port is None else port, tls))
        return
    at_least("workers", workers, 1)
    at_least("model-mb", model_mb, 0)
    addresses = [parse_address(host, "the host", bandwidth.PORT) for host in hosts or []]
    with _progress() as say:
        facts = gather(addresses, bind=bind, port=port, folder=folder, mb=mb, tls=tls, progress=say)
    workers = workers or facts.cores
    found = diagnose(facts, workers, model_mb, tls is not None)
    states = Counter(finding.state for finding in found)
    if as_json:
        figures = {host: asdict(link) for host, link in facts.links.items() if not isinstance(link, str)}
        rows = [asdict(finding) for finding in found]
        usable = not states["problem"]
        print(
            json.dumps({"usable": usable, "workers": workers, "findings": rows, "links": figures}, indent=2)
        )
    else:
        _print(found)
        seen = count(states["warning"], "warning")
        ready = f"Ready to run: {seen}." if states["warning"] else "Ready to run."
        problems = f"{count(states['problem'], 'problem')}, {seen}: see above what to do."
        print(f"\n{problems if states['problem'] else ready}")
    raise typer.Exit(1 if states["problem"] else 0)


async def _serve(bind: str, port: int, tls: Path | None) -> None:
    from freewheel.runtime.doctor import bandwidth
    from freewheel.runtime.membership.place import is_loopback

    def say(text: str) -> None:
        print(f"freewheel: {text}", flush=True)

    async with bandwidth.serving(bind, port, tls, say) as found:
        keys = f" --tls {tls}" if tls else ""
        say(f"on the other host: freewheel doctor {bind}:{found}{keys}")
        if is_loopback(bind):
            say("listening on loopback: no other host gets here; give --bind this host's address")
        await asyncio.Event().wait()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Where a person waits, say for what: turning on a terminal, else a line for each host."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda text: status.update(f"{text} …")
    else:
        yield lambda text: print(f"{text} …", file=sys.stderr) if text.startswith("measuring") else None


def _print(found: list[Finding]) -> None:
    console = Console()
    width = min(console.width, WIDEST) if console.is_terminal else 80
    column = INDENT + max(len(finding.what) for finding in found if len(finding.what) <= 18) + 2
    room = max(20, width - column)
    for finding in found:
        line = Text(f"{finding.state:<{INDENT}}", style=COLOURS[finding.state])
        head = f"{finding.what:<{column - INDENT}}"
        line.append(head, style="bold" if finding.state != "ok" else "default")
        value = textwrap.wrap(finding.value, room) or [""]
        if len(finding.what) > 18:  # an address of its own line
            value.insert(0, "")
        console.print(line + Text(value[0], style="default"), soft_wrap=True, highlight=False)
        for more in value[1:]:
            console.print(" " * column + more, soft_wrap=True, highlight=False, markup=False)
        for advice in textwrap.wrap(finding.advice, room, break_on_hyphens=False):
            console.print(Text(" " * column + advice, style="italic"), soft_wrap=True)
