"""What was run and what came of it, in sentences: who was fastest, who reached the target, who died."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from freewheel.numbers import count, given, listed, number, share
from freewheel.records.result import Result
from freewheel.records.run import DEATHS, Run
from freewheel.show.figures.palette import EVENTS, GRAVE
from freewheel.show.rates import standing
from freewheel.show.shown import Shown, differing, flatten
from freewheel.show.tables import unlike
from freewheel.show.versus import baseline_of, race

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
    """The first of them, and how many more there are."""
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
