"""What can be said of each worker in one row, and of all of them: numbers, not yet text.

While a run goes on, rates are those of the last seconds; once it has ended, of all its time. In virtual time,
which may pass in no time, they are always of all its time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freewheel.records.run import Run, Track
from freewheel.show.series import blocked
from freewheel.show.summary import rates, staleness_mean

LATELY_S = 5.0
LATELY_SLOW_S = 30.0
"""Of a worker that makes fewer than one step a second the rate is taken over this time."""
WINDOWS_S = (15.0, 30.0, 60.0)
"""So much of a live run is drawn: the first that holds all of it, else the last."""
GOING = ("joining", "training")


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
    bytes_per_s: float | None = None
    loss: float | None = None
    windows: str = ""
    """How its vectors travel, and to how many peers: device 3, or host 2 · stream 1."""
    node: str = ""
    """The machine it is on."""
    restarts: int = 0
    speed: float = 0.0
    """Steps per second of this life, which says for longer than a moment who is slow."""


def rows(run: Run) -> list[Row]:
    """One row for each worker, in order of rank."""
    live = run.live
    return [_row(run, rank, live) for rank in run.ranks]


def _windows(kinds: Any) -> str:
    """How vectors travel to each peer, counted."""
    known = Counter(str(kind) for kind in kinds.values()) if isinstance(kinds, dict) else Counter[str]()
    return " · ".join(f"{kind} {count}" for kind, count in sorted(known.items()))


def _row(run: Run, rank: int, live: bool) -> Row:
    track, state = run.workers.get(rank), run.state(rank)
    if track is None:
        return Row(rank, state)
    latest = track.latest
    row = Row(
        rank,
        state,
        steps=track.value("steps") or 0.0,
        staleness=latest.get("staleness_mean"),
        discrepancy=latest.get("discrepancy"),
        exchanges=track.value("exchanges") or 0.0,
        merges=track.value("merges") or 0.0,
        loss=latest.get("loss"),
        windows=_windows(latest.get("windows")),
        node=str(latest.get("node") or ""),
        restarts=max(0, track.life - 1),
        speed=latest.get("steps_per_s") or 0.0,
    )
    if live and state != "training":
        return row  # what it did last is no rate of now
    over_s = LATELY_S if live and run.clock == "wall" else math.inf
    per_s = _rate(track, "steps", over_s)
    if per_s is not None and per_s < 1.0 and over_s == LATELY_S:
        over_s = LATELY_SLOW_S
        per_s = _rate(track, "steps", over_s)
    waited = [_rate(track, name, over_s) for name in ("peers_s", "data_s", "checkpoint_s")]
    values = vars(row) | {
        "steps_per_s": per_s,
        "blocked_share": None if per_s is None else min(1.0, _sum(waited) or 0.0),
        "bytes_per_s": _rate(track, "bytes_out", over_s),
    }
    return Row(**values)


def _rate(track: Track, name: str, over_s: float) -> float | None:
    """A rate of the last seconds; where there are not two samples, or all time is asked for, the mean."""
    rate = track.rate(name, over_s) if math.isfinite(over_s) else None
    if rate is not None:
        return rate
    elapsed_s = track.value("elapsed_s") or 0.0
    return (track.value(name) or 0.0) / elapsed_s if elapsed_s > 0 else None


def total(run: Run, all_rows: Sequence[Row]) -> Row:
    """Sums; of shares and loss the mean, of staleness that of all exchanges; of discrepancies the largest."""
    counted = Counter(row.state for row in all_rows)
    steps = sum(row.steps for row in all_rows)
    per_s, sent = _sum(r.steps_per_s for r in all_rows), _sum(r.bytes_per_s for r in all_rows)
    waited = _mean(row.blocked_share for row in all_rows)
    if not run.live and elapsed_s(run) > 0:  # workers came and went: their rates do not add up
        per_s, sent = rates(run)[0], dict(run.totals())["bytes_out"] / elapsed_s(run)
        waited = sum(blocked(list(run.workers.values())).values())
    present = [row for row in all_rows if row.state not in ("dead", "silent")] or all_rows
    return Row(
        None,
        f"{counted['training' if run.live else 'finished']} of {len(all_rows)}",
        steps=steps,
        steps_per_s=per_s,
        blocked_share=waited,
        staleness=staleness_mean(run.lives),
        discrepancy=max((row.discrepancy for row in all_rows if row.discrepancy is not None), default=None),
        exchanges=sum(row.exchanges for row in all_rows),
        merges=sum(row.merges for row in all_rows),
        bytes_per_s=sent,
        loss=_mean(row.loss for row in present),
        restarts=sum(row.restarts for row in all_rows),
    )


def elapsed_s(run: Run) -> float:
    """How long it has gone on, or went on, on its own clock."""
    return max(0.0, (run.now if run.live else run.ended_s) - run.began_s) if run.workers else 0.0


def standing(run: Run) -> str:
    """How a run stands, in a word: starting, live, finished (all of it), ended (not all), or silent."""
    states = [run.state(rank) for rank in run.workers]
    if not states:
        return "starting"
    if run.live:
        return "live"
    if all(state == "finished" for state in states):
        return "finished"
    return "silent" if "silent" in states else "ended"


def most_telling(all_rows: Sequence[Row], most: int) -> list[Row]:
    """Those to show where there is no room for all: dead and silent ones, then the slowest, by rank."""
    order = {"dead": 0, "silent": 1, "joining": 2, "training": 3, "finished": 4}

    def key(row: Row) -> tuple[int, float, int]:
        # Rounded: who is as slow as the next one shall not come and go with every sample.
        return order.get(row.state, 3), float(f"{row.speed:.1g}"), row.rank or 0

    return sorted(sorted(all_rows, key=key)[:most], key=lambda row: row.rank or 0)


def window_s(run: Run) -> float | None:
    """How much of its time is drawn; None: all of it."""
    if not run.live or run.clock != "wall":
        return None
    return next((one for one in WINDOWS_S if one >= elapsed_s(run)), WINDOWS_S[-1])


def history(run: Run, cells: int) -> dict[int | None, list[float | None]]:
    """Steps per second in each of so many parts of the time drawn, for each worker and, as None, for all."""
    begin_s, end_s, last_s = run.began_s, run.last_s, window_s(run)
    if last_s is not None:
        # Parts begin at multiples of their length, so that what is past stays as it was drawn.
        part_s = last_s / cells
        end_s = math.ceil(run.now / part_s) * part_s
        begin_s = end_s - last_s
    if end_s <= begin_s:
        return {}
    edges = np.linspace(begin_s, end_s, cells + 1)
    drawn: dict[int | None, list[float | None]] = {
        rank: _parts(track, edges) for rank, track in run.workers.items()
    }
    columns = zip(*drawn.values(), strict=True)
    drawn[None] = [_sum(column) for column in columns]
    return drawn


def _parts(track: Track, edges: np.ndarray) -> list[float | None]:
    times, steps = track.points["time"], track.points["steps"]
    first = max(0, bisect_left(times, edges[0]) - 1)
    times_s = np.array(times[first:], dtype=float)
    inside = np.clip(edges, times_s[0], times_s[-1])
    made = np.interp(inside, times_s, np.array(steps[first:], dtype=float))
    took_s, made = np.diff(inside), np.diff(made)
    return [float(m / t) if t > 0 else None for m, t in zip(made, took_s, strict=True)]


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
