"""Runs in the trace-event format, which https://ui.perfetto.dev and chrome://tracing open.

A run is a process, a worker a thread of it. Gradients, exchanges and merges are complete events (X), what
happened to workers instants (i), accuracy and loss counters (C). Times are microseconds since a run began.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from freewheel.records.run import Run
from freewheel.show.replay.played import Played, played
from freewheel.show.shown import shown

US = 1e6
APART = 1000
"""Exchanges overlap gradients, so they have a row of their own: the worker's number and this."""


def as_perfetto(runs: Sequence[Run]) -> str:
    """The text of a file; ConfigError: a run has no timeline."""
    found: list[dict[str, Any]] = []
    for pid, one in enumerate(shown(runs)):
        run = played(one.run)
        found += _names(run, pid, one.label)
        found += _work(run, pid)
        found += _meetings(run, pid)
        for at_s, worker, what, words in run.marks:
            found.append(_event("i", what, at_s, pid, worker, cat="fault", s="t", args={"what": words}))
        for measure, curve in (("accuracy", run.accuracy), ("loss", run.loss)):
            found += [_event("C", measure, at_s, pid, 0, args={measure: value}) for at_s, value in curve]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _names(run: Played, pid: int, name: str) -> list[dict[str, Any]]:
    """What rows are called, and in which order they stand."""
    found = [_event("M", "process_name", 0.0, pid, 0, args={"name": name})]
    for worker, rank in enumerate(run.ranks):
        for row, (tid, words) in enumerate(((worker, ""), (APART + worker, ": exchanges"))):
            named, place = {"name": f"worker {rank}{words}"}, {"sort_index": 2 * worker + row}
            found.append(_event("M", "thread_name", 0.0, pid, tid, args=named))
            found.append(_event("M", "thread_sort_index", 0.0, pid, tid, args=place))
    return found


def _work(run: Played, pid: int) -> list[dict[str, Any]]:
    found = []
    for worker, lane in enumerate(run.spans):
        for step, (begin_s, end_s) in enumerate(zip(lane[::2], lane[1::2], strict=True), 1):
            found.append(_slice("gradient", begin_s, end_s - begin_s, pid, worker, {"step": step}))
    for place, begin_s, end_s in run.cut:
        found.append(_slice("unfinished gradient", begin_s, end_s - begin_s, pid, int(place), {}))
    return found


def _meetings(run: Played, pid: int) -> list[dict[str, Any]]:
    found = []
    met = run.exchanges
    for at_s, took_s, one, other in zip(*(met[k::4] for k in range(4)), strict=True):
        for mine, theirs in ((int(one), int(other)), (int(other), int(one))):
            told = {"with": run.ranks[theirs]}
            found.append(_slice("exchange", at_s, took_s, pid, APART + mine, told))
    for at_s, took_s, members in run.merges:
        every = {"with": [run.ranks[one] for one in members]}
        found += [_slice("merge", at_s, took_s, pid, APART + one, every) for one in members]
    return found


def _slice(
    name: str, begin_s: float, took_s: float, pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    dur = round(max(0.0, took_s) * US)
    return _event("X", name, begin_s, pid, tid, cat=name.split()[-1], dur=dur, args=args)


def _event(ph: str, name: str, at_s: float, pid: int, tid: int, **more: Any) -> dict[str, Any]:
    return {"ph": ph, "name": name, "ts": round(max(0.0, at_s) * US), "pid": pid, "tid": tid, **more}
