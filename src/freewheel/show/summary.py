"""The figures of a run, from what its workers wrote down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from freewheel.errors import ConfigError
from freewheel.records.result import Result, Sample
from freewheel.records.run import Run


def result_of(run: Run) -> Result:
    """The figures of a run's folder, up to its last sample; refuses one that has nothing to tell yet."""
    lives = run.lives
    begun = any(life["steps"] and life.get("elapsed_s") for life in lives)
    if not run.about or not begun:
        if begun:
            why = (
                "has records but no run.json, so its strategy and settings are not known and nothing can be "
                "reported; `freewheel watch` shows what is there. Put run.json back, or give another folder"
            )
        elif run.live:
            why = "is still starting: no worker has made a step. Try again when one has"
        else:
            why = "ended before any worker made a step; the logs in it may say why"
        raise ConfigError(f"{str(run.folder)!r} {why}.")
    try:
        return _result(run, lives)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(run.folder)!r} holds what no run writes ({type(error).__name__}: {error}). "
            "Give a folder as `freewheel run` makes them, unchanged."
        ) from None


def _result(run: Run, lives: Sequence[dict[str, Any]]) -> Result:
    about = run.about
    curve = [
        Sample(
            max(0.0, one.time - run.began_s),
            one.worker_steps or 0,
            one.loss,
            one.accuracy,
            one.discrepancy or 0.0,
            one.consensus or 0.0,
        )
        for one in run.evaluations
    ]
    steps = sum(life["steps"] for life in lives)
    alive_s = _sum(lives, "elapsed_s")
    compute_s = _sum(lives, "compute_s")
    steps_per_s, ideal_share = rates(run)
    last = {life["rank"]: life["loss"] for life in lives if life.get("loss") is not None}
    # What a dead worker said last is of another time.
    losses = {rank: of for rank, of in last.items() if run.state(rank) not in ("dead", "silent")} or last
    loss = next((sample.loss for sample in reversed(curve) if sample.loss is not None), None)
    apart = [max(one.discrepancy or 0.0, one.discrepancy_max or 0.0) for one in run.evaluations]
    return Result(
        strategy=about["strategy"].partition(":")[0],
        workers=about["workers"],
        seed=about["seed"],
        virtual_s=run.ended_s - run.began_s,
        worker_steps=steps,
        steps_per_s=steps_per_s or 0.0,
        ideal_share=1.0 if ideal_share is None else ideal_share,
        idle_share=max(0.0, 1 - compute_s / alive_s) if alive_s else 0.0,
        staleness_mean=staleness_mean(lives) or 0.0,
        staleness_max=float(max(life["staleness_max"] for life in lives)),
        discrepancy_max=max([*apart, *(life.get("discrepancy_max") or 0.0 for life in lives)]),
        bytes_per_step=_sum(lives, "bytes_out") / steps,
        loss=sum(losses.values()) / len(losses) if loss is None and losses else loss,
        accuracy=next((sample.accuracy for sample in reversed(curve) if sample.accuracy is not None), None),
        trace_sha256="",
        target=about.get("target"),
        target_s=reached_s(run),
        curve=tuple(curve),
        by_worker=tuple(lives),
        settings={**({"clock": "wall"} if about["clock"] == "wall" else {}), **about["settings"]},
    )


def reached_s(run: Run) -> float | None:
    """After how long the accuracy first reached the target; None: not yet, or there is none."""
    target = run.about.get("target")
    reached = (one.time for one in run.evaluations if target and (one.accuracy or 0.0) >= target)
    first = next(reached, None)
    return None if first is None else max(0.0, first - run.began_s)


def rates(run: Run) -> tuple[float | None, float | None]:
    """Steps of all workers in a second, from the first to the last one, and which share of the ideal that is.

    The ideal is of all workers for the whole time: what a dead one would have made is missing. A simulation
    knows it; else, of a worker that made no step nobody knows how fast it could be. None: no step was made.
    """
    lives = run.lives
    steps, took_s = _sum(lives, "steps"), run.ended_s - run.began_s
    if not steps or took_s <= 0:
        return None, None
    settings = run.about.get("settings") or {}
    ideal = settings.get("ideal_per_s") or sum(1 / t for t in step_times_s(lives).values())
    # Steps may vary by so much that a run beats what its usual steps would make.
    return steps / took_s, min(1.0, steps / took_s / ideal) if ideal else None


def step_times_s(lives: Sequence[dict[str, Any]]) -> dict[int, float]:
    """What a step took each worker that has made one, without waiting."""
    steps: defaultdict[int, float] = defaultdict(float)
    computing: defaultdict[int, float] = defaultdict(float)
    for life in lives:
        steps[life["rank"]] += life["steps"]
        computing[life["rank"]] += life.get("compute_s") or 0.0
    return {rank: computing[rank] / steps[rank] for rank in steps if steps[rank] and computing[rank]}


def _sum(lives: Sequence[dict[str, Any]], name: str) -> float:
    return sum(life.get(name) or 0.0 for life in lives)


def staleness_mean(lives: Iterable[dict[str, Any]]) -> float | None:
    """The mean over all that was noted in these lives: who notes more weighs more. None: nobody says it.

    A strategy that is never stale by its own measure notes nothing, and is 0.
    """
    told = [
        (_noted(life), life["staleness_mean"]) for life in lives if life.get("staleness_mean") is not None
    ]
    noted = sum(count for count, _ in told)
    return sum(count * mean for count, mean in told) / (noted or 1) if told else None


def _noted(life: dict[str, Any]) -> float:
    """How often a life noted its staleness; where it does not say, as often as it made a step."""
    counts: dict[str, float] = life.get("staleness_counts") or {}
    return sum(counts.values()) if counts or not life["staleness_mean"] else life["steps"]
