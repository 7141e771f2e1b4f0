"""Rates, shares, series and results of runs, for the terminal, reports and the dashboard."""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from freewheel.errors import ConfigError
from freewheel.records.counters import CAUSES
from freewheel.records.result import Lives, Result, Sample, result
from freewheel.records.run import Run
from freewheel.records.track import Floats, Track

LATELY_S = 5.0  # rates of a live run are those of the last seconds
MOMENTS = 240  # in a series
RATE_OVER = 4  # intervals between moments that a rate is taken over, at least ten samples
FEW = 3  # fewer steps do not say how long one takes


def grown(track: Track, name: str, times_s: Sequence[float] | Floats) -> Floats:
    """A sum of a worker at these moments, interpolated between its samples."""
    found: Floats = np.interp(times_s, track.array("time"), np.nan_to_num(track.array(name)), left=0.0)
    return found


def rate(track: Track, name: str = "steps", over_s: float = LATELY_S) -> float | None:
    """Growth per second in the last seconds of the worker's life; None: it has not lived yet."""
    end_s = track.value("time") or 0.0
    span_s = (end_s - over_s, end_s)
    (begin, end), (born, now) = (grown(track, one, span_s) for one in (name, "elapsed_s"))
    return float((end - begin) / (now - born)) if now > born else None


def every_s(told: Sequence[float] | Floats) -> float:
    """How often a worker writes, judged by its last samples."""
    return float(np.median(np.diff(told[-10:]))) if len(told) > 1 else 0.0


def blocked(tracks: Iterable[Track]) -> dict[str, float]:
    """The share of the workers' time spent waiting, by cause."""
    tracks = list(tracks)
    lived_s = sum(track.value("elapsed_s") or 0.0 for track in tracks) or math.inf
    waited_s = {cause: sum(track.value(f"{cause}_s") or 0.0 for track in tracks) for cause in CAUSES}
    return {cause: min(1.0, of_s / lived_s) for cause, of_s in waited_s.items()}


def elapsed_s(run: Run) -> float:
    return max(0.0, (run.now if run.live else run.ended_s) - run.began_s) if run.workers else 0.0


def standing(run: Run) -> str:
    """starting, live, finished (all workers), ended (not all), or silent."""
    states = {run.state(rank) for rank in run.workers}
    if not states or run.live:
        return "live" if states else "starting"
    return "finished" if states == {"finished"} else "silent" if "silent" in states else "ended"


def rates(run: Run) -> tuple[float | None, float | None]:
    """Steps of all workers in a second, and their share of the ideal."""
    took_s, ideal = run.ended_s - run.began_s, ideal_per_s(run)
    rate = run.total("steps") / took_s if took_s > 0 else 0.0
    return rate or None, min(1.0, rate / ideal) if rate and ideal else None


def ideal_per_s(run: Run) -> float:
    """Steps of all workers in a second if none ever waited; 0: not known."""
    settings = run.about.get("settings") or {}
    return settings.get("ideal_per_s") or sum(1 / t for t in step_times_s(run.lives).values())


def step_times_s(lives: Lives) -> dict[int, float]:
    """A step's time without waiting, of each worker that has made one."""
    steps, computing = defaultdict[int, float](float), defaultdict[int, float](float)
    for life in lives:
        steps[life["rank"]] += life["steps"]
        computing[life["rank"]] += life.get("compute_s") or 0.0
    return {rank: computing[rank] / steps[rank] for rank in steps if steps[rank] and computing[rank]}


def staleness(run: Run) -> dict[int, int]:
    """How often each staleness was met by all workers: the least of its class, and a count."""
    counts = Counter[int]()
    for life in run.lives:
        counts.update({int(least): int(met) for least, met in (life.get("staleness_counts") or {}).items()})
    return dict(sorted(counts.items()))


def trouble(lives: Lives) -> list[str]:
    counts = Counter[str]()
    for life in lives:
        for kind in ("exchanges", "merges"):
            for outcome in ("half", "failed", "dropped"):
                counts[f"{kind} {outcome}"] += (life.get(kind) or {}).get(outcome, 0)
        counts["messages dropped"] += life.get("messages_dropped") or 0
    return [f"{what}: {many:,}" for what, many in counts.items() if many]


def mean(values: Iterable[float | None]) -> float | None:
    """Of what is known; None: nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def summed(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None


def result_of(run: Run) -> Result:
    """Refuses a run that has no figures yet."""
    if not any(life["steps"] and life.get("elapsed_s") for life in run.lives):
        starting = "is still starting: no worker has made a step. Try again when one has"
        why = starting if run.live else "ended before any worker made a step; the logs in it may say why"
        raise ConfigError(f"{str(run.folder)!r} {why}.")
    if not run.about:
        why = "has records but no run.json. Put it back; `freewheel watch` shows what is there without"
        raise ConfigError(f"{str(run.folder)!r} {why}.")
    try:
        return _result(run)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(run.folder)!r} holds what no run writes ({type(error).__name__}: {error}). "
            "Give a folder as `freewheel run` makes them, unchanged."
        ) from None


def _result(run: Run) -> Result:
    about, lives = run.about, run.lives
    last = {life["rank"]: life["loss"] for life in lives if life.get("loss") is not None}
    # The last loss of a dead worker is of another time.
    losses = {rank: of for rank, of in last.items() if run.state(rank) not in ("dead", "silent")} or last
    curve = []
    for one in run.evaluations:
        at_s, steps = max(0.0, one["time"] - run.began_s), int(one.get("worker_steps", 0))
        apart = (one.get(name, 0.0) for name in ("discrepancy", "consensus"))
        curve.append(Sample(at_s, steps, one.get("loss"), one.get("accuracy"), *apart))
    most = (max(one.get("discrepancy", 0.0), one.get("discrepancy_max", 0.0)) for one in run.evaluations)
    return result(
        lives,
        curve,
        run.ended_s - run.began_s,
        ideal_per_s(run),
        strategy=about["strategy"].partition(":")[0],
        workers=about["workers"],
        seed=about["seed"],
        apart=max(most, default=0.0),
        loss=mean(losses.values()),
        target=about.get("target"),
        trace_sha256="",
        settings={**({"clock": "wall"} if about["clock"] == "wall" else {}), **about["settings"]},
    )


@dataclass(frozen=True)
class Series:
    """All workers of a run together, over time; nan: not known. `time_s` counts from its beginning."""

    time_s: Floats
    steps: Floats
    samples: Floats
    loss: Floats
    loss_least: Floats
    loss_most: Floats
    distance: Floats  # to the last peer met, the mean of all workers
    rate: Floats  # steps of all workers in a second
    ideal: Floats  # the same if those present did nothing but compute


def series(run: Run) -> Series:
    clock, width_s = np.linspace(run.began_s, run.ended_s, MOMENTS, retstep=True)
    tracks = run.workers.values()
    over_s = max(RATE_OVER * width_s, *(10 * every_s(track.array("time")) for track in tracks))

    def sums(name: str, times_s: Floats) -> Floats:
        return np.array([grown(track, name, times_s) for track in tracks])

    names = ("steps", "elapsed_s", "compute_s")
    steps, _, computed_s = now = [sums(name, clock) for name in names]
    made, lived_s, busy_s = (of - sums(name, clock - over_s) for name, of in zip(names, now, strict=True))
    levels = []
    for track in tracks:  # a worker is present until its next sample is late
        told = track.array("time")
        place = np.searchsorted(told, clock, side="right") - 1
        last = np.append(np.diff(track.array("life")) > 0, True)
        lives = (place >= 0) & ~(last[place] & (clock > told[place] + max(width_s, every_s(told))))
        known = (track.array(name)[place] for name in ("loss", "discrepancy"))
        levels.append((lives, *(np.where(lives, values, np.nan) for values in known)))
    there, loss, distance = (np.array(of) for of in zip(*levels, strict=True))
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # moments without any known value are nan
        rate = np.where(there, np.nan_to_num(made / lived_s), 0.0).sum(axis=0)
        # A long step counts only when it ends.
        free = np.where(made >= FEW, made / np.minimum(busy_s, lived_s), steps / computed_s)
        ideal = np.where(there & np.isfinite(free), free, 0.0).sum(axis=0)
        return Series(
            time_s=clock - run.began_s,
            steps=steps.sum(axis=0),
            samples=sums("samples", clock).sum(axis=0),
            loss=np.nanmean(loss, axis=0),
            loss_least=np.nanmin(loss, axis=0),
            loss_most=np.nanmax(loss, axis=0),
            distance=np.nanmean(distance, axis=0),
            rate=np.where(ideal > 0, rate, np.nan),
            ideal=np.where(ideal > 0, ideal, np.nan),
        )
