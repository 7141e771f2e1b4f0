"""How long a job goes on: steps of all workers, or a time for all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from freewheel.errors import RunStopped
from freewheel.fabric import secret
from freewheel.runtime.membership.entries import Entries
from freewheel.training.job import Job

HANDFUL_S = 0.1
Groups = Callable[[], tuple[Sequence[int], bool]]


class Budget:
    """The worker-steps of all workers: those who wait for nobody take them as they need them, in handfuls."""

    def __init__(self, job: Job, lockstep: bool, number: int, step_s: float) -> None:
        self.job, self.lockstep, self.total = job, lockstep, job.workers * job.steps
        self._key = f"training/{number}/steps"
        # A slow worker takes few at a time: at the end the others would wait until its last ones are made.
        self._handful = max(1, min(10, job.steps // 20, int(HANDFUL_S / step_s)))
        self._begun = 0
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.plain = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        self.store = Entries(self.plain, secret.of_environment(os.environ))

    def go_on(self, rank: int, steps: int) -> None:
        """Begin where a checkpoint was taken: this worker had made so many steps, the others say theirs."""
        self._begun = steps
        if not self.lockstep:
            self.store.set(f"{self._key}/{rank}", str(steps))
            others = range(self.job.workers)
            self._begun = sum(int(self.store.get(f"{self._key}/{other}")) for other in others)
        if self._begun >= (self.job.steps if self.lockstep else self.total):
            raise RunStopped(
                f"the checkpoint in {self.job.checkpoint} has all {self.job.steps} steps of this run. "
                "Give --steps a larger number to go on from it."
            )

    def steps_of_groups(self, group: Groups) -> Iterator[float]:
        """The same where workers step in groups: one takes steps for all of its group, so all end together.

        `group` says which it is now, and whether it stays so.
        """
        made = 0
        while True:
            members, stays = group()
            name = f"{self._key}/{'-'.join(map(str, members))}/{made}"
            if self.store.add(name, 1) == 1:
                handful = self._handful if stays else 1
                begin = int(self.store.add(self._key, handful * len(members))) - handful * len(members)
                self.store.set(f"{name}/dealt", f"{begin + self._begun} {handful}")
            begin, handful = map(int, self.store.get(f"{name}/dealt").split())
            for step in range(begin, min(begin + handful * len(members), self.total), len(members)):
                yield step / self.total
                made += 1
            if begin + handful * len(members) >= self.total:
                return

    def steps(self) -> Iterator[float]:
        """One turn for each step, with the share of the budget that is used up."""
        if self.lockstep:
            for step in range(self._begun, self.job.steps):
                yield step / self.job.steps
            return
        while True:
            begin = self.store.add(self._key, self._handful) - self._handful + self._begun
            for step in range(begin, min(begin + self._handful, self.total)):
                yield step / self.total
            if begin + self._handful >= self.total:
                return

    def made(self) -> int:
        """Steps of all workers when the budget is used up."""
        return self.total


class Deadline(Budget):
    """A time that begins with the first worker's first step: a step begun before it is over is finished.

    Where all step together, whoever comes first to the end of a part says how many steps the next one has,
    and what share of the time they begin at: all end with the same step, and step with the same rates.
    """

    def __init__(self, job: Job, lockstep: bool, number: int, step_s: float) -> None:
        super().__init__(job, lockstep, number, step_s)
        assert job.seconds is not None
        self._seconds, self._step_s = job.seconds, step_s

    def steps(self) -> Iterator[float]:
        """One turn for each step, with the share of the time that is over."""
        everybody = range(self.job.workers)
        return self._counted(self._together(lambda: (everybody, True)) if self.lockstep else self._alone())

    def steps_of_groups(self, group: Groups) -> Iterator[float]:
        """The same where workers step in groups, each of which ends together."""
        return self._counted(self._together(group))

    def _counted(self, shares: Iterator[float]) -> Iterator[float]:
        self._began_s = float(self._first("began", f"{time.monotonic()}"))
        made = 0
        for share in shares:
            yield share
            made += 1
        self.store.add(f"{self._key}/made", made)

    def _alone(self) -> Iterator[float]:
        while (share := self._share()) < 1:
            yield share

    def _together(self, group: Groups) -> Iterator[float]:
        step_s, made = self._step_s, 0
        while True:
            members, stays = group()
            share = self._share()
            left_s = (1 - share) * self._seconds
            count = max(1, int(min(HANDFUL_S, left_s) / step_s)) if left_s > 0 and stays else int(left_s > 0)
            part = f"{'-'.join(map(str, members))}/{made}"
            told = self._first(part, f"{count} {share} {step_s / self._seconds}").split()
            count, share, each = int(told[0]), float(told[1]), float(told[2])
            if not count:
                return
            for step in range(count):
                yield min(1.0, share + step * each)
            made += count
            step_s = self._share() * self._seconds / made

    def made(self) -> int:
        """Steps of all workers whose loops have ended."""
        return self.store.number(f"{self._key}/made") or 0

    def _share(self) -> float:
        return (time.monotonic() - self._began_s) / self._seconds

    def _first(self, name: str, mine: str) -> str:
        """What the first to ask said; the clock is common, for all workers are on one host."""
        return self.store.compare_set(f"{self._key}/{name}", "", mine)


def budget(job: Job, lockstep: bool, number: int, step_s: float) -> Budget:
    """What the job is given; `step_s` is what a step takes this worker."""
    return (Budget if job.seconds is None else Deadline)(job, lockstep, number, step_s)
