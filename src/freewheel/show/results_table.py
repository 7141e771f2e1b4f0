"""Results as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from freewheel.numbers import share, short
from freewheel.records.result import Result
from freewheel.show.shown import ranked
from freewheel.show.versus import Versus, versus


def results_tables(results: Sequence[Result], width: int) -> list[Table | str]:
    """One row per strategy: how fast, how well, and, of several that learn, what that is worth.

    Of one the first two are one table where the width allows. Words explain the last.
    """
    labels = [run.label for run in ranked(results)]
    clock = results[0].settings.get("clock", "virtual")
    timing: list[tuple[str, list[str]]] = [
        ("strategy", labels),
        ("waits for", [r.settings["waits_for"] for r in results]),
        (f"{clock} s", [short(r.virtual_s, 4) for r in results]),
        ("steps/s", [short(r.steps_per_s, 4) for r in results]),
        ("of ideal", [share(r.ideal_share) for r in results]),
        ("idle", [share(r.idle_share) for r in results]),
        ("kB/step", [short(r.bytes_per_step / 1e3) for r in results]),
    ]
    learning: list[tuple[str, list[str]]] = [
        ("lr", [short(r.settings.get("lr")) for r in results]),
        ("stale mean", [short(r.staleness_mean) for r in results]),
        ("stale max", [short(r.staleness_max) for r in results]),
        ("discrep.", [short(r.discrepancy_max) if r.loss is not None else "–" for r in results]),
        ("loss", [short(r.loss) for r in results]),
    ]
    trace = ("trace", [r.trace_sha256[:10] or "–" for r in results])
    beside = versus(results)
    if beside is None or beside.what == "loss":
        learning.append(("accuracy", [share(r.accuracy) for r in results]))
    target = next((r.target for r in results if r.target is not None), None)
    if beside is None and target is not None:
        reached = [f"{r.target_s:.3f}" if r.target_s is not None else "never" for r in results]
        learning.append((f"s to {share(target)}", reached))
    if beside is None and _width([*timing, *learning, trace]) <= width:
        return [_table([*timing, *learning, trace])]
    if _width([*timing, trace]) <= width:
        timing.append(trace)
    tables: list[Table | str] = [_table(timing), _table(timing[:1] + learning)]
    return tables if beside is None else [*tables, *_versus(labels, beside)]


def _versus(labels: list[str], beside: Versus) -> list[Table | str]:
    """What they learned, with equally many samples and in equal time, and how much sooner."""
    shown = share if beside.what == "accuracy" else short
    columns = [
        ("strategy", labels),
        (f"{beside.what} at equal samples", [shown(row.equal_samples) for row in beside.rows]),
        ("at equal time", [shown(row.equal_time) for row in beside.rows]),
    ]
    said = [f"Equal samples: the first {beside.worker_steps:,.0f} steps of all workers together."]
    said.append(f"Equal time: the first {short(beside.time_s, 4)} s.")
    if beside.target is not None and beside.what == "accuracy":
        reached = [short(row.target_s, 4) if row.target_s is not None else "never" for row in beside.rows]
        columns.append((f"s to {share(beside.target)}", reached))
        if not beside.own_target:
            said.append(f"{share(beside.target)}: what {beside.baseline} ended with, less half a point.")
    if beside.baseline is not None:
        times = [f"{'> ' if row.at_least else ''}{short(row.speedup)}" for row in beside.rows]
        columns.append((f"speed-up over {beside.baseline}", times))
    return [_table(columns), "\n".join(said)]


def _width(columns: list[tuple[str, list[str]]]) -> int:
    return sum(max(map(len, (name, *cells))) + 2 for name, cells in columns)


def _table(columns: list[tuple[str, list[str]]]) -> Table:
    """A table without the columns nobody has a value for."""
    columns = [(name, cells) for name, cells in columns if any(cell != "–" for cell in cells)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, _ in columns:
        table.add_column(name, justify="left" if name in ("strategy", "waits for") else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table
