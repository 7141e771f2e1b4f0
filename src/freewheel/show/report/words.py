"""What a report says of runs: sentences (who was fastest, who reached the target, who died) and tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from freewheel import theory, topology
from freewheel.errors import ConfigError
from freewheel.numbers import UNKNOWN, count, given, listed, number, share
from freewheel.records.counters import CAUSES
from freewheel.records.result import Result
from freewheel.records.run import DEATHS, Run
from freewheel.show.bounds import bounds
from freewheel.show.rates import standing
from freewheel.show.shown import EVENTS, GRAVE, Shown, differing, flatten
from freewheel.show.tables import Table, baseline_of, race, unlike

TOLD = 5
"""The most things that are told of one kind."""


def clock(runs: Sequence[Shown]) -> str:
    """Whose seconds these are: "virtual", "wall-clock", or each run's own."""
    clocks = {run.clock for run in runs}
    if len(clocks) > 1:
        return "wall-clock or, of simulated runs, virtual"
    return "wall-clock" if clocks == {"wall"} else "virtual"


def how_it_stands(run: Run) -> str:
    """How a run stands, and of how many workers it was heard last."""
    word = standing(run)
    if word in ("live", "starting"):
        return f"still running, as of {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    if word == "finished":
        return word
    states = Counter(run.state(rank) for rank in run.workers)
    how = "killed, or it hangs" if word == "silent" else word
    return f"{how}, with " + listed([f"{count(many, 'worker')} {state}" for state, many in states.items()])


def still_running(runs: Sequence[Shown]) -> str:
    """Which runs go on, and since when that is no longer told; nothing where all have ended."""
    live = [run for run in runs if run.records is not None and run.run.live]
    if not live:
        return ""
    who = "" if len(runs) == 1 else f": {listed([run.label for run in live])}"
    as_of = how_it_stands(live[0].run).removeprefix("still running, ")
    return f"Still running{who}, {as_of}. All figures are those up to then."


def happened(run: Run) -> str:
    """Who died, came and left, a sentence for each; nothing where nobody did."""
    told = defaultdict[int, list[str]](list)
    links: dict[str, None] = {}
    for event in run.events:
        seconds = max(0.0, event.time - run.began_s)  # some resume a moment before the first begins
        at = f"at {seconds:.3g} s" if seconds < 100 else f"at {seconds:,.0f} s"
        if event.link:
            links[f"{event.link[0].upper()}{event.link[1:]} {at}."] = None
        elif event.what in (*GRAVE, "resumed") and event.rank is not None:
            told[event.rank].append(f"{EVENTS[event.what].words} {at}")
    befell = "The same befell {} other {}."
    workers = [f"Worker {rank} {listed(_few(words, '{} times more'))}." for rank, words in told.items()]
    return " ".join(_few(workers, befell, "workers") + _few(list(links), befell, "links"))


def _few(said: list[str], more: str, *what: str) -> list[str]:
    return said if len(said) <= TOLD else [*said[: TOLD - 1], more.format(len(said) - TOLD + 1, *what)]


def findings(runs: Sequence[Shown]) -> list[str]:
    """The main result in a few sentences; then what happened, a paragraph for each run."""
    main = [unlike(runs)] if unlike(runs) else list(_ranking(runs))
    if any(event.what in DEATHS for run in runs if run.records is not None for event in run.run.events):
        main.append("The ideal is of all workers for the whole time: a dead one's share is lost.")
    told = defaultdict[str, list[str]](list)
    for run in runs:
        if run.records is not None and (words := happened(run.run)):
            told[words].append(run.label)
    each = [
        words if len(runs) == 1 else f"{'All runs' if len(labels) == len(runs) else listed(labels)}: {words}"
        for words, labels in told.items()
    ]
    return [" ".join(main), *each]


def _ranking(runs: Sequence[Shown]) -> Iterator[str]:
    """Who reaches the target how much sooner than DDP, or else AllReduce; then who makes how many steps."""
    results = [run.result for run in runs]
    yield from filter(None, [race([run.label for run in runs], results)])
    top = max(run.result.steps_per_s for run in runs)
    best = [run for run in runs if run.result.steps_per_s >= 0.999 * top]
    ideal = share(best[0].result.ideal_share)
    if len(runs) == 1:
        yield (
            f"{runs[0].label} makes {number(top)} worker-steps per second, {ideal} of what its workers can "
            f"do when none ever waits; they are idle for {share(runs[0].result.idle_share)} of the time."
        )
        return
    said = f"{listed([run.label for run in best])} {'makes' if len(best) == 1 else 'make'} the most "
    said += f"worker-steps per second: {number(top)}, {ideal} of what they can do when none ever waits"
    slow = baseline_of(results)
    if slow is not None and slow.steps_per_s < 0.999 * top:
        label = runs[results.index(slow)].label
        said += f", and {number(top / slow.steps_per_s)} times as many as {label}, whose workers "
        said += f"are idle for {share(slow.idle_share)} of the time"
    yield f"{said}."


# -- what was run: workers, their compute times, links and faults --


def scenario_in_words(results: Sequence[Result]) -> str:
    """What was simulated, in words."""
    words = _scenario(results[0])
    flat = [flatten({"workers": one.workers, **one.settings.get("scenario", {})}) for one in results]
    differ = differing(flat)
    if not differ:
        return words
    what = listed(differ) if len(differ) <= 6 else f"{len(differ)} settings"
    return f"The runs differ in {what}; their settings are below. The first: {words}"


def _scenario(result: Result) -> str:
    settings, scenario, n = result.settings, result.scenario, result.workers
    compute, links = scenario.get("compute", {}), scenario.get("links", {})
    each = f", {scenario['steps']:,} each on average" if n > 1 and "steps" in scenario else ""
    budget = f"with {count(result.worker_steps, 'step')} in all{each}"
    if scenario.get("seconds"):  # how many steps that makes is what a run shows
        budget = f"for {given(scenario['seconds'])} s"
    said = [f"{count(n, 'worker')} {budget}"]
    if compute:
        said.append(_compute(compute))
    elif "compute_ms" in scenario:
        least = f"a step takes at least {given(scenario['compute_ms'])} ms" if scenario["compute_ms"] else ""
        slower = _slower(scenario.get("slow", {}), "takes", "as long").removeprefix(", ")
        said += [words for words in (least, slower) if words]
        said.append("real processes on this machine")
    if links:
        said.append(_links(links))
    if settings.get("model_bytes"):
        size = settings["model_bytes"]
        said.append(
            f"a model of {number(size / 1e6)} MB" if size >= 1e6 else f"a model of {number(size / 1e3)} kB"
        )
    if scenario.get("gradients") is False:
        said.append("timing only, no model is trained")
    if "faults" in scenario:
        faults = scenario["faults"] or ()
        said.append("; ".join(_fault(fault) for fault in faults) if faults else "no faults")
    said.append(f"seed {result.seed}")
    return f"{'. '.join(part[0].upper() + part[1:] for part in said)}."


def _compute(compute: dict[str, Any]) -> str:
    ms, spread = f"{given(compute['ms'])} ms", compute["spread"]
    kinds = {
        "constant": f"a gradient takes {ms}",
        "uniform": f"a gradient takes {ms} on average, uniform within {given(100 * spread)} % of it",
        "exponential": f"a gradient takes {ms} on average, exponentially distributed",
        "lognormal": f"a gradient takes {ms} on average, lognormal with a spread of {given(spread)}",
        "trace": "gradients take as long as in a recorded trace",
    }
    words = kinds.get(compute["kind"], f"compute times: {compute['kind']}")
    words += _slower(compute.get("slow", {}), "takes", "as long")
    for rank, own in compute.get("of", {}).items():
        words += f"; worker {rank} has {own['kind']} times of its own"
    for rank, at_s, for_s in compute.get("pauses", ()):
        words += f"; worker {rank} pauses for {given(for_s)} s at {given(at_s)} s"
    return words


def _slower(slow: dict[Any, float], verb: str, what: str) -> str:
    said = [f"worker {rank} {verb} {given(factor)} times {what}" for rank, factor in slow.items()]
    if len(said) > 6:
        said = [*said[:5], f"{len(said) - 5} more workers differ too"]
    return "".join(f", {part}" for part in said)


def _links(links: dict[str, Any]) -> str:
    words = f"links of {given(links['mbit'])} Mbit/s with {given(links['latency_ms'])} ms latency"
    if links.get("out_mbit"):
        words += f" and {given(links['out_mbit'])} Mbit/s out"
    words += _slower(links.get("slow", {}), "has", "slower ones")
    if links.get("backbone_mbit"):
        words += f", through a backbone of {given(links['backbone_mbit'])} Mbit/s"
    if links.get("workers_per_node", 1) > 1:
        words += f", {links['workers_per_node']} workers on each machine"
    return words


def _fault(fault: dict[str, Any]) -> str:
    rank, peer, factor = fault["rank"], fault.get("peer"), given(fault.get("factor", 1.0))
    link = f"the link of workers {rank} and {peer}" if peer is not None else f"the network of worker {rank}"
    kinds = {
        "crash": f"worker {rank} crashes",
        "restart": f"worker {rank} comes back",
        "cut": f"{link} is cut",
        "heal": f"{link} is whole again",
        "slow": f"worker {rank} becomes {factor} times slower",
        "throttle": f"the link of worker {rank} becomes {factor} times slower",
    }
    return f"{kinds.get(fault['kind'], fault['kind'])} at {given(fault['at_s'])} s"


def records_table(runs: Sequence[Shown]) -> list[Table]:
    """Where the records of the runs are, how each stands, and what it was made with."""
    recorded = [run for run in runs if run.records is not None]
    keys = ("workers", "seed", "freewheel", "torch", "python")
    rows = []
    for run in recorded:
        about = run.run.about
        started = f"{datetime.fromtimestamp(about.get('started', 0.0), UTC):%Y-%m-%d %H:%M} UTC"
        words = (run.label, str(about.get("name", UNKNOWN)), started, how_it_stands(run.run))
        rows.append([*words, *(str(about.get(key, UNKNOWN)) for key in keys), run.run.folder.resolve().name])
    heads = ("run", "script", "started", "state", *keys, "folder")
    return [Table("runs", heads, rows, frozenset({0, 1, 2, 3, 9}), whose=recorded)] if rows else []


# -- workers and events --


def workers_table(run: Shown) -> Table:
    """One row for every life of every worker."""
    lives = defaultdict[int, list[dict[str, Any]]](list)
    for place, life in enumerate(run.result.by_worker):
        lives[life.get("rank", place)].append(life)
    heads: list[str] = []
    rows = []
    for rank, those in sorted(lives.items()):
        for which, life in enumerate(those, start=1):
            state = UNKNOWN
            if run.records is not None and rank in run.run.workers:
                state = run.run.state(rank) if life is those[-1] else "dead"
            name = f"{rank}" if len(those) == 1 else f"{rank}, life {which}"
            cells = {"worker": name, "state": state, **_worker(life)}
            heads = list(cells)
            rows.append(list(cells.values()))
    return Table(run.label, heads, rows, frozenset({0, 1})).without_empty()


def _worker(life: dict[str, Any]) -> dict[str, str]:
    alive_s = life.get("elapsed_s") or 0.0
    blocked, exchanges = life.get("blocked_s") or {}, life.get("exchanges") or {}

    def part(value: float | None) -> str:
        return share(value / alive_s) if alive_s and value is not None else UNKNOWN

    return {
        "steps": number(life.get("steps")),
        "steps/s": number(life["steps"] / alive_s if alive_s and "steps" in life else None),
        "computing": part(life.get("compute_s")),
        **{
            f"waiting for {cause}{'s' * (cause == 'checkpoint')}": part(blocked.get(cause) or None)
            for cause in CAUSES
        },
        "staleness mean": number(life.get("staleness_mean")),
        "staleness max": number(life.get("staleness_max")),
        "discrepancy max": number(life.get("discrepancy_max") or None),
        "exchanges": number(exchanges.get("done") or None),
        "not done": number(sum(many for what, many in exchanges.items() if what != "done") or None),
        "merges": number((life.get("merges") or {}).get("done") or None),
        "MB out": number(life["bytes_out"] / 1e6 if "bytes_out" in life else None),
        "last loss": number(life.get("loss")),
    }


def events_table(run: Shown) -> Table:
    """What happened in a run, in order."""
    events = run.run.events if run.records is not None else []
    rows = [
        [
            f"{max(0.0, event.time - run.began_s):,.2f}",
            event.what,
            ", ".join(str(rank) for rank in (event.rank, event.peer) if rank is not None) or UNKNOWN,
            event.noticed_by(),
            event.text or UNKNOWN,
        ]
        for event in events
    ]
    heads = ("at, s", "what", "worker", "noticed by", "")
    return Table(run.label, heads, rows, frozenset({1, 2, 3, 4})).without_empty()


# -- theory --


def theory_table(runs: Sequence[Shown]) -> tuple[str, list[Table]]:
    """What was measured against what the papers say: how many hold, and a row for each."""
    found = [(run, bound) for run in runs for bound in bounds(run.result)]
    if not found:
        return "No theory speaks about a figure that was measured here.", []
    broken = sum(not bound.holds for _, bound in found)
    said = f"All {len(found)} hold" if len(found) > 1 else "The only bound holds"
    if broken:
        said = f"{broken} of {len(found)} {'does' if broken == 1 else 'do'} not hold"
    said = f"{said}. “About” means within 15 %. Only what follows from the figures of a run is compared."
    rows = [
        [
            run.label,
            bound.name,
            f"{number(bound.measured)} {bound.unit}".rstrip(),
            f"{bound.kind} {number(bound.bound)} {bound.unit}".rstrip(),
            number(bound.share if bound.bound else None),
            "✓ yes" if bound.holds else "✗ no",
            bound.source,
        ]
        for run, bound in found
    ]
    heads = ("strategy", "what", "measured", "theory", "measured / theory", "holds", "source")
    return said, [Table("theory", heads, rows, frozenset({0, 1, 5, 6}), whose=[run for run, _ in found])]


# -- settings --


def settings_tables(runs: Sequence[Shown]) -> list[Table]:
    """The settings of all runs: what is common first."""
    scenarios = [flatten(run.result.settings.get("scenario", {})) for run in runs]
    common = len(runs) > 1 and bool(scenarios[0]) and all(one == scenarios[0] for one in scenarios)
    parts = {"Scenario of all runs": scenarios[0]} if common else {}
    for run in runs:
        settings = {k: v for k, v in run.result.settings.items() if not (common and k == "scenario")}
        about = run.run.about if run.records is not None else {}
        made = ("command", "freewheel", "torch", "python")
        rows: dict[str, str] = {key: str(about[key]) for key in made if key in about}
        rows |= {"seed": str(run.result.seed)} | flatten(settings) | _mixing(run.result)
        parts[run.label] = rows | ({"trace sha256": trace} if (trace := run.result.trace_sha256) else {})
    heads = ("setting", "value")
    return [Table(name, heads, [*map(list, rows.items())], frozenset({0, 1})) for name, rows in parts.items()]


def _mixing(result: Result) -> dict[str, str]:
    """How fast the graph of a run mixes, where it has one that can be built from its text."""
    spec = result.settings.get("strategy", {}).get("topology")
    if not isinstance(spec, str):
        return {}
    try:
        graph = topology.resolve(spec, result.workers)
    except ConfigError:
        return {}  # a graph made in Python is recorded by its name only
    rows = {"spectral gap of the topology": number(graph.spectral_gap)}
    if result.strategy == "adpsgd":
        rows["ρ of the topology (AD-PSGD, assumption 3)"] = number(theory.rho(graph))
    return rows
