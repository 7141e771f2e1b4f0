"""A page that plays runs on one clock: who computes, who waits, who meets whom, what they have learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from freewheel.numbers import count
from freewheel.records.run import Run
from freewheel.show.rates import result_of
from freewheel.show.replay.played import played, waits
from freewheel.show.shown import shown
from freewheel.show.versus import BASELINES, goal, race

__all__ = ["LABELS", "MOST", "html", "title_of", "two"]

EXPLAINED = " (what DDP does)"
LABELS = {"ddp": "DDP", "allreduce": f"AllReduce{EXPLAINED}", "adpsgd": "AD-PSGD"}
"""What strategies are called."""
MOST = 4
"""Runs on one page."""

STEPS_SHOWN = 5
"""So many steps of the slowest worker fill the lanes."""


def html(runs: Sequence[Run], title: str) -> str:
    """The whole page, which needs nothing else."""
    all_played = [played(run) for run in runs]
    simulated = {run.clock == "virtual" for run in runs}
    about = "Simulated, in virtual time." if simulated == {True} else "Real processes."
    means = [mean_s for one in all_played for mean_s in one.step_s]
    results, named = [result_of(run) for run in runs], shown(runs)
    labels = [LABELS.get(one.label, one.label) for one in named]
    names = [label.removesuffix(EXPLAINED) for label in labels]
    told, waiting = race(names, results), waits(names, all_played)
    target, _ = goal(results)
    data = {
        "title": title,
        "story": told or waiting,
        "about": f"{waiting} {about}" if told else about,
        "measure": "accuracy" if all(one.accuracy for one in all_played) else "loss",
        "target": target,
        "goal": target and f"{100 * target:.4g} %",
        "window": STEPS_SHOWN * max(means),
        "usual": min(means),
        "speed": _speed(max(one.seconds for one in all_played)),
        "runs": [
            {**one.as_json(), "colour": run.colour, "short": name, "label": label}
            for one, run, name, label in zip(all_played, named, names, labels, strict=True)
        ],
    }
    page = files(__package__)
    part = {name: (page / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    inside = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{part['css']}</style></head><body>{part['html']}"
        f'<script id="data" type="application/json">{inside}</script>'
        f"<script>{part['js']}</script></body></html>\n"
    )


def two(runs: Sequence[Run]) -> list[Run]:
    """Of many runs the baseline, and the one that ended first."""
    named = {str(run.about.get("strategy")): run for run in runs}
    baseline = next((named[one] for one in BASELINES if one in named), runs[0])
    others = [run for run in runs if run is not baseline]
    return [baseline, min(others, key=lambda run: run.ended_s - run.began_s)]


def title_of(runs: Sequence[Run]) -> str:
    """What runs are about, and who is slow in them."""
    names = {str(run.about.get("name", run.folder.name)) for run in runs}
    if len(names) > 1:
        return f"{len(runs)} runs"
    name = names.pop()
    task = name.partition(":")[0] if "=" in name else name  # a built-in one may have settings
    results = [result_of(run) for run in runs]
    slow = [one.scenario.get("slow") or one.scenario.get("compute", {}).get("slow", {}) for one in results]
    if len({one.workers for one in results}) > 1 or any(one != slow[0] for one in slow):
        return task
    who = [f"worker {rank} is {float(factor):g}× slower" for rank, factor in slow[0].items()]
    return ", ".join([f"{task} on {count(results[0].workers, 'worker')}", *who])


def _speed(length_s: float) -> float:
    """At which all is seen within half a minute, about."""
    return next((speed for speed in (0.1, 0.25, 0.5, 1, 2, 5, 10) if length_s / speed <= 30), 25)
