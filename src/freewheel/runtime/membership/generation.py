"""Beginning again: when all workers of a run were lost, those who are started again begin together anew.

Each beginning has names of its own in the store, so that nothing of the one before is taken for now. A
worker that is started again must know which it is in: whoever still trains has the newest weights, and it
copies them; only where nobody can have any does the next one begin, from checkpoints or from nothing.

The store says who may still train. Each life of a worker leaves a mark in its beginning; the mark counts
while no later life of that rank has come and its launcher has not said that none will. So silence proves
nothing: where a worker is out of reach, whoever is started again waits for it or for its next life.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from freewheel.errors import RunStopped, WorkerLost
from freewheel.runtime.membership.entries import Entries
from freewheel.strategy import Strategy

STARTS = "freewheel/starts"  # how often the launcher has started each worker that died; 0: not any more
NEWEST = "beginning"
GIVEN_UP = "it has ended, and its launcher does not start it again"

log = logging.getLogger("freewheel")


class Orphaned(RunStopped):
    """Nobody is left whom this worker could copy: it must enter the run anew."""


class TooLate(RunStopped):
    """The run has ended, with an answer; `done`: others have it, and nobody misses this worker."""

    def __init__(self, rank: int, done: bool, had_it: bool = False) -> None:
        why = "An earlier life of it had it too, and failed" if had_it else "Nothing is left to train"
        super().__init__(
            f"worker {rank} comes too late: the others have ended the run, and have its answer. {why}."
        )
        self.done = done


class Outlived(RunStopped):
    """A later life of this worker is in the run: this one has no part in it any more."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"worker {rank} was started again and trains elsewhere: this earlier life ends without an answer."
        )


@dataclass(frozen=True)
class Beginning:
    """One beginning of a run: its number from 0 on, whom it begins with, and why the one before is over."""

    number: int
    ranks: tuple[int, ...]
    why: str = ""

    @property
    def text(self) -> str:
        """As the store has it; the first one is not written down."""
        return json.dumps([self.number, self.ranks, self.why]) if self.number else ""

    def run(self, run: str) -> str:
        """The number of the run: what an earlier beginning still sends does not belong to this one."""
        return hashlib.sha256(f"{run}/{self.number}".encode()).hexdigest()[:32] if self.number else run

    def tell(self, resume: object) -> None:
        """Say what happened, and what it means."""
        if self.number and resume is None:
            log.warning(
                "%s: training begins anew. To go on instead, let worker.checkpoint write checkpoints, and "
                "give attach their folder as resume",
                self.why,
            )
        elif self.number:
            log.warning("%s: those who were started again go on from %s", self.why, resume)

    def place(self, rank: int) -> int:
        """Which of those it begins with this worker is; who comes later comes after them."""
        return self.ranks.index(rank) if rank in self.ranks else max(rank, len(self.ranks))


@dataclass(frozen=True)
class Entry:
    """How a worker comes into a run."""

    beginning: Beginning
    late: bool  # the others train already
    back: bool  # an earlier life of this rank was in the same beginning: the others do not call this one


class Beginnings:
    """What the store says of a run's beginnings; the run's names begin with `prefix`."""

    def __init__(self, base: Entries, prefix: str, workers: int, most: int) -> None:
        self._base, self._run, self._workers, self._most = base, base.under(prefix), workers, most

    def newest(self) -> Beginning:
        """The beginning that counts."""
        number, ranks, why = json.loads(self._run.read(NEWEST) or "[0, null, null]")
        return Beginning(number, tuple(ranks), why) if number else Beginning(0, tuple(range(self._workers)))

    def started(self, rank: int) -> int | None:
        """How often a launcher has started a worker that died; 0: not again; None: it has said nothing."""
        return self._base.number(f"{STARTS}/{rank}")

    def store(self, beginning: Beginning) -> Entries:
        """Where a beginning has its names."""
        return self._run.under(str(beginning.number)) if beginning.number else self._run

    def enter(self, rank: int, life: int, strategy: Strategy) -> Entry:
        """Come into the newest beginning, or into the next one where nobody of it is left."""
        while why := self.lost(now := self.newest(), strategy):
            ranks = tuple(rank for rank in range(self._workers) if self.started(rank) != 0)
            if not ranks:
                raise RunStopped(f"{why}, and none of those it began with is started again. Start a new run.")
            # Of several who do so at once the first one counts.
            self._run.compare_set(NEWEST, now.text, Beginning(now.number + 1, ranks, why).text)
        store = self.store(now)
        missing = [peer for peer in range(self._workers) if strategy.needs(peer) and peer not in now.ranks]
        if missing:
            raise WorkerLost(
                f"{strategy.name} needs worker {missing[0]}: {GIVEN_UP}. Start the run again, with more "
                "--restarts; with resume it goes on from the last checkpoint."
            )
        late = rank not in now.ranks or store.read("begun") is not None
        back = store.read(f"here/{rank}") is not None
        if not late:
            store.set(f"here/{rank}", str(life))
        return Entry(now, late, back)

    def marks(self, beginning: Beginning) -> dict[int, bool]:
        """Who has been in a beginning, and whether that life may still be."""
        store, found = self.store(beginning), {}
        for rank in range(self._most):
            here = store.number(f"here/{rank}")
            if here is not None:
                last = self._run.number(f"life/{rank}")
                found[rank] = (last is None or here >= last) and self.started(rank) != 0
        return found

    def lost(self, beginning: Beginning, strategy: Strategy) -> str:
        """Why nobody can go on in a beginning; empty where somebody may."""
        store, marks = self.store(beginning), self.marks(beginning)
        if not marks or store.read("over") is not None:  # nobody has come yet; all have gone, with the answer
            return ""
        if not any(marks.values()):
            return "all workers of this run were lost"
        needed = [rank for rank, lives in marks.items() if strategy.needs(rank) and not lives]
        if needed and store.read("begun") is not None:
            return f"worker {needed[0]} was lost, without which {strategy.name} cannot go on"
        return ""

    def restore(self, mine: Beginning, lives: Mapping[int, int]) -> None:
        """Tell a store that was started anew which beginning it is, and the last life of each rank."""
        for rank, life in lives.items():
            known = self._run.compare_set(f"life/{rank}", "", str(life))
            while int(known.split()[0]) < life:  # others may know of later ones
                known = self._run.compare_set(f"life/{rank}", known, str(life))
        while (newest := self.newest()).number < mine.number:
            self._run.compare_set(NEWEST, newest.text, mine.text)
