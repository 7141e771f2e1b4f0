"""``freewheel bench``: Freewheel beside PyTorch's DDP and gloo, measured on this machine."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from freewheel import names, strategies
from freewheel.cli.options import arrange, bar, option, output, takes
from freewheel.errors import ConfigError, RunStopped, UnknownName, at_least
from freewheel.numbers import share, short
from freewheel.records.files import check_writable, write_whole
from freewheel_bench.figure import Figure
from freewheel_bench.rates import Load, Span
from freewheel_bench.rates import Progress as Show

app = typer.Typer(
    name="bench",
    help="Measure Freewheel beside others on this machine, in one run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JSON = option(None, "Write the figures and all raw numbers here.", "--json")
WIDE = option(False, "Print all figures, not the six that matter most.", "--wide")
QUICK = option(False, "One short round: whether it works, not how well.", "--quick")
BOTH = option("adpsgd,nodelay_free", "One or several, separated by commas.")
HERE = "Rates of all workers together, as shares of the same workers' without communication."

FEW = 6  # columns of a table, unless all are wanted
Column = tuple[str, Callable[[Figure], str]]  # a heading, and what stands below it

COMMUNICATION: list[Column] = [
    ("strategy", lambda f: f.of),
    ("freewheel", lambda f: share(f.freewheel)),
    ("DDP", lambda f: share(f.theirs)),
    ("ratio", lambda f: short(f.ratio)),
    ("blocked", lambda f: share(f.raw["blocked_share"], 2)),
    ("exchanges/step", lambda f: short(f.raw["exchanges_per_step"])),
    ("alone steps/s", lambda f: short(f.raw["alone_steps_per_s"], 4)),
    ("freewheel", lambda f: short(f.raw["freewheel_steps_per_s"], 4)),
    ("DDP", lambda f: short(f.raw["ddp_steps_per_s"], 4)),
    ("waiting (alone)", lambda f: f"{share(f.raw['waiting_share'])} ({share(f.raw['alone_waiting_share'])})"),
]
LINKS: list[Column] = [
    ("links used", lambda f: share(f.raw["freewheel_link_used"])),
    ("DDP", lambda f: share(f.raw["ddp_link_used"])),
    ("MB a merge and host", lambda f: short(f.raw["sent_mb_per_merge"])),
]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    arrange(function)
    app.command(function.__name__)(function)
    return function


@command
@takes(Load, Span, slow={0: 10.0})
def straggler(
    load: dict[str, Any],
    span: dict[str, Any],
    strategy: str = BOTH,
    quick: bool = QUICK,
    wide: bool = WIDE,
    json_path: Path | None = JSON,
) -> None:
    """Step rates with one worker ten times slower, as shares of the rate without communication."""
    from freewheel_bench.straggler import straggler

    what, chosen = Load(**load), _strategies(strategy, load["workers"])
    found = _measured(lambda show: straggler(what, chosen, _span(span, quick), show), json_path)
    _print(COMMUNICATION, found, HERE, wide)


@command
@takes(Load, Span, model_mb=10.0, seconds=20.0, rounds=2)
def network(
    load: dict[str, Any],
    span: dict[str, Any],
    link_mbit: float = option(100.0, "Bandwidth of each worker's link, in and out."),
    hosts: int | None = option(None, "Hosts that share the workers; else one each.", metavar="N"),
    strategy: str = BOTH,
    quick: bool = QUICK,
    wide: bool = WIDE,
    json_path: Path | None = JSON,
) -> None:
    """Step rates on narrow links (network namespaces behind a bridge): needs root and iproute2."""
    from freewheel_bench.namespaces import check_possible
    from freewheel_bench.network import network

    what, chosen = Load(**load), _strategies(strategy, load["workers"])
    long = _span(span, quick)
    check_possible()
    found = _measured(lambda show: network(what, link_mbit, chosen, long, show, hosts), json_path)
    note = f"Links of {short(link_mbit)} Mbit/s; shares as in freewheel bench straggler."
    _print([*COMMUNICATION[:4], *LINKS, *COMMUNICATION[4:]], found, note, wide)


@command
@takes(Span, seconds=8.0, rounds=1)
def gpu(
    span: dict[str, Any],
    workers: int = option(4, "How many workers."),
    layers: int = option(12, "Layers of the GPT."),
    width: int = option(768, "Its width, a multiple of 64."),
    context: int = option(512, "Tokens of a sequence."),
    batch: int = option(8, "Sequences of a batch."),
    strategy: str = option("adpsgd,nodelay_free,sasgd:interval=8,allreduce", "One or several."),
    wire: str = option("fp32", "fp32, or bf16 for half the bytes."),
    quick: bool = QUICK,
    wide: bool = WIDE,
    json_path: Path | None = JSON,
) -> None:
    """Step rates of a GPT whose workers share one GPU, as shares of the rate without communication."""
    from freewheel_bench.straggler import straggler

    sizes = {"layers": layers, "width": width, "context": context, "batch": batch}
    for name, value in sizes.items():
        at_least(f"--{name}", value, 1)
    if width % 64:
        raise ConfigError(f"--width must be a multiple of 64, the width of a head, not {width}.")
    load, chosen = Load(workers, wire=wire, gpt=sizes), _strategies(strategy, workers)
    found = _measured(lambda show: straggler(load, chosen, _span(span, quick), show), json_path)
    weights = 12 * layers * width**2 / 1e6
    _print(COMMUNICATION, found, f"A GPT of {weights:.0f} million weights; DDP on gloo.", wide)


@command
def swap(
    mb: str = option("1,45,400", "Sizes, separated by commas."),
    rounds: int = option(5, "How often the contestants take turns."),
    apart: bool = option(False, "Each in a network namespace: over TCP alone; needs root.", "--apart"),
    quick: bool = QUICK,
    json_path: Path | None = JSON,
) -> None:
    """Two processes swap snapshots, both directions at once, beside gloo's isend and irecv."""
    from freewheel_bench.swap import swap

    sizes = [_number("--mb", text) for text in names.split(mb)]
    if not sizes:
        raise ConfigError("--mb names no size: write sizes in MB, separated by commas, as in 1,45,400.")
    found = _measured(lambda show: swap(sizes, 1 if quick else rounds, show, apart), json_path)
    columns: list[Column] = [
        ("what", lambda f: f"{f.name} {f.of}"),
        ("freewheel ms", lambda f: short(f.freewheel)),
        ("gloo ms", lambda f: short(f.theirs)),
        ("ratio", lambda f: short(f.ratio)),
        ("freewheel CPU ms", lambda f: short(f.raw["freewheel_cpu_ms"])),
        ("gloo CPU ms", lambda f: short(f.raw["gloo_cpu_ms"])),
        ("CPU ratio", lambda f: short(f.raw["cpu_ratio"])),
    ]
    _print(columns, found, "swap: each has what the other had; exchange: each has (theirs - mine)/2.")


@command
def overhead(
    device: str = option("auto", "auto, cpu or cuda."),
    slices: int = option(40, "Slices of 0.1 s of each loop in each round."),
    rounds: int = option(3, "How often it is done in new processes."),
    quick: bool = QUICK,
    json_path: Path | None = JSON,
) -> None:
    """Step time attached with adpsgd and an idle network, beside the plain loop."""
    from freewheel_bench.overhead import devices_named, overhead

    devices = devices_named(device)
    found = _measured(
        lambda show: overhead(devices, *((3, 1) if quick else (slices, rounds)), show), json_path
    )
    columns: list[Column] = [
        ("device", lambda f: f.of),
        ("attached ms", lambda f: short(f.freewheel, 4)),
        ("plain ms", lambda f: short(f.theirs, 4)),
        ("ratio", lambda f: f"{f.ratio:.4f}"),
        ("overhead", lambda f: f"{f.raw['overhead_percent']:+.2f} %"),
        ("noise", lambda f: f"{f.raw['noise_percent']:+.2f} %"),
    ]
    _print(columns, found, "Medians; noise: a second plain loop beside the first.")


@command
@takes(Load)
def faults(
    load: dict[str, Any],
    kinds: str = option(
        "kill,restart,rendezvous",
        "kill, restart, rendezvous, cut (needs root); separated by commas.",
        "--kind",
    ),
    strategy: str = option("adpsgd,dasgd,nodelay_free", "One or several."),
    kills: int = option(4, "How many workers are killed, one after the other."),
    away_s: float = option(20.0, "How long the store is gone, or a link is cut."),
    quick: bool = QUICK,
    json_path: Path | None = JSON,
) -> None:
    """Longest pause of those who are left when a worker, the rendezvous or a link fails."""
    from freewheel_bench import faults as bench
    from freewheel_bench.namespaces import check_possible

    chosen = names.split(kinds)
    for kind in chosen:
        if kind not in bench.KINDS:
            raise UnknownName("kind of fault", kind, bench.KINDS)
    at_least("--kills", kills, 1)
    at_least("--away-s", away_s, 0.1)
    if bench.CUT in chosen:
        check_possible()
    what, which = Load(**load), _strategies(strategy, load["workers"])
    spans = (1, 3.0) if quick else (kills, away_s)
    found = _measured(lambda show: bench.faults(chosen, what, which, *spans, show), json_path)
    columns: list[Column] = [
        ("fault", lambda f: f.name),
        ("strategy", lambda f: f.of),
        ("longest s", lambda f: f"{f.freewheel:.3f}"),
        ("allowed s", lambda f: f"{f.theirs:.3f}"),
        ("without a fault s", lambda f: f"{f.raw['noise_s']:.3f}"),
    ]
    _print(
        columns,
        found,
        "Pauses of workers that were not touched, beyond the time of a step; restart: from having imported "
        "torch to the first step; healed: from the link's return to the first exchange.",
    )


@command
def soak(
    minutes: float | None = option(
        None, "How long the run would take if nobody were missing; default: what the faults take, else 3."
    ),
    kinds: str | None = option(
        None,
        "kill, store, cut (needs root); separated by commas. Default: all that are possible here.",
        "--kind",
    ),
    faults: int | None = option(None, "How many; default: one every 4 s."),
    every: float | None = option(
        None, "Seconds between two faults; default: at random moments.", rich_help_panel="Options"
    ),
    spare: int | None = option(None, "Rank of a worker that no fault strikes: does it grow?"),
    seed: int = option(0, "Draws the faults."),
    workers: int = option(4, "How many workers."),
    strategy: str = option("adpsgd", "One whose loader deals by leases."),
    step_ms: float = option(50.0, "Time of a step; workers sleep through it."),
    beside: bool = option(False, "The same run without faults first, to compare the answers.", "--beside"),
    json_path: Path | None = JSON,
) -> None:
    """Kill random processes, the store included, cut links, and check the laws: digits, learned for real."""
    from freewheel_bench import soak as bench

    _strategies(strategy, workers)
    chosen = bench.possible() if kinds is None else tuple(names.split(kinds))
    asked = bench.Soak(workers, minutes, chosen, faults, every, spare, seed, strategy, step_ms)
    check_writable(json_path)
    with _bar() as show:
        report = bench.soak(asked, show, beside)
    if json_path is not None:
        write_whole(json_path, report.as_json())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("law", "found", "allowed", ""):
        table.add_column(heading, no_wrap=True)
    for law in report.laws:
        table.add_row(law.name, law.found, law.allowed, "held" if law.held else "[bold red]BROKEN[/]")
    console = output()
    console.print(table)
    struck = ", ".join(f"{count} of {kind}" for kind, count in sorted(report.faults.items()))
    figures = report.figures
    console.print(
        f"Faults: {struck}, one in {figures['between_faults_s']:.2f} s. "
        f"{figures['samples']} samples in {figures['passes']} passes, "
        f"{figures['seconds']:.0f} s, accuracy {share(figures['accuracy'], 2)}.",
        highlight=False,
        soft_wrap=True,
    )
    if not report.held:
        raise typer.Exit(1)


@contextlib.contextmanager
def _bar() -> Iterator[Show]:
    """A bar on stderr; a worker that failed has more to say than the one line that ends the command."""
    with bar() as show:
        try:
            yield show
        except RunStopped as error:
            for note in getattr(error, "__notes__", ()):
                print(note, file=sys.stderr)
            raise


def _measured(work: Callable[[Show], list[Figure]], json_path: Path | None) -> list[Figure]:
    check_writable(json_path)
    with _bar() as show:
        found = work(show)
    if json_path is not None:
        write_whole(json_path, json.dumps([figure.as_json() for figure in found], indent=2) + "\n")
    return found


def _print(columns: Sequence[Column], found: Sequence[Figure], note: str, wide: bool = True) -> None:
    columns = columns if wide else columns[:FEW]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if at else "left", no_wrap=True)
    for figure in found:
        table.add_row(*(cell(figure) for _, cell in columns))
    console = output()
    console.print(table)
    console.print(note, highlight=False, soft_wrap=True)


def _span(asked: dict[str, Any], quick: bool) -> Span:
    span = Span(**asked)
    return Span(min(span.seconds, 1.0), 1) if quick else span


def _strategies(text: str, workers: int) -> list[str]:
    """The strategies of a list, all looked at before the first is run; all is every one of them."""
    for one in strategies.resolve_all(text):
        one.check(workers)
    return [one for part in names.split(text) for one in (strategies.ALL if part == "all" else [part])]


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"cannot read {option}: {text!r} is not a number.") from None
