"""What was run, in words: workers, their compute times, links and faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freewheel.numbers import count, given, listed, number
from freewheel.records.result import Result
from freewheel.show.shown import differing, flatten


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
    said = [f"{count(n, 'worker')} with {count(result.worker_steps, 'step')} in all{each}"]
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
