"""The tables of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata

from freewheel import theory, topology
from freewheel.errors import ConfigError
from freewheel.observe.bounds import Bound, bounds
from freewheel.observe.report.figures import swatch
from freewheel.observe.report.runs import Run, flatten
from freewheel.observe.report.words import number, percent
from freewheel.observe.result import Result


@dataclass(frozen=True)
class _Column:
    """A figure of every run, how it is written, and which of its values is the best."""

    head: str
    value: Callable[[Result], float | None]
    text: Callable[[float | None], str] = number
    best: Callable[[Iterable[float]], float] | None = None


_COLUMNS = (
    _Column("seconds", lambda r: r.virtual_s, best=min),
    _Column("steps/s", lambda r: r.steps_per_s, best=max),
    _Column("share of&nbsp;ideal", lambda r: r.ideal_share, percent, max),
    _Column("idle", lambda r: r.idle_share, percent, min),
    _Column("staleness mean", lambda r: r.staleness_mean),
    _Column("staleness max", lambda r: r.staleness_max),
    _Column("discrepancy", lambda r: None if r.loss is None else r.discrepancy_max, best=min),
    _Column("kB/step", lambda r: r.bytes_per_step / 1e3, best=min),
    _Column("loss", lambda r: r.loss, best=min),
    _Column("accuracy", lambda r: r.accuracy, percent, max),
    _Column("s to target", lambda r: r.target_s, best=min),
)


def results_table(runs: Sequence[Run]) -> str:
    """All figures of all runs; the best of each column is marked."""
    columns = [c for c in _COLUMNS if c.head != "s to target" or any(run.result.target for run in runs)]
    head = "".join(f"<th>{name}</th>" for name in ("strategy", "waits for", *(c.head for c in columns)))
    cells: list[list[str]] = []
    for column in columns:
        values = [column.value(run.result) for run in runs]
        texts = [column.text(value) for value in values]
        known = [value for value in values if value is not None]
        # What reads the same is as good; where all read the same there is no best.
        best = column.text(column.best(known)) if column.best and known and len(set(texts)) > 1 else None
        marks = [' class="best"' if text == best else "" for text in texts]
        cells.append([f"<td{mark}>{text}</td>" for mark, text in zip(marks, texts, strict=True)])
    rows = []
    for place, run in enumerate(runs):
        waits = escape(str(run.result.settings.get("waits_for", "–")))
        row = "".join(column[place] for column in cells)
        rows.append(f'<tr><th scope="row">{swatch(run)}{escape(run.label)}</th><td>{waits}</td>{row}</tr>')
    return _scrolling("figures of all runs", f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>")


def theory_table(runs: Sequence[Run]) -> str:
    """What was measured against what the papers say."""
    found = [(run, bound) for run in runs for bound in bounds(run.result)]
    if not found:
        return "<p>No theory speaks about a figure that was measured here.</p>"
    broken = sum(not bound.holds for _, bound in found)
    said = (
        f"All {len(found)} hold"
        if not broken
        else f"{broken} of {len(found)} {'does' if broken == 1 else 'do'} not hold"
    )
    said = f"{said}. “About” means within 15 %. Only what follows from the figures of a run is compared."
    heads = ("strategy", "what", "measured", "theory", "measured / theory", "holds", "source")
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = "".join(_compared(run, bound) for run, bound in found)
    table = _scrolling("theory", f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>", "theory")
    return f"<p>{said}</p>{table}"


def _compared(run: Run, bound: Bound) -> str:
    unit = f" {bound.unit}" if bound.unit else ""
    verdict = '<td class="yes">✓ yes</td>' if bound.holds else '<td class="no">✗ no</td>'
    share = number(bound.share) if bound.bound else "–"
    return (
        f'<tr><th scope="row">{swatch(run)}{escape(run.label)}</th><td>{escape(bound.name)}</td>'
        f"<td>{number(bound.measured)}{escape(unit)}</td>"
        f"<td>{bound.kind} {number(bound.bound)}{escape(unit)}</td>"
        f"<td>{share}</td>{verdict}<td>{escape(bound.source)}</td></tr>"
    )


def settings_tables(runs: Sequence[Run]) -> str:
    """The settings of every run, folded."""
    scenarios = [flatten(run.result.settings.get("scenario", {})) for run in runs]
    common = all(scenario == scenarios[0] for scenario in scenarios)
    parts = [_details("Scenario of all runs", scenarios[0])] if common else []
    for run in runs:
        settings = {k: v for k, v in run.result.settings.items() if not (common and k == "scenario")}
        rows = flatten(settings) | _mixing(run.result) | {"trace sha256": run.result.trace_sha256}
        parts.append(_details(run.label, rows))
    return "".join(parts)


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


def _details(title: str, rows: dict[str, str]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(value)}</td></tr>' for key, value in rows.items()
    )
    table = _scrolling(title, f"<tbody>{body}</tbody>", "settings")
    return f"<details><summary>{escape(title)}</summary>{table}</details>"


def _scrolling(name: str, table: str, kind: str = "") -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f'<table class="{kind}">{table}</table></div>'
    )


def versions() -> str:
    """Which versions made the report."""
    said = []
    for package in ("freewheel", "torch", "numpy", "plotly"):
        try:
            said.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # run from its sources
            continue
    return f"Made with {', '.join(said)}."
