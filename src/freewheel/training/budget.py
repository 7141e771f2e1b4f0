"""How long a job goes on: steps of all workers, or a time for all."""

import json
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
Part: TypeAlias = tuple[int, float, float]  # how many steps, where they begin, how much of it each takes


class Budget:
    """The worker-steps of all workers, or a time that begins with the first worker's first step.

    Workers that wait for nobody take steps as they need them, in handfuls. Where some step together, the
    first to come takes a part for all of them: they end with the same step, and step with the same rates.
    """

    def __init__(self, job: Job, lockstep: bool, number: int, step_s: float) -> None:
        self.job, self.lockstep = job, lockstep
        self.total = job.seconds if job.seconds is not None else float(job.workers * job.steps)
        self._key, self._step_s = f"training/{number}", step_s
        # A slow worker takes few at a time, for at the end the others wait for its last ones.
        few = max(1, min(10, job.steps // 20, int(HANDFUL_S / step_s)))
        self._handful = job.steps if lockstep else few
        self._begun = self._made = 0
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.plain = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        self.store = Entries(self.plain, secret.of_environment(os.environ))

    def go_on(self, rank: int, steps: int) -> None:
        """Begin at a checkpoint, where this worker had made so many steps; the others say theirs."""
        self.store.set(f"{self._key}/begun/{rank}", str(steps))
        others = range(self.job.workers)
        self._begun = sum(int(self.store.get(f"{self._key}/begun/{other}")) for other in others)
        if self._begun >= self.total:
            raise RunStopped(
                f"the checkpoint in {self.job.checkpoint} has all {self.job.steps} steps of this run. "
                "Give --steps a larger number to go on from it."
            )

    def steps(self, group: Callable[[], tuple[Sequence[int], bool]] | None = None) -> Iterator[float]:
        """For each step to make, the share of the budget that is used up.

        `group` says which workers step together now, and whether that stays so.
        """
        everybody = range(self.job.workers), True
        group = (lambda: everybody) if group is None and self.lockstep else group
        # All workers are on one host, and so have one clock.
        self._began_s = float(self.store.compare_set(f"{self._key}/began", "", f"{time.monotonic()}"))
        while True:
            count, begin, each = self._take(1, True) if group is None else self._agreed(*group())
            for step in range(count):
                yield min(1.0, (begin + step * each) / self.total)
            if not count:
                break
            self._made += count
        self.store.add(f"{self._key}/made", self._made)

    def made(self) -> int:
        """Steps of all workers whose loops have ended."""
        return self._begun + (self.store.number(f"{self._key}/made") or 0)

    def _agreed(self, members: Sequence[int], stays: bool) -> Part:
        """What the first worker of a group to come takes for all of them."""
        name = f"{self._key}/{'-'.join(map(str, members))}/{self._made}"
        if self.store.add(name, 1) == 1:
            self.store.set(f"{name}/taken", json.dumps(self._take(len(members), stays)))
        count, begin, each = json.loads(self.store.get(f"{name}/taken"))
        return count, begin, each

    def _take(self, workers: int, stays: bool) -> Part:
        if self.job.seconds is None:
            most = (self._handful if stays else 1) * workers
            begin = self.store.add(f"{self._key}/steps", most) - most + self._begun
            return len(range(begin, int(min(begin + most, self.total)), workers)), begin, workers
        over_s = time.monotonic() - self._began_s
        step_s, left_s = over_s / self._made if self._made else self._step_s, self.total - over_s
        several = stays and workers > 1  # one that steps alone looks at the clock before each
        count = max(1, int(min(HANDFUL_S, left_s) / step_s)) if several else 1
        return count if left_s > 0 else 0, over_s, step_s
