"""What can be said of each worker in one row, and of all of them: numbers, and the columns people see.

While a run goes on, rates are those of the last seconds; once it has ended, of all its time. In virtual time,
which may pass in no time, they are always of all its time.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freewheel.numbers import UNKNOWN, column, share
from freewheel.records.counters import CAUSES
from freewheel.records.result import staleness_mean
from freewheel.records.run import Run
from freewheel.show import rates
from freewheel.show.rates import elapsed_s, rate

SLOW_S = 30.0  # the time for rates of workers that make less than one step a second
DRAWN_S = 60.0  # how much of a live run is drawn
GOING = ("joining", "training")
COUNTED = ("steps", "exchanges", "merges")


@dataclass(frozen=True)
class Row:
    """One worker; with rank None all of them. None: not known, or nothing that goes on."""

    rank: int | None
    state: str
    steps: float = 0.0
    steps_per_s: float | None = None
    blocked_share: float | None = None
    staleness: float | None = None
    discrepancy: float | None = None
    exchanges: float = 0.0
    merges: float = 0.0
    mb_per_s: float | None = None
    loss: float | None = None
    windows: str = ""  # how its vectors travel, and to how many peers: device 3, or host 2 · stream 1
    node: str = ""  # the machine it is on
    restarts: int = 0
    speed: float = 0.0  # steps per second over the whole life


def rows(run: Run) -> list[Row]:
    live = run.live
    return [_row(run, rank, live) for rank in run.ranks]


def _row(run: Run, rank: int, live: bool) -> Row:
    track, state = run.workers.get(rank), run.state(rank)
    if track is None:
        return Row(rank, state)
    latest = track.latest
    over_s = rates.LATELY_S if live and run.clock == "wall" else math.inf
    if (rate(track, "steps", over_s) or 0.0) < 1.0:
        over_s = max(over_s, SLOW_S)
    # The last rate of a worker that no longer trains is not a present one.
    now = {
        name: None if live and state != "training" else rate(track, name, over_s)
        for name in ("steps", "bytes_out", *(f"{cause}_s" for cause in CAUSES))
    }
    waited = rates.summed(now[f"{cause}_s"] for cause in CAUSES)
    counted: dict[str, Any] = {name: track.value(name) or 0.0 for name in COUNTED}
    windows = Counter(map(str, (latest.get("windows") or {}).values()))
    return Row(
        rank,
        state,
        steps_per_s=now["steps"],
        blocked_share=None if waited is None else min(1.0, waited),
        staleness=latest.get("staleness_mean"),
        discrepancy=latest.get("discrepancy"),
        mb_per_s=None if now["bytes_out"] is None else now["bytes_out"] / 1e6,
        loss=latest.get("loss"),
        windows=" · ".join(f"{kind} {count}" for kind, count in sorted(windows.items())),
        node=str(latest.get("node") or ""),
        restarts=max(0, track.life - 1),
        speed=latest.get("steps_per_s") or 0.0,
        **counted,
    )


def total(run: Run, all_rows: Sequence[Row]) -> Row:
    """Sums; the mean of shares and losses, the largest discrepancy."""
    states = Counter(row.state for row in all_rows)
    counted: dict[str, Any] = {name: sum(getattr(row, name) for row in all_rows) for name in COUNTED}
    per_s = rates.summed(row.steps_per_s for row in all_rows)
    sent = rates.summed(row.mb_per_s for row in all_rows)
    waited = rates.mean(row.blocked_share for row in all_rows)
    if not run.live and elapsed_s(run) > 0:  # workers came and went: their rates do not add up
        per_s, sent = rates.rates(run)[0], run.total("bytes_out") / elapsed_s(run) / 1e6
        waited = sum(rates.blocked(run.workers.values()).values())
    present = [row for row in all_rows if row.state not in ("dead", "silent")] or all_rows
    return Row(
        None,
        f"{states['training' if run.live else 'finished']} of {len(all_rows)}",
        steps_per_s=per_s,
        blocked_share=waited,
        staleness=staleness_mean(run.lives),
        discrepancy=max((row.discrepancy for row in all_rows if row.discrepancy is not None), default=None),
        mb_per_s=sent,
        loss=rates.mean(row.loss for row in present),
        restarts=sum(row.restarts for row in all_rows),
        **counted,
    )


@dataclass
class Column:
    """A cell for each row, and what it is sorted by."""

    key: str
    cells: list[str]
    values: list[Any]


def _words(texts: list[str]) -> list[str]:
    return [printable(one) or UNKNOWN for one in texts]


def _counts(values: list[float]) -> list[str]:
    return [f"{value:,.0f}" if any(values) else UNKNOWN for value in values]


# The table of workers: which field of a row, and what is written of all its values.
COLUMNS: dict[str, tuple[str, Callable[[list[Any]], list[str]]]] = {
    "rank": ("rank", lambda ranks: ["all" if one is None else str(one) for one in ranks]),
    "state": ("state", _words),
    "node": ("node", lambda nodes: _words(nodes if len(set(nodes[:-1])) > 1 else [""] * len(nodes))),
    "restarts": ("restarts", _counts),
    "steps": ("steps", lambda values: [f"{value:,.0f}" for value in values]),
    "steps/s": ("steps_per_s", column),
    "waiting": ("blocked_share", lambda values: [share(value) for value in values]),
    "stale": ("staleness", column),
    "discrep.": ("discrepancy", lambda values: column(values, 3)),
    # A strategy has exchanges or merges or neither, hardly ever both.
    "exch.": ("exchanges", _counts),
    "merges": ("merges", _counts),
    "MB/s": ("mb_per_s", column),
    "loss": ("loss", lambda values: column(values, 4)),
    "windows": ("windows", _words),
}


def columns(shown: Sequence[Row]) -> list[Column]:
    """The last row is that of all workers; columns with nothing to tell are left out."""
    found = []
    for key, (name, text) in COLUMNS.items():
        cells = text(values := [getattr(row, name) for row in shown])
        if key in ("state", "steps/s", "waiting") or any(cell != UNKNOWN for cell in cells):
            found.append(Column(key, cells, values))
    return found


def printable(text: object) -> str:
    """On one line, without characters that steer a terminal."""
    return "".join(one if one.isprintable() else " " for one in str(text)).strip()


def most_telling(all_rows: Sequence[Row], most: int) -> list[Row]:
    """Where there is no room for all: the dead and silent, then the slowest; by rank."""
    order = {"dead": 0, "silent": 1, "joining": 2, "training": 3, "finished": 4}
    found = sorted(all_rows, key=lambda row: (order.get(row.state, 3), row.speed))
    return sorted(found[:most], key=lambda row: row.rank or 0)


def history(run: Run, cells: int) -> dict[int | None, list[float | None]]:
    """Steps per second in equal parts of the time drawn, of each worker and, as None, of all."""
    begin_s, end_s = run.began_s, run.last_s
    if run.live and run.clock == "wall":
        begin_s, end_s = max(begin_s, run.now - DRAWN_S), run.now
    if end_s <= begin_s:
        return {}
    edges = np.linspace(begin_s, end_s, cells + 1)
    drawn: dict[int | None, list[float | None]] = {}
    for rank, track in run.workers.items():
        inside = np.clip(edges, *track.array("time")[[0, -1]])
        parts = zip(np.diff(rates.grown(track, "steps", inside)), np.diff(inside), strict=True)
        drawn[rank] = [float(made / took_s) if took_s > 0 else None for made, took_s in parts]
    drawn[None] = [rates.summed(column) for column in zip(*drawn.values(), strict=True)]
    return drawn
