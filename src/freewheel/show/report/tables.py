"""The tables of a report beside the one of all results: runs, workers, events, theory, settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from freewheel import theory, topology
from freewheel.errors import ConfigError
from freewheel.numbers import UNKNOWN, number, share
from freewheel.records.counters import CAUSES
from freewheel.records.result import Result
from freewheel.show.bounds import bounds
from freewheel.show.report.words import how_it_stands
from freewheel.show.shown import Shown, flatten
from freewheel.show.tables import Table


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
    """The cells of a life under their heads."""
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
