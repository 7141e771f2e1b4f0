"""What a run did, as series over common moments: all workers together, at most a few hundred points."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np

from freewheel.records.run import DEATHS, Run
from freewheel.records.track import Floats, Track
from freewheel.show.rates import every_s, grown

MOMENTS = 240
"""The most moments of a series; there are at least half as many."""
RATE_OVER = 4
"""A rate is taken over so many intervals between moments, and over ten samples at least."""
FEW = 3
"""Steps that are too few to say how long one takes."""
LATE = 4.0
"""A worker counts as there for the time of so many samples after its last one."""

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
    rate: Floats
    """Steps of all workers in a second."""
    ideal: Floats
    """The same if those who are there did nothing but compute."""


def moments(duration_s: float) -> Floats:
    """0, w, 2w, … and the end, where w is the least power of two that makes few enough of them.

    So what was drawn of the past stays as it is while a run grows.
    """
    if not duration_s > 0:
        return np.zeros(1)
    width = 2.0 ** math.ceil(math.log2(duration_s / MOMENTS))
    return np.append(np.arange(0.0, duration_s, width), duration_s)


def series(run: Run) -> Series:
    """The series of a run as far as it has come."""
    began = run.began_s
    clock = began + moments(run.ended_s - began)
    tracks = [track for track in run.workers.values() if track.latest]
    there = [_there(run, track, clock) for track in tracks]
    steps, samples = (
        sum((grown(track, name, clock) for track in tracks), np.zeros_like(clock))
        for name in ("steps", "samples")
    )
    unknown, pairs = np.full(len(clock), np.nan), list(zip(tracks, there, strict=True))
    losses, distances = (
        np.array([unknown, *(_level(track, now, name, clock) for track, now in pairs)])
        for name in ("loss", "discrepancy")
    )
    rate, ideal = _rates(tracks, there, clock)
    if all(track.latest.get("last") for track in tracks):
        # A worker that ends has just finished a step, all others are in the middle of one.
        rate[-1] = ideal[-1] = np.nan
    with warnings.catch_warnings():  # a moment at which no worker knows is nan, as it should be
        warnings.simplefilter("ignore", RuntimeWarning)
        mean, least, most = (of(losses, axis=0) for of in (np.nanmean, np.nanmin, np.nanmax))
        distance = np.nanmean(distances, axis=0)
    return Series(clock - began, steps, samples, mean, least, most, distance, rate, ideal)


def _there(run: Run, track: Track, clock: Floats) -> Bools:
    """Whether the worker lives: not before its first sample, long after its last, or between two lives.

    When it died somebody may have noticed; else its last sample is all there is.
    """
    told = track.array("time")
    died = [event.time for event in run.events if event.rank == track.rank and event.what in DEATHS]
    late_s = max(_width(clock), LATE * every_s(told))

    def until_s(last: int) -> float:
        return float(min([told[last] + late_s, *(at for at in died if at >= told[last])]))

    there: Bools = (clock >= told[0]) & (clock <= until_s(-1))
    for last in np.flatnonzero(np.diff(track.array("life")) > 0):
        there &= ~((clock > until_s(int(last))) & (clock < told[last + 1]))
    return there


def _level(track: Track, there: Bools, name: str, clock: Floats) -> Floats:
    """What a worker last said of something at some moments."""
    values = track.array(name)
    known = ~np.isnan(values)
    if not known.any():
        return np.full(len(clock), np.nan)
    place = np.searchsorted(track.array("time")[known], clock, side="right") - 1
    return np.where((place >= 0) & there, values[known][place], np.nan)


def _rates(tracks: list[Track], there: list[Bools], clock: Floats) -> tuple[Floats, Floats]:
    """Steps in a second of those who are there, as they were and as if they did nothing but compute."""
    rate, ideal = np.zeros_like(clock), np.zeros_like(clock)
    often_s = max((every_s(track.array("time")) for track in tracks), default=0.0)
    over_s = max(RATE_OVER * _width(clock), 10 * often_s)
    before = np.maximum(0, np.searchsorted(clock, clock - over_s - 1e-9, side="right") - 1)
    for track, now in zip(tracks, there, strict=True):
        sums = [grown(track, name, clock) for name in ("steps", "elapsed_s", "compute_s")]
        made, alive_s, computed_s = (of - of[before] for of in sums)
        computed_s = np.minimum(computed_s, alive_s)  # a long step counts when it ends
        with np.errstate(divide="ignore", invalid="ignore"):
            own = np.where(alive_s > 0, made / alive_s, 0.0)
            free = np.where((made >= FEW) & (computed_s > 0), made / computed_s, sums[0] / sums[2])
        rate += np.where(now, own, 0.0)
        ideal += np.where(now & np.isfinite(free), free, 0.0)
    # In the beginning there is too little to divide by.
    early = clock - clock[before] < min(2 * often_s, 0.25 * float(clock[-1] - clock[0]))
    nobody = (ideal <= 0) | early
    return np.where(nobody, np.nan, rate), np.where(nobody, np.nan, ideal)


def _width(clock: Floats) -> float:
    return float(clock[1] - clock[0]) if len(clock) > 1 else 0.0
