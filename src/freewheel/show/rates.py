"""Rates, shares, spans, series and results of runs: here for the terminal, reports and the dashboard."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freewheel.errors import ConfigError
from freewheel.records.counters import CAUSES
from freewheel.records.result import Lives, Result, Sample, result
from freewheel.records.run import DEATHS, Run
from freewheel.records.track import Floats, Track

LATELY_S = 5.0
"""The last seconds, of which rates of a live run are."""


# -- of one worker --


def grown(track: Track, name: str, times_s: Sequence[float] | Floats) -> Floats:
    """A sum of a worker at some moments of the run's clock, as if it grew evenly between samples."""
    found: Floats = np.interp(times_s, track.array("time"), np.nan_to_num(track.array(name)), left=0.0)
    return found


def rate(track: Track, name: str = "steps", over_s: float = LATELY_S) -> float | None:
    """How fast a sum grew in the last seconds in which the worker lived; None: it has not lived yet."""
    end_s = track.value("time") or 0.0
    span_s = (end_s - over_s, end_s)
    (begin, end), (born, now) = (grown(track, one, span_s) for one in (name, "elapsed_s"))
    return float((end - begin) / (now - born)) if now > born else None


def every_s(told: Sequence[float] | Floats) -> float:
    """How often a worker writes, as its last samples show."""
    between = sorted(float(after - before) for before, after in itertools.pairwise(told[-10:]))
    return between[len(between) // 2] if between else 0.0


# -- of all workers --


def blocked(tracks: Iterable[Track]) -> dict[str, float]:
    """Which share of the workers' time they waited for what."""
    tracks = list(tracks)

    def total(name: str) -> float:
        return sum(track.value(name) or 0.0 for track in tracks)

    lived_s = total("elapsed_s")
    return {cause: min(1.0, total(f"{cause}_s") / lived_s) if lived_s > 0 else 0.0 for cause in CAUSES}


def elapsed_s(run: Run) -> float:
    """How long a run has gone on, or went on, on its own clock."""
    return max(0.0, (run.now if run.live else run.ended_s) - run.began_s) if run.workers else 0.0


def standing(run: Run) -> str:
    """How a run stands, in a word: starting, live, finished (all of it), ended (not all), or silent."""
    states = {run.state(rank) for rank in run.workers}
    if not states or run.live:
        return "live" if states else "starting"
    return "finished" if states == {"finished"} else "silent" if "silent" in states else "ended"


def rates(run: Run) -> tuple[float | None, float | None]:
    """Steps of all workers in a second, from the first to the last one, and which share of the ideal that is.

    The ideal is of all workers for the whole time: what a dead one would have made is missing. A simulation
    knows it; else, of a worker that made no step nobody knows how fast it could be. None: no step was made.
    """
    steps, took_s = run.total("steps"), run.ended_s - run.began_s
    if not steps or took_s <= 0:
        return None, None
    ideal = ideal_per_s(run)
    # Steps may vary by so much that a run beats what its usual steps would make.
    return steps / took_s, min(1.0, steps / took_s / ideal) if ideal else None


def ideal_per_s(run: Run) -> float:
    """Steps of all workers in a second if none ever waited; 0: nobody knows."""
    settings = run.about.get("settings") or {}
    return settings.get("ideal_per_s") or sum(1 / t for t in step_times_s(run.lives).values())


def step_times_s(lives: Lives) -> dict[int, float]:
    """What a step took each worker that has made one, without waiting."""
    steps, computing = defaultdict[int, float](float), defaultdict[int, float](float)
    for life in lives:
        steps[life["rank"]] += life["steps"]
        computing[life["rank"]] += life.get("compute_s") or 0.0
    return {rank: computing[rank] / steps[rank] for rank in steps if steps[rank] and computing[rank]}


def staleness(run: Run) -> dict[int, int]:
    """How often which staleness was met in all lives of all workers: the least of a class, and a count."""
    counts = Counter[int]()
    for life in run.lives:
        counts.update({int(least): int(met) for least, met in (life.get("staleness_counts") or {}).items()})
    return dict(sorted(counts.items()))


def trouble(lives: Lives) -> list[str]:
    """What went wrong in all lives of all workers, in words."""
    counts = Counter[str]()
    for life in lives:
        for kind in ("exchanges", "merges"):
            for outcome in ("half", "failed", "dropped"):
                counts[f"{kind} {outcome}"] += (life.get(kind) or {}).get(outcome, 0)
        counts["messages dropped"] += life.get("messages_dropped") or 0
    return [f"{what}: {many:,}" for what, many in counts.items() if many]


def reached_s(run: Run) -> float | None:
    """After how long the accuracy first reached the target; None: not yet, or there is none."""
    target = run.about.get("target")
    reached = (one.time for one in run.evaluations if target and (one.accuracy or 0.0) >= target)
    first = next(reached, None)
    return None if first is None else max(0.0, first - run.began_s)


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def summed(values: Iterable[float | None]) -> float | None:
    """The sum of what is known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None


# -- all figures --


def result_of(run: Run) -> Result:
    """The figures of a run's folder, up to its last sample; refuses one that has nothing to tell yet."""
    begun = any(life["steps"] and life.get("elapsed_s") for life in run.lives)
    if not run.about or not begun:
        if begun:
            why = (
                "has records but no run.json: strategy and settings are not known. `freewheel watch` shows "
                "what is there. Put run.json back, or give another folder"
            )
        elif run.live:
            why = "is still starting: no worker has made a step. Try again when one has"
        else:
            why = "ended before any worker made a step; the logs in it may say why"
        raise ConfigError(f"{str(run.folder)!r} {why}.")
    try:
        return _result(run, run.about, run.lives)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(run.folder)!r} holds what no run writes ({type(error).__name__}: {error}). "
            "Give a folder as `freewheel run` makes them, unchanged."
        ) from None


def _result(run: Run, about: dict[str, Any], lives: list[dict[str, Any]]) -> Result:
    last = {life["rank"]: life["loss"] for life in lives if life.get("loss") is not None}
    # What a dead worker said last is of another time.
    losses = {rank: of for rank, of in last.items() if run.state(rank) not in ("dead", "silent")} or last
    curve = [
        Sample(
            virtual_s=max(0.0, one.time - run.began_s),
            worker_steps=one.worker_steps or 0,
            loss=one.loss,
            accuracy=one.accuracy,
            discrepancy=one.discrepancy or 0.0,
            consensus=one.consensus or 0.0,
        )
        for one in run.evaluations
    ]
    apart = (max(one.discrepancy or 0.0, one.discrepancy_max or 0.0) for one in run.evaluations)
    return result(
        lives,
        curve,
        run.ended_s - run.began_s,
        ideal_per_s(run),
        strategy=about["strategy"].partition(":")[0],
        workers=about["workers"],
        seed=about["seed"],
        apart=max(apart, default=0.0),
        loss=mean(losses.values()),
        target=about.get("target"),
        settings={**({"clock": "wall"} if about["clock"] == "wall" else {}), **about["settings"]},
    )


# -- over time: all workers together, at most a few hundred points --
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
