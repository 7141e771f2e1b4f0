"""``freewheel bench``: Freewheel beside PyTorch's DDP and gloo, measured on this machine."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from freewheel import names, strategies
from freewheel.cli.console import bars, output
from freewheel.errors import ConfigError, RunStopped, UnknownName, at_least
from freewheel.numbers import given, share, short
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
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[Path | None, typer.Option("--json", help="Write the figures and all raw numbers here.")]
Quick = Annotated[bool, typer.Option("--quick", help="One short round: whether it works, not how well.")]
Workers = Annotated[int, typer.Option(help="How many workers.")]
ComputeMs = Annotated[float, typer.Option(help="Time of a gradient; workers sleep through it.")]
Seconds = Annotated[float, typer.Option(help="How long each contestant steps in each round.")]
Rounds = Annotated[int, typer.Option(help="How often the contestants take turns.")]
ModelMb = Annotated[float, typer.Option(help="What the model weighs, in MB of fp32.")]
Strategies = Annotated[str, typer.Option(help="One or several, separated by commas.")]
Slow = Annotated[
    list[str] | None,
    typer.Option(help="RANK:FACTOR, this worker computes slower; repeatable; none: all are equal."),
]
Wire = Annotated[str, typer.Option(help="fp32, or bf16 for half the bytes.")]

Column = tuple[str, Callable[[Figure], str]]
"""A heading, and what stands below it."""

COMMUNICATION: list[Column] = [
    ("strategy", lambda f: f.of),
    ("freewheel", lambda f: share(f.freewheel)),
    ("DDP", lambda f: share(f.theirs)),
    ("ratio", lambda f: short(f.ratio)),
    ("alone steps/s", lambda f: short(f.raw["alone_steps_per_s"], 4)),
    ("freewheel", lambda f: short(f.raw["freewheel_steps_per_s"], 4)),
    ("DDP", lambda f: short(f.raw["ddp_steps_per_s"], 4)),
    ("blocked", lambda f: share(f.raw["blocked_share"], 2)),
    ("waiting (alone)", lambda f: f"{share(f.raw['waiting_share'])} ({share(f.raw['alone_waiting_share'])})"),
    ("exchanges/step", lambda f: short(f.raw["exchanges_per_step"])),
]


@app.command()
def straggler(
    workers: Workers = 4,
    model_mb: ModelMb = 4.0,
    compute_ms: ComputeMs = 50.0,
    slow: Slow = None,
    strategy: Strategies = "adpsgd,nodelay_free",
    seconds: Seconds = 10.0,
    rounds: Rounds = 3,
    wire: Wire = "fp32",
    quick: Quick = False,
    json_path: Json = None,
) -> None:
    """Step rates with one worker ten times slower, as shares of the rate without communication."""
    from freewheel_bench.straggler import straggler

    load = Load(workers, model_mb, compute_ms, _slow(slow or ["0:10"]), _wire(wire))
    chosen, span = _strategies(strategy, workers), _span(seconds, rounds, quick)
    found = _measured(lambda show: straggler(load, chosen, span, show), json_path)
    _print(
        COMMUNICATION,
        found,
        "Rates of all workers together, as shares of the same workers' without communication.",
    )


@app.command()
def network(
    link_mbit: Annotated[float, typer.Option(help="Bandwidth of each worker's link, in and out.")] = 100.0,
    workers: Workers = 4,
    hosts: Annotated[int | None, typer.Option(help="Hosts that share the workers; else one each.")] = None,
    model_mb: ModelMb = 10.0,
    compute_ms: ComputeMs = 50.0,
    slow: Slow = None,
    strategy: Strategies = "adpsgd,nodelay_free",
    seconds: Seconds = 20.0,
    rounds: Rounds = 2,
    wire: Wire = "fp32",
    quick: Quick = False,
    json_path: Json = None,
) -> None:
    """Step rates on narrow links (network namespaces behind a bridge): needs root and iproute2."""
    from freewheel_bench.namespaces import check_possible
    from freewheel_bench.network import network

    load = Load(workers, model_mb, compute_ms, _slow(slow or ["none"]), _wire(wire))
    chosen, span = _strategies(strategy, workers), _span(seconds, rounds, quick)
    check_possible()
    found = _measured(lambda show: network(load, link_mbit, chosen, span, show, hosts), json_path)
    columns: list[Column] = [
        *COMMUNICATION,
        ("links used", lambda f: share(f.raw["freewheel_link_used"])),
        ("DDP", lambda f: share(f.raw["ddp_link_used"])),
        ("MB a merge and host", lambda f: short(f.raw["sent_mb_per_merge"])),
    ]
    _print(columns, found, f"Links of {given(link_mbit)} Mbit/s; shares as in freewheel bench straggler.")


@app.command()
def gpu(
    workers: Workers = 4,
    layers: Annotated[int, typer.Option(help="Layers of the GPT.")] = 12,
    width: Annotated[int, typer.Option(help="Its width, a multiple of 64.")] = 768,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences of a batch.")] = 8,
    strategy: Strategies = "adpsgd,nodelay_free,sasgd:interval=8,allreduce",
    seconds: Seconds = 8.0,
    rounds: Rounds = 1,
    wire: Wire = "fp32",
    quick: Quick = False,
    json_path: Json = None,
) -> None:
    """Step rates of a GPT whose workers share one GPU, as shares of the rate without communication."""
    from freewheel_bench.straggler import straggler

    sizes = {"layers": layers, "width": width, "context": context, "batch": batch}
    for name, value in sizes.items():
        at_least(f"--{name}", value, 1)
    if width % 64:
        raise ConfigError(f"--width must be a multiple of 64, the width of a head, not {width}.")
    load = Load(workers, wire=_wire(wire), gpt=sizes)
    chosen, span = _strategies(strategy, workers), _span(seconds, rounds, quick)
    found = _measured(lambda show: straggler(load, chosen, span, show), json_path)
    weights = 12 * layers * width**2 / 1e6
    _print(COMMUNICATION, found, f"A GPT of {weights:.0f} million weights; DDP on gloo.")


@app.command()
def swap(
    mb: Annotated[str, typer.Option(help="Sizes, separated by commas.")] = "1,45,400",
    rounds: Rounds = 5,
    apart: Annotated[
        bool, typer.Option("--apart", help="Each in a network namespace: over TCP alone; needs root.")
    ] = False,
    quick: Quick = False,
    json_path: Json = None,
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
    _print(
        columns,
        found,
        "swap: each has what the other had; exchange: each has (theirs - mine)/2.",
    )


@app.command()
def overhead(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    slices: Annotated[int, typer.Option(help="Slices of 0.1 s of each loop in each round.")] = 40,
    rounds: Annotated[int, typer.Option(help="How often it is done in new processes.")] = 3,
    quick: Quick = False,
    json_path: Json = None,
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


@app.command()
def faults(
    kinds: Annotated[
        str, typer.Option("--kind", help="kill, restart, rendezvous, cut (needs root); separated by commas.")
    ] = "kill,restart,rendezvous",
    workers: Workers = 4,
    model_mb: ModelMb = 4.0,
    compute_ms: ComputeMs = 50.0,
    strategy: Strategies = "adpsgd,dasgd,nodelay_free",
    kills: Annotated[int, typer.Option(help="How many workers are killed, one after the other.")] = 4,
    away_s: Annotated[float, typer.Option(help="How long the store is gone, or a link is cut.")] = 20.0,
    quick: Quick = False,
    json_path: Json = None,
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
    load, which = Load(workers, model_mb, compute_ms), _strategies(strategy, workers)
    spans = (1, 3.0) if quick else (kills, away_s)
    found = _measured(lambda show: bench.faults(chosen, load, which, *spans, show), json_path)
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


@app.command()
def soak(
    minutes: Annotated[
        float | None,
        typer.Option(
            help="How long the run would take if nobody were missing; default: what the faults take, else 3."
        ),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kind",
            help="kill, store, cut (needs root); separated by commas. Default: all that are possible here.",
        ),
    ] = None,
    faults: Annotated[int | None, typer.Option(help="How many; default: one every 4 s.")] = None,
    every: Annotated[
        float | None, typer.Option(help="Seconds between two faults; default: at random moments.")
    ] = None,
    spare: Annotated[
        int | None, typer.Option(help="Rank of a worker that no fault strikes: does it grow?")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the faults.")] = 0,
    workers: Workers = 4,
    strategy: Annotated[str, typer.Option(help="One whose loader deals by leases.")] = "adpsgd",
    step_ms: Annotated[float, typer.Option(help="Time of a step; workers sleep through it.")] = 50.0,
    beside: Annotated[
        bool, typer.Option("--beside", help="The same run without faults first, to compare the answers.")
    ] = False,
    json_path: Json = None,
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
    with bars() as shown:
        bar = shown.add_task("starting", total=1.0)
        try:
            yield lambda what, done: shown.update(bar, description=what, completed=done)
        except RunStopped as error:
            for note in getattr(error, "__notes__", ()):
                print(note, file=sys.stderr)
            raise


def _measured(work: Callable[[Show], list[Figure]], json_path: Path | None) -> list[Figure]:
    """Do the work with a bar on stderr; write what was found."""
    check_writable(json_path)
    with _bar() as show:
        found = work(show)
    if json_path is not None:
        write_whole(json_path, json.dumps([figure.as_json() for figure in found], indent=2) + "\n")
    return found


def _print(columns: Sequence[Column], found: Sequence[Figure], note: str) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if at else "left", no_wrap=True)
    for figure in found:
        table.add_row(*(cell(figure) for _, cell in columns))
    console = output()
    console.print(table)
    console.print(note, highlight=False, soft_wrap=True)


def _span(seconds: float, rounds: int, quick: bool) -> Span:
    return Span(min(seconds, 1.0), 1) if quick else Span(seconds, rounds)


def _strategies(text: str, workers: int) -> list[str]:
    """The strategies of a list, all looked at before the first is run; all is every one of them."""
    for one in strategies.resolve_all(text):
        one.check(workers)
    return [one for part in names.split(text) for one in (strategies.ALL if part == "all" else [part])]


def _slow(texts: Sequence[str]) -> dict[int, float]:
    """Read RANK:FACTOR, or none for nobody."""
    if list(texts) == ["none"]:
        return {}
    slow: dict[int, float] = {}
    for text in texts:
        rank, _, factor = text.partition(":")
        if not rank.isdecimal():
            raise ConfigError(f"cannot read --slow {text!r}: write RANK:FACTOR, as in 0:10, or none.")
        if int(rank) in slow:
            raise ConfigError(f"--slow is given twice for worker {rank}; give it once.")
        slow[int(rank)] = _number("--slow", factor)
    return slow


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"cannot read {option}: {text!r} is not a number.") from None


def _wire(text: str) -> str:
    if text not in ("fp32", "bf16"):
        raise ConfigError(f"--wire must be fp32 or bf16, not {text!r}.")
    return text
