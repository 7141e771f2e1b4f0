"""Beginnings of a run: when all its workers were lost, those that are restarted begin anew together.

Each beginning has names of its own in the store, so that entries of an earlier one do not count. A restarted
worker copies the weights of one that still trains; only where none can does the next beginning start, from
checkpoints or from nothing.

The store says which workers may still train. Each life of a worker leaves a mark in its beginning, which
counts until a later life of that rank comes or its launcher gives the rank up. So silence proves nothing: if
a worker is out of reach, a restarted one waits for it or for its next life.
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
    """No worker is left to copy from: this one must enter the run anew."""


class TooLate(RunStopped):
    """The run has ended with an answer; `done`: this worker's absence is no failure."""

    def __init__(self, rank: int, done: bool, had_it: bool) -> None:
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
    """One beginning of a run; the store has it as `text`, the first one as nothing."""

    number: int  # from 0 on
    ranks: tuple[int, ...]  # the workers that begin
    why: str = ""  # why the one before is over

    @property
    def text(self) -> str:
        return json.dumps([self.number, self.ranks, self.why]) if self.number else ""

    def run(self, run: str) -> str:
        """The number of the run in this beginning: messages of an earlier one do not belong to it."""
        return hashlib.sha256(f"{run}/{self.number}".encode()).hexdigest()[:32] if self.number else run

    def tell(self, resume: object) -> None:
        if self.number and resume is None:
            log.warning(
                "%s: training begins anew. To go on instead, let worker.checkpoint write checkpoints, and "
                "give attach their folder as resume",
                self.why,
            )
        elif self.number:
            log.warning("%s: those who were started again go on from %s", self.why, resume)

    def place(self, rank: int) -> int:
        """The rank among those that begin; later ones come after them."""
        return self.ranks.index(rank) if rank in self.ranks else max(rank, len(self.ranks))


@dataclass(frozen=True)
class Entry:
    """How a worker comes into a run."""

    beginning: Beginning
    late: bool  # the others train already
    back: bool  # an earlier life was in the same beginning: this one calls the others


class Beginnings:
    """A run's beginnings, as the store has them under `prefix`."""

    def __init__(self, base: Entries, prefix: str, workers: int, most: int) -> None:
        self._base, self._run, self._workers, self._most = base, base.under(prefix), workers, most

    def newest(self) -> Beginning:
        number, ranks, why = json.loads(self._run.read(NEWEST) or "[0, null, null]")
        return Beginning(number, tuple(ranks), why) if number else Beginning(0, tuple(range(self._workers)))

    def started(self, rank: int) -> int | None:
        """How often a launcher has started a worker that died; 0: given up; None: it has not said."""
        return self._base.number(f"{STARTS}/{rank}")

    def store(self, beginning: Beginning) -> Entries:
        return self._run.under(str(beginning.number)) if beginning.number else self._run

    def enter(self, rank: int, life: int, strategy: Strategy) -> Entry:
        """Enter the newest beginning, or make the next one if that one is lost."""
        while why := self.lost(now := self.newest(), strategy):
            ranks = tuple(rank for rank in range(self._workers) if self.started(rank) != 0)
            if not ranks:
                raise RunStopped(f"{why}, and none of those it began with is started again. Start a new run.")
            # Of several workers that do so at once, the first counts.
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
        """The ranks that were in a beginning, and whether that life may still train."""
        store, found = self.store(beginning), {}
        for rank in range(self._most):
            here = store.number(f"here/{rank}")
            if here is not None:
                last = self._run.number(f"life/{rank}")
                found[rank] = (last is None or here >= last) and self.started(rank) != 0
        return found

    def lost(self, beginning: Beginning, strategy: Strategy) -> str:
        """Why a beginning cannot go on; empty: it may."""
        store, marks = self.store(beginning), self.marks(beginning)
        if not marks or store.read("over") is not None:  # nobody has come yet; the run has ended well
            return ""
        if not any(marks.values()):
            return "all workers of this run were lost"
        needed = [rank for rank, lives in marks.items() if strategy.needs(rank) and not lives]
        if needed and store.read("begun") is not None:
            return f"worker {needed[0]} was lost, without which {strategy.name} cannot go on"
        return ""

    def restore(self, mine: Beginning, lives: Mapping[int, int]) -> None:
        """Enter the beginning and each rank's last life into a store that was started anew."""
        for rank, life in lives.items():
            known = self._run.compare_set(f"life/{rank}", "", str(life))
            while int(known.split()[0]) < life:  # others may have entered later ones
                known = self._run.compare_set(f"life/{rank}", known, str(life))
        while (newest := self.newest()).number < mine.number:
            self._run.compare_set(NEWEST, newest.text, mine.text)
