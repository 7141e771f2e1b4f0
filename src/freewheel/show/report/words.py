"""What a report says of runs: sentences (who was fastest, who reached the target, who died) and tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from freewheel.numbers import UNKNOWN, count, number, share, short
from freewheel.records.counters import CAUSES
from freewheel.records.run import Run
from freewheel.show.bounds import bounds
from freewheel.show.rates import standing
from freewheel.show.shown import EVENTS, GRAVE, Shown, differing, flatten
from freewheel.show.tables import Column, Table, baseline_of, filled, race, unlike

TOLD = 8  # the most things of one run that are told in words
DIFFER = 6  # so many settings in which runs differ are named


def lead(runs: Sequence[Shown]) -> list[str]:
    """What was run, in what the runs differ, and which of them go on."""
    one = runs[0].result
    results = [run.result for run in runs]
    each = [flatten({"workers": of.workers, **of.settings.get("scenario", {})}) for of in results]
    if differ := differing(each):
        said = [f"The runs differ in {', '.join(differ[:DIFFER])}; all settings are below."]
    else:
        steps = count(one.worker_steps, "step")
        said = [f"{count(one.workers, 'worker')}, {steps} in all, seed {one.seed}; all settings are below."]
    if live := [run.label for run in runs if run.records is not None and run.run.live]:
        said.append(f"Still running, as of {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {', '.join(live)}.")
    return said


def findings(runs: Sequence[Shown]) -> list[str]:
    """The main result in a few sentences; then what happened, a paragraph for each run."""
    told = [(run.label, happened(run.run)) for run in runs if run.records is not None]
    happenings = [f"{label}: {words}" for label, words in told if words]
    if why := unlike(runs):
        return [why, *happenings]
    # Who reaches the target how much sooner; how fast the fastest run and the baseline are.
    results = [run.result for run in runs]
    said = [race([run.label for run in runs], results)]
    chosen = [max(runs, key=lambda run: run.result.steps_per_s)]
    if (base := baseline_of(results)) is not None and runs[base] not in chosen:
        chosen.append(runs[base])
    said += [
        f"{run.label} makes {number(run.result.steps_per_s)} worker-steps per second, "
        f"{share(run.result.ideal_share)} of the ideal; its workers are idle for "
        f"{share(run.result.idle_share)} of the time."
        for run in chosen
    ]
    return [" ".join(filter(None, said)), *happenings]


def happened(run: Run) -> str:
    """Who died, came and left, and when, a sentence for each; nothing where nobody did."""
    told: dict[str, None] = {}
    for event in run.events:
        what = event.link
        if not what and event.rank is not None and event.what in (*GRAVE, "resumed"):
            what = f"worker {event.rank} {EVENTS[event.what].words}"
        if what:
            told[f"{what[0].upper()}{what[1:]} at {short(max(0.0, event.time - run.began_s))} s."] = None
    more = [f"{len(told) - TOLD} more events are below."] if len(told) > TOLD else []
    return " ".join([*list(told)[:TOLD], *more])


def workers_table(run: Shown) -> Table:
    """One row for every life of every worker."""
    rows = [_life(run, life) for life in sorted(run.result.by_worker, key=lambda life: life.get("rank", 0))]
    columns = [Column(head, [row[head] for row in rows], head in ("worker", "state")) for head in rows[0]]
    return Table(run.label, filled(columns))


def _life(run: Shown, life: dict[str, Any]) -> dict[str, str]:
    alive_s, rank, which = life.get("elapsed_s"), life.get("rank"), life.get("life", 1)
    track = run.run.workers.get(rank) if run.records is not None and rank is not None else None
    state = UNKNOWN if track is None else run.run.state(track.rank) if which == track.life else "dead"

    def part(value: float | None) -> float | None:
        return value / alive_s if alive_s and value else None

    return {
        "worker": f"{UNKNOWN if rank is None else rank}{f', life {which}' if which > 1 else ''}",
        "state": state,
        "steps": number(life.get("steps")),
        "steps/s": number(part(life.get("steps"))),
        "computing": share(part(life.get("compute_s"))),
        **{f"waiting for {cause}": share(part((life.get("blocked_s") or {}).get(cause))) for cause in CAUSES},
        "staleness mean": number(life.get("staleness_mean")),
        "staleness max": number(life.get("staleness_max")),
        "discrepancy max": number(life.get("discrepancy_max") or None),
        **{what: number((life.get(what) or {}).get("done") or None) for what in ("exchanges", "merges")},
        "MB out": number(life.get("bytes_out", 0) / 1e6),
        "last loss": number(life.get("loss")),
    }


def events_table(run: Shown) -> Table:
    """What happened in a run, in order."""
    events = run.run.events if run.records is not None else []
    columns = {
        "at, s": [f"{max(0.0, event.time - run.began_s):,.2f}" for event in events],
        "what": [event.what for event in events],
        "worker": [", ".join(str(one) for one in (e.rank, e.peer) if one is not None) for e in events],
        "noticed by": [event.noticed_by() for event in events],
        "details": [event.text for event in events],
    }
    return Table(run.label, [Column(head, cells) for head, cells in columns.items()])


def theory_table(runs: Sequence[Shown]) -> tuple[str, Table]:
    """What was measured against what the papers say: how many hold, and a row for each."""
    found = [(run, bound) for run in runs for bound in bounds(run.result)]
    columns = {
        "strategy": [run.label for run, _ in found],
        "what": [bound.name for _, bound in found],
        "measured": [f"{number(bound.measured)} {bound.unit}".rstrip() for _, bound in found],
        "theory": [f"{bound.kind} {number(bound.bound)} {bound.unit}".rstrip() for _, bound in found],
        "measured / theory": [number(bound.share) for _, bound in found],
        "holds": ["✓ yes" if bound.holds else "✗ no" for _, bound in found],
        "source": [bound.source for _, bound in found],
    }
    words = ("strategy", "what", "holds", "source")
    said = f"{sum(bound.holds for _, bound in found)} of {len(found)} bounds hold; “about” means within 15 %."
    return said, Table("theory", [Column(head, cells, head in words) for head, cells in columns.items()])


def settings_table(runs: Sequence[Shown]) -> Table:
    """The settings of all runs, a column for each, and what their records say of them."""
    each = []
    for run in runs:
        result, about = run.result, run.run.about if run.records is not None else {}
        found = {"workers": result.workers, "seed": result.seed, **about, "settings": result.settings}
        if run.records is not None:
            started = datetime.fromtimestamp(about.get("started", 0.0), UTC)
            found |= {"started": f"{started:%Y-%m-%d %H:%M} UTC", "state": standing(run.run)}
            found["folder"] = run.run.folder.resolve().name
        each.append((run.label, flatten(found | {"trace sha256": result.trace_sha256 or UNKNOWN})))
    keys = list(dict.fromkeys(key for _, one in each for key in one))
    columns = [Column(label, [one.get(key, UNKNOWN) for key in keys]) for label, one in each]
    return Table("settings", [Column("setting", keys), *columns])
