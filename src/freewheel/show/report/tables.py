"""The tables of a report, as plain text cells: a page and a markdown text show the same ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from freewheel import theory, topology
from freewheel.errors import ConfigError
from freewheel.records.result import Result
from freewheel.show.bounds import Bound, bounds
from freewheel.show.report.runs import Shown, flatten, same_budget, unlike
from freewheel.show.report.words import number, percent, standing
from freewheel.show.versus import versus


@dataclass(frozen=True)
class Table:
    """Rows of cells under heads. The first cell of a row says what it is about."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: frozenset[int] = frozenset({0})
    """The columns that are words; numbers stand on the right."""
    marks: frozenset[tuple[int, int]] = frozenset()
    """Row and column of the best figures."""
    whose: Sequence[Shown] = ()
    """The run each row is about, where rows are about runs."""

    def without_empty(self) -> Table:
        """Without the columns nobody has a value for."""
        kept = [at for at in range(len(self.heads)) if not at or any(row[at] != "–" for row in self.rows)]
        return Table(
            self.name,
            [self.heads[at] for at in kept],
            [[row[at] for at in kept] for row in self.rows],
            frozenset(place for place, at in enumerate(kept) if at in self.left),
            whose=self.whose,
        )


@dataclass(frozen=True)
class _Column:
    """A figure of every run, how it is written, and which of its values is the best."""

    head: str
    value: Callable[[Result], float | None]
    text: Callable[[float | None], str] = number
    best: Callable[[Iterable[float]], float] | None = None
    of_budget: bool = False
    """Whether it can be compared only between runs of as many steps."""


_COLUMNS = (
    _Column("seconds", lambda r: r.virtual_s, best=min, of_budget=True),
    _Column("steps/s", lambda r: r.steps_per_s, best=max),
    _Column("share of\xa0ideal", lambda r: r.ideal_share, percent, max),
    _Column("idle", lambda r: r.idle_share, percent, min),
    _Column("staleness mean", lambda r: r.staleness_mean),
    _Column("staleness max", lambda r: r.staleness_max),
    _Column("discrepancy", lambda r: None if r.loss is None else r.discrepancy_max, best=min),
    _Column("kB/step", lambda r: r.bytes_per_step / 1e3, best=min),
    _Column("loss", lambda r: r.loss, best=min, of_budget=True),
    _Column("accuracy", lambda r: r.accuracy, percent, max, of_budget=True),
    _Column("s to target", lambda r: r.target_s, best=min),
)


def results_table(runs: Sequence[Shown]) -> Table:
    """All figures of all runs; the best of each column is marked, where they can be compared."""
    clocks = len({run.clock for run in runs}) > 1
    unranked, same = bool(unlike(runs)), same_budget(runs)
    columns = [c for c in _COLUMNS if c.head != "s to target" or any(run.result.target for run in runs)]
    columns += _beside(runs)
    rows = [
        [run.label, str(run.result.settings.get("waits_for", "–")), *([run.clock] if clocks else [])]
        for run in runs
    ]
    heads = ["strategy", "waits for", *(["clock"] if clocks else [])]
    left = frozenset(range(len(heads)))
    marks: set[tuple[int, int]] = set()
    for at, column in enumerate(columns, start=len(heads)):
        values = [column.value(run.result) for run in runs]
        texts = [column.text(value) for value in values]
        known = [value for value in values if value is not None]
        # What reads the same is as good; where all read the same there is no best.
        ranked = column.best and not unranked and (same or not column.of_budget)
        best = (
            column.text(column.best(known))
            if column.best and ranked and known and len(set(texts)) > 1
            else None
        )
        marks |= {(place, at) for place, text in enumerate(texts) if text == best}
        for row, text in zip(rows, texts, strict=True):
            row.append(text)
    heads += [column.head for column in columns]
    return Table("figures of all runs", heads, rows, left, frozenset(marks), runs)


def _beside(runs: Sequence[Shown]) -> list[_Column]:
    """Figures that are a run's among the others."""
    beside = versus([run.result for run in runs])
    if beside is None or beside.what != "accuracy":
        return []
    rows = {id(run.result): row for run, row in zip(runs, beside.rows, strict=True)}
    found = [
        _Column("accuracy at equal\xa0samples", lambda r: rows[id(r)].equal_samples, percent, max),
        _Column("accuracy at equal\xa0time", lambda r: rows[id(r)].equal_time, percent, max),
    ]
    if beside.baseline is not None and not any(row.at_least for row in beside.rows):
        found.append(_Column(f"speed-up over {beside.baseline}", lambda r: rows[id(r)].speedup, best=max))
    return found


def records_table(runs: Sequence[Shown]) -> Table | None:
    """Where the records of the runs are, how each stands, and what it was made with."""
    recorded = [run for run in runs if run.run is not None]
    if not recorded:
        return None
    keys = ("workers", "seed", "freewheel", "torch", "python")
    heads = ("run", "script", "started", "state", *keys, "folder")
    rows = []
    for run in recorded:
        assert run.run is not None
        about = run.run.about
        started = datetime.fromtimestamp(about.get("started", 0.0), UTC)
        own = [str(about.get(key, "–")) for key in keys]
        words = (run.label, str(about.get("name", "–")), f"{started:%Y-%m-%d %H:%M} UTC", standing(run.run))
        rows.append([*words, *own, run.run.folder.resolve().name])
    return Table("runs", heads, rows, frozenset({0, 1, 2, 3, 9}), whose=recorded)


# -- workers and events --

_WORKERS = (
    "worker", "state", "steps", "steps/s", "computing", "blocked by peers", "blocked by data",
    "blocked by checkpoints",
    "staleness mean", "staleness max", "discrepancy max", "exchanges", "not done", "merges", "MB out",
    "last loss",
)  # fmt: skip


def workers_table(run: Shown) -> Table:
    """One row for every life of every worker."""
    lives = defaultdict[int, list[dict[str, Any]]](list)
    for place, life in enumerate(run.result.by_worker):
        lives[life.get("rank", place)].append(life)
    rows = []
    for rank, those in sorted(lives.items()):
        for which, life in enumerate(those, start=1):
            state = "–"
            if run.run is not None and rank in run.run.workers:
                state = run.run.state(rank) if life is those[-1] else "dead"
            name = f"{rank}" if len(those) == 1 else f"{rank}, life {which}"
            rows.append([name, state, *_worker(life)])
    return Table(run.label, _WORKERS, rows, frozenset({0, 1})).without_empty()


def _worker(life: dict[str, Any]) -> list[str]:
    alive_s = life.get("elapsed_s") or life.get("alive_s") or 0.0
    blocked = life.get("blocked_s") or {}

    def share(value: float | None) -> str:
        return percent(value / alive_s) if alive_s and value is not None else "–"

    exchanges, merges = life.get("exchanges") or {}, life.get("merges") or {}
    failed = sum(count for what, count in exchanges.items() if what != "done")
    mean = life.get("staleness_mean")
    if mean is None and life.get("staleness_count"):
        mean = life["staleness_sum"] / life["staleness_count"]
    return [
        number(life.get("steps")),
        number(life["steps"] / alive_s) if alive_s and "steps" in life else "–",
        share(life.get("compute_s")),
        *(share(blocked.get(cause) or None) for cause in ("peers", "data", "checkpoint")),
        number(mean),
        number(life.get("staleness_max")),
        number(life.get("discrepancy_max") or None),
        number(exchanges.get("done") or None),
        number(failed or None),
        number(merges.get("done") or None),
        number(life["bytes_out"] / 1e6) if "bytes_out" in life else "–",
        number(life.get("loss")),
    ]


def events_table(run: Shown) -> Table | None:
    """What happened in a run, in order."""
    if run.run is None or not run.run.events:
        return None
    began_s = run.run.began_s
    rows = [
        [
            f"{max(0.0, event.time - began_s):,.2f}",
            event.what,
            "–"
            if event.rank is None
            else ", ".join(str(one) for one in (event.rank, event.peer) if one is not None),
            _noticed(event.by),
            event.text or "–",
        ]
        for event in run.run.events
    ]
    heads = ("at, s", "what", "worker", "noticed by", "")
    return Table(run.label, heads, rows, frozenset({1, 2, 3, 4})).without_empty()


def _noticed(by: Sequence[int | str]) -> str:
    ranks = sorted(one for one in by if isinstance(one, int))
    others = [str(one) for one in by if not isinstance(one, int)]
    if len(ranks) > 6:
        return ", ".join([f"{len(ranks)} workers", *others])
    return ", ".join([*map(str, ranks), *others])


# -- theory --


def theory_table(runs: Sequence[Shown]) -> tuple[str, Table | None]:
    """What was measured against what the papers say: how many hold, and a row for each."""
    found = [(run, bound) for run in runs for bound in bounds(run.result)]
    if not found:
        return "No theory speaks about a figure that was measured here.", None
    broken = sum(not bound.holds for _, bound in found)
    said = f"All {len(found)} hold" if len(found) > 1 else "The only bound holds"
    if broken:
        said = f"{broken} of {len(found)} {'does' if broken == 1 else 'do'} not hold"
    said = f"{said}. “About” means within 15 %. Only what follows from the figures of a run is compared."
    heads = ("strategy", "what", "measured", "theory", "measured / theory", "holds", "source")
    rows = [[run.label, *_compared(bound)] for run, bound in found]
    return said, Table("theory", heads, rows, frozenset({0, 1, 5, 6}), whose=[run for run, _ in found])


def _compared(bound: Bound) -> list[str]:
    unit = f" {bound.unit}" if bound.unit else ""
    return [
        bound.name,
        f"{number(bound.measured)}{unit}",
        f"{bound.kind} {number(bound.bound)}{unit}",
        number(bound.share) if bound.bound else "–",
        "✓ yes" if bound.holds else "✗ no",
        bound.source,
    ]


# -- settings --


def settings_tables(runs: Sequence[Shown]) -> list[Table]:
    """The settings of all runs: what is common first."""
    scenarios = [flatten(run.result.settings.get("scenario", {})) for run in runs]
    common = len(runs) > 1 and bool(scenarios[0]) and all(one == scenarios[0] for one in scenarios)
    parts = [_settings("Scenario of all runs", scenarios[0])] if common else []
    for run in runs:
        settings = {k: v for k, v in run.result.settings.items() if not (common and k == "scenario")}
        about = run.run.about if run.run is not None else {}
        made = ("command", "freewheel", "torch", "python")
        rows: dict[str, str] = {key: str(about[key]) for key in made if key in about}
        rows |= {"seed": str(run.result.seed)} | flatten(settings) | _mixing(run.result)
        if run.result.trace_sha256:
            rows["trace sha256"] = run.result.trace_sha256
        parts.append(_settings(run.label, rows))
    return parts


def _settings(name: str, rows: dict[str, str]) -> Table:
    return Table(name, ("setting", "value"), [list(row) for row in rows.items()], frozenset({0, 1}))


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


def versions() -> str:
    """Which versions made the report."""
    said = []
    for package in ("freewheel", "torch", "numpy", "plotly"):
        try:
            said.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # run from its sources
            continue
    return f"Made with {', '.join(said)}."
