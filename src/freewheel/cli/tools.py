"""Commands of a few words each: ``chaos``, ``doctor``, ``export``, ``keys``, ``store`` and ``strategies``."""

import asyncio
import inspect
import json
import multiprocessing
import os
import signal
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from freewheel.cli.options import argument, bar, option, output
from freewheel.errors import ConfigError, at_least
from freewheel.numbers import count
from freewheel.show.tables import printed

COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


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
    with Console(stderr=True).status("looking at this host and its links"):
        facts = gather(addresses, bind=bind, port=port, folder=folder, mb=mb, tls=tls)
    workers = workers or facts.cores
    found = diagnose(facts, workers, model_mb, tls is not None)
    states = Counter(finding.state for finding in found)
    code = 1 if states["problem"] else 0
    if as_json:
        said: dict[str, Any] = {"usable": not code, "workers": workers}
        said["findings"] = [asdict(finding) for finding in found]
        said["links"] = {to: asdict(link) for to, link in facts.links.items() if not isinstance(link, str)}
        print(json.dumps(said, indent=2))
        raise typer.Exit(code)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold", max_width=18)
    table.add_column(overflow="fold")
    for finding in found:
        table.add_row(Text(finding.state, COLOURS[finding.state]), finding.what, Text(finding.value))
        if finding.advice:
            table.add_row("", "", Text(finding.advice, "italic"))
    console = Console()
    console.print(table, width=min(console.width, 80), highlight=False, markup=False)
    ready = "Not ready" if code else "Ready to run"
    print(f"\n{ready}: {count(states['problem'], 'problem')}, {count(states['warning'], 'warning')}.")
    raise typer.Exit(code)


async def _serve(bind: str, port: int, tls: Path | None) -> None:
    from freewheel.runtime.doctor import bandwidth

    say = partial(print, "freewheel:", flush=True)
    async with bandwidth.serving(bind, port, tls, say) as found:
        keys = f" --tls {tls}" if tls else ""
        say(f"on the other host (which must reach this address): freewheel doctor {bind}:{found}{keys}")
        await asyncio.Event().wait()


def export(
    folder: Path = argument(..., "What worker.checkpoint was given.", metavar="FOLDER"),
    out: Path = argument(..., "Where to write the state_dict.", metavar="FILE"),
    step: int | None = option(None, "Take the checkpoint of this step; default: the newest."),
    force: bool = option(False, "Write over a file that is there.", "--force"),
) -> None:
    """Turn a checkpoint folder into one state_dict: the mean of all workers, for model.load_state_dict."""
    from freewheel.runtime.checkpoint import resume

    print(resume.export(folder, out, step, force))


def keys(
    folder: Path = argument(..., "Where to write the set.", metavar="DIR"),
    days: int = option(30, "How long it is valid."),
) -> None:
    """Make the keys of a run: workers that have them talk to each other, encrypted, and to nobody else."""
    from freewheel.runtime.launch.keys import FILES, make

    until = make(folder, days)
    print(f"Wrote {', '.join(FILES)} to {folder}, valid until {until:%Y-%m-%d %H:%M} UTC.")
    print(f"Copy the folder to every host, keep worker.key secret, and give --tls {folder}.")


def store(address: str = argument(..., "Where to listen.", metavar="HOST:PORT")) -> None:
    """Hold the place where workers meet, for torchrun, Slurm or Kubernetes; Ctrl-C or SIGTERM ends it.

    Without it worker 0 holds the store: started again, it would begin a second run. Training goes on when
    the store is lost; nobody can join until it is back.
    """
    from freewheel.runtime.membership.hosts import host_store
    from freewheel.runtime.membership.place import STORE

    held, host, port = host_store(address)
    print(f"Workers: {STORE}={host}:{port}, RANK, WORLD_SIZE and the same FREEWHEEL_SECRET_FILE", flush=True)
    wanted = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    signal.sigwait(wanted)
    del held


def list_strategies(
    name: str | None = argument(None, "Explain this one: its rule, settings and reference."),
) -> None:
    """List the strategies and where each comes from; or explain one."""
    from freewheel import strategies, tasks, topology

    if name is not None:
        strategy = type(strategies.resolve(name))
        settings = " ".join(f"{key}={value}" for key, value in vars(strategy()).items())
        print(f"{name}: {inspect.getdoc(strategy)}\n\nWaits for: {strategy.waits_for}.")
        print(f"Staleness counts: {strategy.staleness}.\nDefaults: {settings or 'no settings'}")
        return
    table = Table("strategy", "waits for", "what it does", "reference", box=None, pad_edge=False)
    for name, strategy in strategies.ALL.items():
        table.add_row(name, strategy.waits_for, strategy.summary(), strategy.reference)
    console = output()
    console.print(table)
    explained = "\nfreewheel strategies NAME explains one. Settings: NAME:key=value:key=value."
    known = f"Topologies: {', '.join(topology.NAMES)}. Tasks: {', '.join(tasks.ALL)}."
    console.print(f"{explained}\n{known}")


# What chaos tries unless told otherwise.
STRATEGIES = (
    "adpsgd,adpsgd:topology=ring,nodelay_free,nodelay_free:tau=6,dasgd:interval=4,allreduce,sasgd:interval=4,"
    "nodelay:tau=8,dpsgd,leader:interval=4,grouping,hierarchical_sasgd"
)


def chaos(
    seeds: int = option(100, "How many runs; the strategies take turns."),
    first: int = option(0, "The first seed: --first 17 --seeds 1 repeats run 17."),
    strategy: str = option(STRATEGIES, "One or several, separated by commas.", show_default=False),
    workers: int = option(8, "How many workers."),
) -> None:
    """Let random faults strike simulated runs, and check the laws; a failure is named with its seed."""
    from freewheel import names, strategies
    from freewheel.sim import chaos as laws

    at_least("--seeds", seeds, 1)
    at_least("--first", first, 0)
    at_least("--workers", workers, 4)
    for one in strategies.resolve_all(strategy):
        one.check(workers)
    chosen = names.split(strategy)
    work = [(chosen[k % len(chosen)], first + k, workers) for k in range(seeds)]
    outcomes: list[laws.Outcome] = []
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool, bar() as show:
        for outcome in pool.imap(_one, work):
            outcomes.append(outcome)
            show("runs", len(outcomes) / len(work))
    rows = []
    for name in dict.fromkeys(outcome.strategy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.strategy == name]
        faults = sum(outcome.faults.total() for outcome in mine)
        rows.append([name, *map(str, (len(mine), faults, sum(bool(one.broken) for one in mine)))])
    console = output()
    console.print(printed(["strategy", "runs", "faults", "violations"], rows))
    for outcome in outcomes:
        for broken in outcome.broken:
            again = f"--strategy {outcome.strategy} --first {outcome.seed} --seeds 1 --workers {workers}"
            console.print(f"{broken}\n  again: freewheel chaos {again}", soft_wrap=True)
    if any(outcome.broken for outcome in outcomes):
        raise typer.Exit(1)


def _one(work: tuple[str, int, int]) -> Any:
    from freewheel import strategies, tasks
    from freewheel.sim import chaos as laws

    name, seed, workers = work
    return laws.run(strategies.resolve(name), name, tasks.resolve("quadratic"), seed, workers)
