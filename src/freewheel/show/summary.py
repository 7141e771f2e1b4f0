"""The figures of a run, from what its workers wrote down."""

from __future__ import annotations

from typing import Any

from freewheel.errors import ConfigError
from freewheel.records.result import Result, Sample, result
from freewheel.records.run import Run
from freewheel.show.rates import ideal_per_s, mean


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
