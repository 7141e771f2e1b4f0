"""A soak: real processes learn digits while a seed's faults strike them; then the laws are checked.

    kill     SIGKILL of a worker, which is started again after a while
    store    SIGKILL of the store that workers meet at; another, empty one on the same port after a while
    cut      the link of a worker is taken down and up again (network namespaces: root and iproute2)

Faults come at random shares of the run's passes, or at an even pace (`every`), and end some time before the
run does, so that it can be seen whether all find together. They overlap as they fall, but a worker that has
been up for a while is always left within reach, for nobody could know what the last one knew; and one that is
cut off is not killed before it is back, for nobody could count what it did alone. What must hold is in
laws.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError, RunStopped, UnknownName, at_least
from freewheel_bench import laws
from freewheel_bench.footprint import family, footprint, left_behind, left_standing, mark, shared_memory
from freewheel_bench.namespaces import Network, check_possible
from freewheel_bench.rates import Progress
from freewheel_bench.workers import Place, Run, Show

KILL, STORE, CUT = "kill", "store", "cut"
OFTEN = {KILL: 4, STORE: 1, CUT: 2}
# How long a worker or a store is gone, or a link down.
AWAY_S = {KILL: (0.1, 2.0), STORE: (1.0, 6.0), CUT: (1.0, 8.0)}
MINUTES = 3.0
EVERY_S = 4.0  # between two faults, unless their number is given
CALM_S = 15.0  # at the end of a run nothing strikes for so long
STEPS_UP = 20  # a worker that has made so many steps knows what the others know
SETTLED_S = 4.0  # so long after its link is back a worker has told what it did alone
STUCK_S = 60.0
LOOK_S = 0.02


@dataclass(frozen=True)
class Soak:
    """What is asked for."""

    workers: int = 4
    # Default: as long as the faults take, if their number and pace are given; else MINUTES.
    minutes: float | None = None
    kinds: tuple[str, ...] = (KILL, STORE)
    faults: int | None = None
    every: float | None = None  # seconds between two faults; default: they come at random moments
    spare: int | None = None  # the worker that no fault strikes: what it takes up is compared, too
    seed: int = 0
    strategy: str = "adpsgd"
    step_ms: float = 50.0
    batch_size: int = 8
    lr: float = 0.05

    def __post_init__(self) -> None:
        at_least("--workers", self.workers, 2)
        at_least("--minutes", self.minutes, 0.2)
        at_least("--faults", self.faults, 1)
        at_least("--every", self.every, 0.1)
        if self.spare is not None and not 0 <= self.spare < self.workers:
            raise ConfigError(
                f"--spare: worker {self.spare} does not exist; there are workers 0 to {self.workers - 1}."
            )
        at_least("--step-ms", self.step_ms, 1.0)
        for kind in self.kinds:
            if kind not in OFTEN:
                raise UnknownName("kind of fault", kind, OFTEN)
        if not self.kinds:
            raise ConfigError(
                f"--kind names no fault: write some of {', '.join(OFTEN)}, with commas between."
            )
        if CUT in self.kinds:
            check_possible()

    @property
    def seconds(self) -> float:
        """How long the run would take if nobody were missing."""
        if self.minutes is None and self.every is not None and self.faults is not None:
            return self.every * self.faults + CALM_S
        return 60 * (self.minutes or MINUTES)

    def passes(self, batches: int) -> int:
        return max(1, round(1e3 * self.seconds * self.workers / self.step_ms / batches))

    def drawn(self) -> list[Fault]:
        """The faults, in the order in which they come."""
        dice = random.Random(self.seed)
        calm_s = min(CALM_S, self.seconds / 2)
        if self.every is not None:
            count = self.faults or max(1, int((self.seconds - calm_s) / self.every))
            moments = [self.every * number for number in range(count)]
        else:
            count = self.faults or max(1, round(self.seconds / EVERY_S))
            moments = sorted(dice.uniform(0.03, 1 - calm_s / self.seconds) for _ in range(count))
        weights = [OFTEN[kind] for kind in self.kinds]
        found = []
        for at in moments:
            (kind,) = dice.choices(self.kinds, weights)
            ranks = dice.sample(range(self.workers), self.workers)
            struck = tuple(rank for rank in ranks if rank != self.spare)
            found.append(Fault(at, kind, struck, dice.uniform(*AWAY_S[kind])))
        return found


def possible() -> tuple[str, ...]:
    try:
        check_possible()
    except ConfigError:
        return KILL, STORE
    return KILL, STORE, CUT


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and is well again after a while."""

    at: float  # at which share of the run's passes; with `every`, how many seconds after all were up
    kind: str
    ranks: tuple[int, ...]  # whom it strikes: the first of these that may be struck
    away_s: float


@dataclass
class Report:
    """What became of a soak."""

    asked: Soak
    laws: list[laws.Law] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        return all(law.held for law in self.laws)

    def as_json(self) -> str:
        return json.dumps(asdict(self) | {"held": self.held}, indent=2) + "\n"


def soak(asked: Soak, progress: Progress, beside: bool = False) -> Report:
    """Run it, and judge; `beside`: the same run without faults first, to compare the answers."""
    report = Report(asked)
    calm = None
    if beside:
        calm = _run(asked, [], lambda share: progress("undisturbed", share / 2))
    faults = asked.drawn()
    found = _run(asked, faults, lambda share: progress("soak", (1 + share) / 2 if beside else share))
    report.faults = dict(Counter(fault.kind for fault in faults))
    report.laws = laws.judge(found, calm)
    moments = [at_s for at_s, what in found.events if what.endswith(("killed", "cut off"))]
    report.figures = found.figures()
    report.figures["between_faults_s"] = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
    if calm is not None:
        report.figures["undisturbed"] = calm.figures()
    return report


def _run(asked: Soak, faults: Sequence[Fault], show: Show) -> laws.Found:
    with tempfile.TemporaryDirectory(prefix="freewheel-soak-") as name:
        folder = Path(name)
        length = _save_digits(folder, asked.workers)
        batches = math.ceil(length / asked.batch_size)
        passes = asked.passes(batches)
        job = {
            "folder": name,
            "passes": passes,
            **{key: getattr(asked, key) for key in ("strategy", "seed", "step_ms", "batch_size", "lr")},
        }
        shared, ours = shared_memory(), mark()
        with (
            _places(asked) as (places, network),
            Run("freewheel_bench.soak_worker", job, places, forked=True, keep=1) as run,
        ):
            trial = _Trial(asked, run, network, list(faults), passes, show)
            trial.until_over()
            left = left_behind([life for lives in run.lives for life in lives], shared, ours)
        left += left_standing(network)
        uses = laws.uses(folder, length, asked.batch_size, asked.seed, passes)
    assert trial.before is not None
    assert trial.after is not None
    return laws.Found(
        asked.workers, run.lives, trial.cut_lives, uses, left, trial.events, trial.before, trial.after
    )


@contextlib.contextmanager
def _places(asked: Soak) -> Iterator[tuple[list[Place], Network | None]]:
    if CUT not in asked.kinds:
        yield [Place()] * asked.workers, None
        return
    with Network(asked.workers, 1000.0) as network:
        yield network.places, network


def _save_digits(folder: Path, workers: int) -> int:
    """Put the images where workers find them without scikit-learn; how many there are to learn from."""
    import torch

    from freewheel.tasks.digits import Digits

    task = Digits()
    task.prepare(workers, seed=0)
    names = ("images", "labels", "test_images", "test_labels")
    torch.save({name: getattr(task, name) for name in names}, folder / "digits.pt")
    return len(task.labels)


class _Trial:
    """Workers from the first one's start to the last one's end, and what strikes them on the way."""

    def __init__(
        self, asked: Soak, run: Run, network: Network | None, faults: list[Fault], passes: int, show: Show
    ) -> None:
        self.asked, self.run, self.network, self.passes, self.show = asked, run, network, passes, show
        self.faults = faults
        self.mending: list[tuple[float, Callable[[], None]]] = []  # what is made good, and when
        self.cut: set[int] = set()
        self.store_away = False
        self.unsettled: dict[int, float] = {}  # until when workers whose link was cut are left alone
        self.cut_lives: set[int] = set()  # processes that were cut off at some time
        self.events: list[tuple[float, str]] = []
        self.before: laws.Taken | None = None
        self.after: laws.Taken | None = None
        self.all_up_s = math.inf  # when all were up for the first time

    def _note(self, what: str) -> None:
        self.events.append((time.monotonic(), what))

    def until_over(self) -> None:
        steps, since_s, share = 0, time.monotonic(), 0.0
        while not all("result" in life.said for life in self.run.present):
            now_s = time.monotonic()
            self.run.check()
            self._mend(now_s)
            said = (life.steps[-1].progress for life in self.run.present if life.steps)
            share = max(share, max(said, default=0.0) / self.passes)
            self.show(share)
            self._look(now_s)
            at = share if self.asked.every is None else now_s - self.all_up_s
            if self.faults and self.faults[0].at <= at and self._strike(self.faults[0], now_s):
                self.faults.pop(0)
            made = sum(len(life.times) for lives in self.run.lives for life in lives)
            if made > steps:
                steps, since_s = made, now_s
            if now_s > since_s + STUCK_S:
                raise RunStopped(f"nobody has made a step for {STUCK_S:g} s. {self._state()}")
            time.sleep(LOOK_S)
        if self.faults:
            raise RunStopped(
                f"the run was over before the last {len(self.faults)} faults could strike; give fewer faults "
                "or more minutes."
            )
        self.run.finish(STUCK_S)
        self.before = self.before or self._taken()
        self.after = self.after or self._taken()

    def _look(self, now_s: float) -> None:
        """Note what is taken up when all are up: before the first fault, and after the last one."""
        if self.before is None or (self.after is None and not self.faults and not self.mending):
            if not all(map(self._fit, range(self.asked.workers))):
                return
            if self.before is None:
                self.before, self.all_up_s = self._taken(), now_s
            else:
                self.after = self._taken()

    def _taken(self) -> laws.Taken:
        workers = [life.process.pid for life in self.run.present]
        spared = None if self.asked.spare is None else footprint([workers[self.asked.spare]])
        return laws.Taken(footprint(family(without=workers)), spared)

    def _state(self) -> str:
        said = []
        for rank, life in enumerate(self.run.present):
            words = f"{len(life.times)} steps, the last {life.steps[-1]}" if life.steps else f"{life.said}"
            said.append(f"worker {rank} in life {len(self.run.lives[rank])}: {words}")
        return "; ".join(said)

    # -- faults --

    def _strike(self, fault: Fault, now_s: float) -> bool:
        """Strike somebody who may be struck, if there is one now."""
        if fault.kind == STORE:
            if self.store_away:
                return False
            self.run.end_store()
            self._note("store killed")
            self.store_away = True
            self.mending.append((now_s + fault.away_s, self._start_store))
            return True
        may = self._may_be_killed if fault.kind == KILL else self._may_be_cut
        rank = next((rank for rank in fault.ranks if may(rank, now_s)), None)
        if rank is None:
            return False
        if fault.kind == KILL:
            self.run.kill(rank)
            self._note(f"worker {rank} killed")
            self.mending.append((now_s + fault.away_s, lambda: self._restart(rank)))
        else:
            assert self.network is not None
            self.network.cut(rank)
            self._note(f"worker {rank} cut off")
            self.cut.add(rank)
            self.cut_lives.add(self.run.present[rank].process.pid)
            self.mending.append((now_s + fault.away_s, lambda: self._heal(rank)))
        return True

    def _fit(self, rank: int) -> bool:
        life = self.run.present[rank]
        return not life.killed and len(life.times) >= STEPS_UP and rank not in self.cut

    def _others_fit(self, rank: int) -> int:
        return sum(self._fit(other) for other in range(self.asked.workers) if other != rank)

    def _may_be_killed(self, rank: int, now_s: float) -> bool:
        """Also while it joins: but not while what it did alone is not known."""
        life, alone = self.run.present[rank], rank in self.cut or now_s < self.unsettled.get(rank, 0.0)
        return "imported" in life.said and not life.killed and not alone and self._others_fit(rank) >= 1

    def _may_be_cut(self, rank: int, _now_s: float) -> bool:
        return self._fit(rank) and self._others_fit(rank) >= 2

    def _mend(self, now_s: float) -> None:
        due = [mend for at_s, mend in self.mending if at_s <= now_s]
        self.mending = [(at_s, mend) for at_s, mend in self.mending if at_s > now_s]
        for mend in due:
            mend()

    def _restart(self, rank: int) -> None:
        self.run.start(rank)
        self._note(f"worker {rank} started again")

    def _start_store(self) -> None:
        self.run.start_store()
        self.store_away = False
        self._note("store started")

    def _heal(self, rank: int) -> None:
        assert self.network is not None
        self.network.heal(rank)
        self._note(f"worker {rank} healed")
        self.cut.discard(rank)
        self.unsettled[rank] = time.monotonic() + SETTLED_S
