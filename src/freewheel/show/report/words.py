"""Numbers and settings in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from freewheel.numbers import given
from freewheel.records.result import Result
from freewheel.records.run import DEATHS, Run
from freewheel.show.report.runs import Shown, differing, flatten, unlike


def number(value: float | None) -> str:
    """A number to read: three significant digits, whole numbers as they are, never an exponent like 1e+00."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-4:
        return _power(value)
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def _power(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def percent(value: float | None) -> str:
    """A share in per cent."""
    return "–" if value is None else f"{100 * value:.1f} %"


def listed(words: Sequence[str]) -> str:
    """Words with commas and an "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def clock(results: Sequence[Result]) -> str:
    """Whose seconds these are: "virtual", "wall-clock", or each run's own."""
    real = {result.settings.get("clock") == "wall" for result in results}
    if len(real) > 1:
        return "wall-clock or, of simulated runs, virtual"
    return "wall-clock" if real.pop() else "virtual"


def scenario_in_words(results: Sequence[Result]) -> str:
    """What was simulated, in words."""
    words = _scenario(results[0])
    differ = differing(
        [
            {"workers": str(result.workers)} | flatten(result.settings.get("scenario", {}))
            for result in results
        ]
    )
    if not differ:
        return words
    what = listed(differ) if len(differ) <= 6 else f"{len(differ)} settings"
    return f"The runs differ in {what}; their settings are below. The first: {words}"


def _scenario(result: Result) -> str:
    settings, scenario, n = result.settings, result.scenario, result.workers
    compute, links = scenario.get("compute", {}), scenario.get("links", {})
    each = f", {scenario['steps']:,} each on average" if n > 1 and "steps" in scenario else ""
    said = [f"{_count(n, 'worker')} with {_count(result.worker_steps, 'step')} in all{each}"]
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
        said.append(f"a model of {_size(settings['model_bytes'])}")
    if scenario.get("gradients") is False:
        said.append("timing only, no model is trained")
    if "faults" in scenario:
        faults = scenario["faults"] or ()
        said.append("; ".join(_fault(fault) for fault in faults) if faults else "no faults")
    said.append(f"seed {result.seed}")
    return f"{'. '.join(part[0].upper() + part[1:] for part in said)}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _size(size_bytes: float) -> str:
    return f"{number(size_bytes / 1e6)} MB" if size_bytes >= 1e6 else f"{number(size_bytes / 1e3)} kB"


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


def standing(run: Run) -> str:
    """How a run stands."""
    if run.live:
        return f"still running, as of {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    states = Counter(run.state(rank) for rank in run.workers)
    if list(states) == ["finished"]:
        return "finished"
    ended = "killed, or it hangs" if states["silent"] else "ended"
    return f"{ended}, with " + listed([f"{_count(count, 'worker')} {name}" for name, count in states.items()])


def still_running(runs: Sequence[Shown]) -> str:
    """Which runs go on, and since when that is no longer told; nothing where all have ended."""
    live = [run for run in runs if run.run is not None and run.run.live]
    if not live:
        return ""
    who = "" if len(runs) == 1 else f": {listed([run.label for run in live])}"
    as_of = standing(live[0].run).removeprefix("still running, ") if live[0].run else ""
    return f"Still running{who}, {as_of}. All figures are those up to then."


_HAPPENED = {
    "died": "died",
    "failed": "failed",
    "cut": "was cut off",
    "left": "left",
    "joined": "joined",
    "restarted": "was started again",
    "resumed": "resumed",
}
"""The events that are told in words; the others are in the table only."""
TOLD = 5


def happened(run: Run) -> str:
    """Who died, came and left, a sentence for each; nothing where nobody did."""
    told: dict[int, list[str]] = {}
    links: dict[str, None] = {}
    for event in run.events:
        if event.link:
            links[f"{event.link[0].upper()}{event.link[1:]} at {_at(event.time - run.began_s)}."] = None
        elif event.what in _HAPPENED and event.rank is not None:
            words = f"{_HAPPENED[event.what]} at {_at(event.time - run.began_s)}"
            told.setdefault(event.rank, []).append(words)
    said = [f"Worker {rank} {listed(_some(words))}." for rank, words in told.items()]
    if len(said) > TOLD:
        said[TOLD - 1 :] = [f"The same befell {len(said) - TOLD + 1} other workers."]
    cuts = list(links)
    if len(cuts) > TOLD:
        cuts[TOLD - 1 :] = [f"The same befell {len(cuts) - TOLD + 1} other links."]
    return " ".join([*said, *cuts])


def _at(seconds: float) -> str:
    seconds = max(0.0, seconds)  # some resume a moment before the first begins
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _some(words: list[str]) -> list[str]:
    return words if len(words) <= TOLD else [*words[: TOLD - 1], f"{len(words) - TOLD + 1} times more"]


def findings(runs: Sequence[Shown]) -> list[str]:
    """The main result in a few sentences; then what happened, a paragraph for each run."""
    if why := unlike(runs):
        return [" ".join([why, *_dead(runs)]), *_happenings(runs)]
    reference = next((run for run in runs if run.result.strategy == "allreduce"), None)
    said = [_first_to_target(runs, reference)] if any(run.result.target for run in runs) else []
    top = max(run.result.steps_per_s for run in runs)
    best = [run for run in runs if run.result.steps_per_s >= 0.999 * top]
    share = percent(best[0].result.ideal_share)
    if len(runs) == 1:
        idle = percent(runs[0].result.idle_share)
        said.append(
            f"{runs[0].label} makes {number(top)} worker-steps per second, {share} of what its workers can "
            f"do when none ever waits; they are idle for {idle} of the time."
        )
        return [" ".join([*said, *_dead(runs)]), *_happenings(runs)]
    rate = f"{listed([run.label for run in best])} {'makes' if len(best) == 1 else 'make'} the most "
    rate += f"worker-steps per second: {number(top)}, {share} of what they can do when none ever waits"
    if reference is not None and reference not in best:
        slow = reference.result
        rate += f", and {number(top / slow.steps_per_s)} times as many as {reference.label}, whose workers "
        rate += f"are idle for {percent(slow.idle_share)} of the time"
    said.append(f"{rate}.")
    return [" ".join([*said, *_dead(runs)]), *_happenings(runs)]


def _dead(runs: Sequence[Shown]) -> list[str]:
    """How the ideal counts workers that died, where some did."""
    died = any(event.what in DEATHS for run in runs if run.run is not None for event in run.run.events)
    return ["The ideal is of all workers for the whole time: a dead one's share is lost."] if died else []


def _happenings(runs: Sequence[Shown]) -> Iterator[str]:
    told: dict[str, list[str]] = {}
    for run in runs:
        if run.run is not None and (words := happened(run.run)):
            told.setdefault(words, []).append(run.label)
    for words, labels in told.items():
        who = "All runs" if len(labels) == len(runs) else listed(labels)
        yield words if len(runs) == 1 else f"{who}: {words}"


def _first_to_target(runs: Sequence[Shown], reference: Shown | None) -> str:
    target = f"{given(100 * next(run.result.target for run in runs if run.result.target))} %"
    reached = sorted(
        ((run.result.target_s, run) for run in runs if run.result.target_s is not None),
        key=lambda pair: pair[0],
    )
    if not reached:
        return f"No run reaches the target accuracy of {target}."
    first_s, first = reached[0]
    words = f"{first.label} reaches the target accuracy of {target} "
    words += f"{'first, ' if len(runs) > 1 else ''}after {number(first_s)} s"
    if reference is not None and reference is not first:
        slow_s = reference.result.target_s
        if slow_s is None:
            words += f"; {reference.label} does not reach it"
        elif first_s:
            words += f", {number(slow_s / first_s)} times as fast as {reference.label}"
    trying = [run for run in runs if run.result.target and run is not reference]
    late = [run.label for run in trying if run.result.target_s is None]
    if late:
        words += f"; {listed(late)} {'does' if len(late) == 1 else 'do'} not reach it in this run"
    return f"{words}."
