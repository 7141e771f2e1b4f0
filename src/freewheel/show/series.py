"""What a run did, as series over common moments: all workers together, at most a few hundred points.

The moments are whole multiples of a power of two, and the last one. So what has been computed of the past
stays as it is while a run grows, and whoever sends it on sends only the end; see `dashboard/delta.py`.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freewheel.records.run import DEATHS, Run, Track

MOMENTS = 240
"""At most so many moments, and at least half as many."""
RATE_OVER = 4
"""A rate is taken over so many intervals between moments, and over ten samples at least."""
FEW = 3
"""So few steps say nothing of how long a step takes."""
LATE = 4.0
"""For the time of so many samples after its last one a worker counts as there."""
RECENT_S, RECENT_SAMPLES = 5.0, 10
"""How far the last seconds go back, and at most so many samples."""

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Series:
    """All workers of a run together; nan: not known. `time_s` counts from the beginning of the run."""

    time_s: Floats
    steps: Floats
    samples: Floats
    loss: Floats
    loss_least: Floats
    loss_most: Floats
    distance: Floats
    """To the last peer met, the mean of all workers."""
    distance_most: Floats
    rate: Floats
    """Steps of all workers in a second."""
    ideal: Floats
    """The same if those who are there did nothing but compute."""


def moments(duration_s: float, most: int = MOMENTS) -> Floats:
    """0, w, 2w, … and the end, where w is the least power of two that makes few enough of them."""
    if not duration_s > 0:
        return np.zeros(1)
    width = 2.0 ** math.ceil(math.log2(duration_s / most))
    times = np.arange(0.0, duration_s, width)
    return np.append(times, duration_s)


def series(run: Run) -> Series:
    """The series of a run as far as it has come."""
    began = run.began_s
    times = moments(run.ended_s - began)
    tracks = [track for track in run.workers.values() if track.points["time"]]
    known = [_known(track, began, run) for track in tracks]
    steps, samples = _sum(known, "steps", times), _sum(known, "samples", times)
    losses, distances = _levels(known, "loss", times), _levels(known, "discrepancy", times)
    rate, ideal = _rates(known, times)
    if all(track.latest.get("last") for track in tracks):
        # A worker that ends has just finished a step, all others are in the middle of one.
        rate[-1] = ideal[-1] = np.nan
    with warnings.catch_warnings():  # a moment at which no worker knows is nan, as it should be
        warnings.simplefilter("ignore", RuntimeWarning)
        return Series(
            times,
            steps,
            samples,
            np.nanmean(losses, axis=0),
            np.nanmin(losses, axis=0),
            np.nanmax(losses, axis=0),
            np.nanmean(distances, axis=0),
            np.nanmax(distances, axis=0),
            rate,
            ideal,
        )


_COLUMNS = ("time", "steps", "samples", "elapsed_s", "compute_s", "loss", "discrepancy", "life")
_CAUSES = ("peers_s", "data_s", "checkpoint_s")


def _known(track: Track, began: float, run: Run) -> dict[str, Floats]:
    columns = {name: np.array(track.points[name], dtype=float) for name in _COLUMNS}
    columns["time"] = columns["time"] - began
    died = [event.time for event in run.events if event.rank == track.rank and event.what in DEATHS]
    columns["died"] = np.array(sorted(died), dtype=float) - began
    return columns


def _sum(known: Sequence[dict[str, Floats]], name: str, times: Floats) -> Floats:
    """A sum over all workers; a worker that is not there yet has done nothing."""
    total = np.zeros_like(times)
    for columns in known:
        total += _at(columns, name, times)
    return total


def _at(columns: dict[str, Floats], name: str, times: Floats) -> Floats:
    """A sum of one worker at some moments, as if it had grown evenly between its samples."""
    found: Floats = np.interp(times, columns["time"], np.nan_to_num(columns[name]), left=0.0)
    return found


def _there(columns: dict[str, Floats], times: Floats) -> Bools:
    """Whether the worker lives: not before its first sample, long after its last, or between two lives.

    When it died somebody may have noticed; else its last sample is all there is.
    """
    told, died = columns["time"], columns["died"]
    width = float(times[1]) if len(times) > 1 else 0.0
    late_s = max(width, LATE * _every_s(told))

    def until_s(last: int) -> float:
        noticed = died[died >= told[last]]
        return float(min([told[last] + late_s, *noticed[:1]]))

    there: Bools = (times >= told[0]) & (times <= until_s(-1))
    for last in np.flatnonzero(np.diff(columns["life"]) > 0):
        there &= ~((times > until_s(int(last))) & (times < told[last + 1]))
    return there


def _every_s(told: Floats | list[float]) -> float:
    """How often a worker writes, as its last samples show."""
    last = told[-RECENT_SAMPLES:]
    between = sorted(float(after - before) for before, after in itertools.pairwise(last))
    return between[len(between) // 2] if between else 0.0


def _levels(known: Sequence[dict[str, Floats]], name: str, times: Floats) -> Floats:
    """What every worker last said of something at some moments; a row for each worker."""
    rows = np.full((max(1, len(known)), len(times)), np.nan)
    for row, columns in zip(rows, known, strict=False):
        told = ~np.isnan(columns[name])
        if told.any():
            place = np.searchsorted(columns["time"][told], times, side="right") - 1
            row[:] = np.where((place >= 0) & _there(columns, times), columns[name][told][place], np.nan)
    return rows


def _rates(known: Sequence[dict[str, Floats]], times: Floats) -> tuple[Floats, Floats]:
    """Steps in a second of those who are there, as they were and as if they did nothing but compute."""
    rate, ideal = np.zeros_like(times), np.zeros_like(times)
    width = float(times[1]) if len(times) > 1 else 0.0
    every_s = [_every_s(columns["time"]) for columns in known]
    over_s = max(RATE_OVER * width, RECENT_SAMPLES * max(every_s, default=0.0))
    before = np.maximum(0, np.searchsorted(times, times - over_s - 1e-9, side="right") - 1)
    took = times - times[before]
    for columns in known:
        steps, lived, computed = (_at(columns, name, times) for name in ("steps", "elapsed_s", "compute_s"))
        made, recently = steps - steps[before], computed - computed[before]
        alive_s = lived - lived[before]
        recently = np.minimum(recently, alive_s)  # a long step counts when it ends
        with np.errstate(divide="ignore", invalid="ignore"):
            own = np.where(alive_s > 0, made / alive_s, 0.0)
            free = np.where((made >= FEW) & (recently > 0), made / recently, steps / computed)
        there = _there(columns, times)
        rate += np.where(there, own, 0.0)
        ideal += np.where(there & np.isfinite(free), free, 0.0)
    # In the beginning there is too little to divide by.
    early = took < min(2 * max(every_s, default=0.0), 0.25 * float(times[-1]))
    nobody = (ideal <= 0) | early
    return np.where(nobody, np.nan, rate), np.where(nobody, np.nan, ideal)


@dataclass(frozen=True)
class Edge:
    """What two workers did with each other in the last seconds."""

    one: int
    other: int
    count: int
    distance: float | None


def edges(run: Run) -> tuple[list[Edge], float]:
    """Who exchanged or merged with whom in the last seconds of a run, and in how many seconds that was.

    Where nobody did, which is so where merges are rare, in all of the run.
    """
    tracks = [track for track in run.workers.values() if track.latest]
    end = max((track.latest["time"] for track in tracks), default=0.0)
    every_s = [_every_s([sample["time"] for sample in track.recent]) for track in tracks]
    # A simulation may be over in a second, and writes as many samples in it.
    over_s = min(RECENT_S, RECENT_SAMPLES * max(every_s, default=0.0)) or RECENT_S
    found, span = _met(run, end, over_s)
    return (found, span) if found else _met(run, end, math.inf)


def _met(run: Run, end: float, over_s: float) -> tuple[list[Edge], float]:
    span = 0.0
    found: dict[tuple[int, int], tuple[int, float | None]] = {}
    for rank, track in run.workers.items():
        recent = [sample for sample in track.recent if isinstance(sample.get("peers"), dict)]
        if not recent or recent[-1]["time"] < end - over_s - 1e-9:
            continue
        earlier = [sample for sample in recent[:-1] if sample["time"] <= end - over_s + 1e-9]
        full = len(recent) == track.recent.maxlen and math.isfinite(over_s)
        base = earlier[-1] if earlier else recent[0] if full else None
        before = base["peers"] if base else {}
        span = max(span, end - (base["time"] if base else recent[-1].get("began") or run.began_s))
        for name, (count, distance) in recent[-1]["peers"].items():
            new = count - before.get(name, (0, None))[0]
            if new > 0:
                pair = (min(rank, int(name)), max(rank, int(name)))
                most, known = found.get(pair, (0, None))
                # Both sides count it; the one that has written last knows more.
                found[pair] = (max(new, most), distance if distance is not None else known)
    return [Edge(*pair, *what) for pair, what in sorted(found.items())], span


def staleness(run: Run) -> dict[int, int]:
    """How often which staleness was met in all lives of all workers: the least of a class, and a count."""
    counts: dict[int, int] = {}
    for life in run.lives:
        for least, count in (life.get("staleness_counts") or {}).items():
            counts[int(least)] = counts.get(int(least), 0) + int(count)
    return dict(sorted(counts.items()))


def blocked(tracks: Sequence[Track]) -> dict[str, float]:
    """Which share of the workers' time they waited for what."""
    total = sum(track.value("elapsed_s") or 0.0 for track in tracks)
    return {
        cause.removesuffix("_s"): min(1.0, sum(track.value(cause) or 0.0 for track in tracks) / total)
        if total > 0
        else 0.0
        for cause in _CAUSES
    }
