"""What a fault costs those who are left: workers and their store are killed and started again, links cut.

Every worker tells when it made each step. The pause of a fault is the longest time between two steps of any
worker that was not touched, less the median time of a step, from a moment before the fault until a while
after it. Workers sleep through their gradients, so that a core they share does not hide what others do.

    kill          SIGKILL of one worker after another, each started again after a while
    restart       the same workers: from having imported torch to being ready for the first step
    rendezvous    SIGKILL of the store that workers met at; another one on the same port after a while
    cut           the link of one worker, then of worker 0, is taken down and up again (namespaces: as root)
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from freewheel_bench.figure import Figure
from freewheel_bench.namespaces import Network
from freewheel_bench.rates import Load, Progress
from freewheel_bench.workers import Place, Run, Show

KILL, RESTART, RENDEZVOUS, CUT = "kill", "restart", "rendezvous", "cut"
KINDS = (KILL, RESTART, RENDEZVOUS, CUT)
ALLOWED_S = 0.05  # how much longer than a step a survivor may pause
RESTART_ALLOWED_S = 1.0
HEAL_ALLOWED_S = 2.0
BEFORE_S, AFTER_S = 2.0, 4.0
DEADLINE_S = 120.0


def faults(
    kinds: Sequence[str], load: Load, strategies: Sequence[str], kills: int, away_s: float, progress: Progress
) -> list[Figure]:
    found: list[Figure] = []
    kinds_run = [kind for kind in kinds if kind != RESTART or KILL not in kinds]  # one run gives both
    runs = [(kind, strategy) for kind in kinds_run for strategy in strategies]
    for done, (kind, strategy) in enumerate(runs):

        def show(share: float, done: int = done, what: str = f"{kind} {strategy}") -> None:
            progress(what, (done + share) / len(runs))

        show(0.0)
        if kind in (KILL, RESTART):
            found += [figure for figure in _kill(load, strategy, kills, show) if figure.name in kinds]
        elif kind == RENDEZVOUS:
            found.append(_rendezvous(load, strategy, away_s, show))
        else:
            found += _cut(load, strategy, away_s, show)
    return found


@contextmanager
def _running(load: Load, strategy: str, places: Sequence[Place] | None = None) -> Iterator[Run]:
    asked = {"model_mb": load.model_mb, "compute_ms": load.compute_ms, "strategy": strategy}
    with Run("freewheel_bench.fault_worker", asked, places or [Place()] * load.workers) as run:
        run.until("steps", lambda: all(len(life.times) >= 10 for life in run.present), DEADLINE_S)
        yield run


def _kill(load: Load, strategy: str, kills: int, show: Show) -> list[Figure]:
    pauses, quiet, joins = [], [], []
    with _running(load, strategy) as run:
        for k in range(kills):
            rank = (k + load.workers - 1) % load.workers  # worker 0, whose rank leads, among them
            run.sleep(BEFORE_S)
            moment = time.monotonic()
            run.kill(rank)
            run.sleep(AFTER_S)
            others = [one for one in range(load.workers) if one != rank]
            pauses.append(_pause(run, others, moment - 0.5, moment + AFTER_S))
            quiet.append(_pause(run, range(load.workers), moment - BEFORE_S, moment))
            life = run.start(rank)
            run.until("a restarted worker", lambda life=life: bool(life.times), DEADLINE_S)  # type: ignore[misc]
            joins.append(life.said["ready"] - life.said["imported"])
            show((k + 1) / kills)
    raw = {
        "pauses_s": pauses,
        "without_faults_s": quiet,
        "compute_ms": load.compute_ms,
        "model_mb": load.model_mb,
    }
    return [
        _figure(KILL, strategy, max(pauses), ALLOWED_S, {**raw, "noise_s": max(quiet)}),
        _figure(RESTART, strategy, max(joins), RESTART_ALLOWED_S, {**raw, "joins_s": joins, "noise_s": 0.0}),
    ]


def _rendezvous(load: Load, strategy: str, away_s: float, show: Show) -> Figure:
    with _running(load, strategy) as run:
        run.sleep(BEFORE_S)
        moment = time.monotonic()
        run.end_store()
        run.sleep(away_s, lambda share: show(0.9 * share))
        run.start_store()
        back = time.monotonic()
        run.until("all to register", run.all_registered, DEADLINE_S)
        registered_s = time.monotonic() - back
        run.sleep(BEFORE_S)
        workers = range(load.workers)
        pause = _pause(run, workers, moment - 0.5, back + BEFORE_S)
        noise = _pause(run, workers, moment - BEFORE_S, moment)
    raw = {"away_s": away_s, "registered_after_s": registered_s, "noise_s": noise}
    return _figure(RENDEZVOUS, strategy, pause, ALLOWED_S, raw)


def _cut(load: Load, strategy: str, away_s: float, show: Show) -> list[Figure]:
    pauses, heals, noises, alone = [], [], [], []
    ranks = (load.workers - 1, 0)  # worker 0 deals the data, and leads where one does
    with Network(load.workers, 1000.0) as network, _running(load, strategy, network.places) as run:
        for k, rank in enumerate(ranks):
            run.sleep(BEFORE_S)
            moment, steps = time.monotonic(), len(run.present[rank].times)
            network.cut(rank)
            run.sleep(away_s, lambda share, k=k: show((k + share) / len(ranks)))  # type: ignore[misc]
            alone.append(len(run.present[rank].times) - steps)
            network.heal(rank)
            healed = time.monotonic()
            averaged = functools.partial(_averaged_since, run, rank, healed)
            run.until("an exchange", lambda averaged=averaged: averaged() is not None, DEADLINE_S)  # type: ignore[misc]
            run.sleep(BEFORE_S)
            pauses.append(_pause(run, range(load.workers), moment - 0.5, healed + BEFORE_S))
            noises.append(_pause(run, range(load.workers), moment - BEFORE_S, moment))
            when = averaged()
            assert when is not None
            heals.append(when - healed)
    raw = {"away_s": away_s, "cut": ranks, "pauses_s": pauses, "healed_s": heals, "steps_alone": alone}
    raw["noise_s"] = max(noises)
    return [
        _figure(CUT, strategy, max(pauses), ALLOWED_S, raw),
        _figure("healed", strategy, max(heals), HEAL_ALLOWED_S, raw),
    ]


def _averaged_since(run: Run, rank: int, moment: float) -> float | None:
    """When a worker had first been averaged with another after a moment; a merge of one does not count."""
    together = [step for step in list(run.present[rank].steps) if step.time > moment and step.members > 1]
    return next((step.time for step in together if step.merged > together[0].merged), None)


def _pause(run: Run, ranks: Sequence[int], begin: float, end: float) -> float:
    """The longest time between two steps of any of these workers in a window, less that of a usual step."""
    longest = 0.0
    for rank in ranks:
        times = run.present[rank].times.tolist()
        usual = statistics.median(b - a for a, b in itertools.pairwise(times))
        gaps = [b - a - usual for a, b in itertools.pairwise(times) if b > begin and a < end]
        longest = max(longest, *gaps)
    return longest


def _figure(name: str, strategy: str, seconds: float, allowed_s: float, raw: dict[str, Any]) -> Figure:
    return Figure(name, strategy, seconds, "allowed", allowed_s, seconds / allowed_s, "s", raw)
