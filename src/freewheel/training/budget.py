"""How long a job goes on: steps of all workers, or a time for all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeAlias

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from freewheel.errors import RunStopped
from freewheel.fabric import secret
from freewheel.runtime.membership.entries import Entries
from freewheel.training.job import Job

HANDFUL_S = 0.1
Groups: TypeAlias = Callable[[], tuple[Sequence[int], bool]]
Part: TypeAlias = tuple[int, float, float]
"""How many steps, where in the budget they begin, and how much of it each takes."""


class Budget:
    """The worker-steps of all workers: those who wait for nobody take them as they need them, in handfuls."""

    def __init__(self, job: Job, lockstep: bool, number: int, step_s: float) -> None:
        self.job, self.lockstep = job, lockstep
        self.total: float = job.workers * job.steps
        self._key = f"training/{number}/steps"
        # A slow worker takes few at a time: at the end the others would wait until its last ones are made.
        self._handful = max(1, min(10, job.steps // 20, int(HANDFUL_S / step_s)))
        self._begun = 0
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.plain = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        self.store = Entries(self.plain, secret.of_environment(os.environ))

    def go_on(self, rank: int, steps: int) -> None:
        """Begin where a checkpoint was taken: this worker had made so many steps, the others say theirs."""
        self._begun = steps * self.job.workers
        if not self.lockstep:
            self.store.set(f"{self._key}/{rank}", str(steps))
            others = range(self.job.workers)
            self._begun = sum(int(self.store.get(f"{self._key}/{other}")) for other in others)
        if self._begun >= self.total:
            raise RunStopped(
                f"the checkpoint in {self.job.checkpoint} has all {self.job.steps} steps of this run. "
                "Give --steps a larger number to go on from it."
            )

    def steps(self, group: Groups | None = None) -> Iterator[float]:
        """One turn for each step, with the share of the budget that is used up.

        Where workers step in groups, one takes steps for all of its group, so all end together: `group` says
        which it is now, and whether it stays so.
        """
        made = 0
        while True:
            count, begin, each = self._part(group, made)
            for step in range(count):
                yield min(1.0, (begin + step * each) / self.total)
            if not count:
                return
            made += count

    def _part(self, group: Groups | None, made: int) -> Part:
        """The next ones of a worker that has made so many."""
        if group is not None:
            members, stays = group()
            told = self._first(f"{'-'.join(map(str, members))}/{made}", len(members), stays).split()
            return int(told[0]), float(told[1]), float(told[2])
        if self.lockstep:  # all know it
            n = self.job.workers
            return self.job.steps - self._begun // n - made, self._begun + made * n, n
        return self._take(1, stays=True)

    def _first(self, name: str, workers: int, stays: bool) -> str:
        """What the first of a group to come takes for all of it."""
        name = f"{self._key}/{name}"
        if self.store.add(name, 1) == 1:
            self.store.set(f"{name}/dealt", " ".join(map(str, self._take(workers, stays))))
        return self.store.get(f"{name}/dealt")

    def _take(self, workers: int, stays: bool) -> Part:
        most = (self._handful if stays else 1) * workers
        begin = self.store.add(self._key, most) - most + self._begun
        return len(range(begin, int(min(begin + most, self.total)), workers)), begin, workers

    def made(self) -> int:
        """Steps of all workers when the budget is used up."""
        return int(self.total)


class Deadline(Budget):
    """A time that begins with the first worker's first step: a step begun before it is over is finished.

    Where all step together, whoever comes first to the end of a part says how many steps the next one has,
    and what share of the time they begin at: all end with the same step, and step with the same rates.
    """

    def __init__(self, job: Job, lockstep: bool, number: int, step_s: float) -> None:
        super().__init__(job, lockstep, number, step_s)
        assert job.seconds is not None
        self.total, self._step_s, self._made = job.seconds, step_s, 0

    def steps(self, group: Groups | None = None) -> Iterator[float]:
        """One turn for each step, with the share of the time that is over."""
        everybody = range(self.job.workers), True
        group = (lambda: everybody) if group is None and self.lockstep else group
        # The clock is common, for all workers are on one host.
        self._began_s = float(self.store.compare_set(f"{self._key}/began", "", f"{time.monotonic()}"))
        for share in super().steps(group):
            yield share
            self._made += 1
        self.store.add(f"{self._key}/made", self._made)

    def _first(self, name: str, workers: int, stays: bool) -> str:
        mine = " ".join(map(str, self._take(workers, stays)))
        return self.store.compare_set(f"{self._key}/{name}", "", mine)

    def _take(self, workers: int, stays: bool) -> Part:
        over_s = time.monotonic() - self._began_s
        step_s, left_s = over_s / self._made if self._made else self._step_s, self.total - over_s
        several = stays and workers > 1  # one that steps alone looks at the clock before each
        count = max(1, int(min(HANDFUL_S, left_s) / step_s)) if several else 1
        return count if left_s > 0 else 0, over_s, step_s

    def made(self) -> int:
        """Steps of all workers whose loops have ended."""
        return self.store.number(f"{self._key}/made") or 0


def budget(job: Job, lockstep: bool, number: int, step_s: float) -> Budget:
    """What the job is given; `step_s` is what a step takes this worker."""
    return (Budget if job.seconds is None else Deadline)(job, lockstep, number, step_s)
