"""The laws that a soak must keep, judged by what its workers wrote down and not by what they counted.

answer      all workers end, and with the same mean of all replicas, which is finite
replicas    the replicas are close to it, each by itself
training    nobody paused for long
members     at its last step every worker had all others within reach
samples     every batch of every pass was used; more than once only where a worker was killed or cut off
            before anybody had heard of it; and no more samples than were counted (`samples_again`)
left        no process, namespace, link or shared memory is left
growth      what runs beside the workers has no more processes, threads and descriptors after the last fault
            than before the first one, and not much more memory; a worker that was spared has hardly more
accuracy    where the same run was made without faults: about the same answer
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from freewheel.data.order import order
from freewheel.numbers import share
from freewheel_bench.footprint import Footprint
from freewheel_bench.workers import Life

PAUSE_S = 10.0  # longest allowed gap between two steps, on a busy machine
APART = 0.1  # how far a replica may be from the mean, as a share of the mean's norm
POINT = 0.01
# How much more there may be after the faults; what the benchmark notes of half a million steps included.
BESIDE = Footprint(0, 0, 0, 100.0)
DESCRIPTORS = 8  # how many more a spared worker may have for each worker: windows are opened as they are used

Use = tuple[int, int]  # a worker's rank and the number of its life


@dataclass(frozen=True)
class Law:
    """One law, what was found and what is allowed."""

    name: str
    held: bool
    found: str
    allowed: str


@dataclass(frozen=True)
class Uses:
    """Who used each batch of each pass."""

    length: int
    batch_size: int
    batches: int
    passes: int
    by: Mapping[tuple[int, int], Sequence[Use]]
    strange: int  # lines that are no batch of any pass

    def size(self, place: int) -> int:
        """How many samples the batch at a place of an order has."""
        return min(self.batch_size, self.length - place * self.batch_size)

    def missing(self) -> int:
        return self.batches * self.passes - len(self.by)

    def again(self) -> int:
        """Samples that were used beyond the first time."""
        return sum((len(uses) - 1) * self.size(place) for (_, place), uses in self.by.items())


@dataclass(frozen=True)
class Taken:
    """What is taken up while all workers are up: before the first fault, and after the last."""

    beside: Footprint  # by all processes that are no workers
    spared: Footprint | None = None  # by the worker that no fault strikes


@dataclass(frozen=True)
class Found:
    """What is left to judge when a run is over."""

    workers: int
    lives: Sequence[Sequence[Life]]  # the processes that each worker has had
    cut: set[int]  # processes whose link was cut at some time
    uses: Uses
    left: list[str]
    events: list[tuple[float, str]]  # what struck, and was made good, and when
    before: Taken
    after: Taken

    @property
    def began_s(self) -> float:
        """When the first worker was ready."""
        return min(float(lives[0].said["ready"]) for lives in self.lives if "ready" in lives[0].said)

    def results(self) -> list[dict[str, Any]]:
        return [lives[-1].said["result"] for lives in self.lives]

    def killed(self) -> int:
        return sum(life.killed for lives in self.lives for life in lives)

    def counted(self) -> int:
        """Samples that the workers counted as used again, as far as they came to say so."""
        found = 0
        for lives in self.lives:
            for life in lives:
                said = life.steps[-1].again if life.steps else 0
                found += max(said, life.said.get("result", {}).get("again", 0))
        return found

    def pauses(self) -> list[tuple[float, float, int]]:
        """The longest times between two steps of a process, each with when it began and whose."""
        gaps = (
            (later_s - step_s, step_s, rank)
            for rank, lives in enumerate(self.lives)
            for life in lives
            for step_s, later_s in itertools.pairwise(life.times)
        )
        return heapq.nlargest(5, gaps)

    def unexcused(self) -> int:
        """Batches that were used more than once by processes that were neither killed nor cut off."""
        whole = {
            (rank, number)
            for rank, lives in enumerate(self.lives)
            for number, life in enumerate(lives)
            if not life.killed and life.process.pid not in self.cut
        }
        return sum(sum(use in whole for use in uses) > 1 for uses in self.uses.by.values())

    def figures(self) -> dict[str, Any]:
        steps = [step_s for lives in self.lives for life in lives for step_s in life.times]
        return {
            "passes": self.uses.passes,
            "samples": self.uses.length * self.uses.passes,
            "samples_used_again": self.uses.again(),
            "samples_counted_again": self.counted(),
            "batches_used_again": sum(len(uses) > 1 for uses in self.uses.by.values()),
            "most_uses_of_a_batch": max(map(len, self.uses.by.values())),
            "killed": self.killed(),
            "longest_pauses": [
                {"s": pause_s, "at_s": at_s - self.began_s, "worker": rank}
                for pause_s, at_s, rank in self.pauses()
            ],
            "before": asdict(self.before),
            "after": asdict(self.after),
            "events": [{"at_s": at_s - self.began_s, "what": what} for at_s, what in self.events],
            "apart": max(one["apart"] for one in self.results()),
            "accuracy": self.results()[0]["accuracy"],
            "steps": len(steps),
            "seconds": max(steps) - min(steps),
        }


def judge(found: Found, calm: Found | None = None) -> list[Law]:
    """All laws; `calm` is the same run without faults."""
    results, uses = found.results(), found.uses
    answers = Counter(one["answer"] for one in results)
    finite = sum(one["finite"] for one in results)
    apart = max(one["apart"] for one in results)
    members = [lives[-1].steps[-1].members if lives[-1].steps else 0 for lives in found.lives]
    again, counted = uses.again(), found.counted()
    pause_s, grown = found.pauses()[0][0], _growth(found)
    everyone = f"{found.workers} of {found.workers}"
    judged = [
        Law(
            "answer",
            len(answers) == 1 and finite == len(results) == found.workers,
            f"{finite} of {found.workers} finite, {len(answers)} mean",
            f"{everyone} finite, 1 mean",
        ),
        Law("replicas from their mean", apart <= APART, f"{100 * apart:.2g} %", f"{100 * APART:.2g} %"),
        Law("longest pause", pause_s <= PAUSE_S, f"{pause_s:.2f} s", f"{PAUSE_S:g} s"),
        Law("members", min(members) == found.workers, f"at least {min(members)}", f"{found.workers}"),
        Law(
            "batches nobody used",
            uses.missing() == uses.strange == 0,
            f"{uses.missing()} of {uses.batches * uses.passes}",
            "0",
        ),
        Law("twice, by processes that lived", found.unexcused() == 0, f"{found.unexcused()}", "0"),
        Law("samples used again", again <= counted, f"{again}", f"{counted} counted"),
        Law("left behind", not found.left, ", ".join(found.left) or "nothing", "nothing"),
        *grown,
    ]
    if calm is not None:
        without, with_faults = (one.results()[0]["accuracy"] for one in (calm, found))
        judged.append(
            Law(
                "accuracy",
                with_faults >= without - POINT,
                share(with_faults, 2),
                f"{share(without, 2)} undisturbed, less 1 point",
            )
        )
        judged.append(
            Law("undisturbed", all(law.held for law in judge(calm)), f"{calm.uses.again()} again", "all laws")
        )
    return judged


def _growth(found: Found) -> list[Law]:
    pairs = [("growth beside the workers", found.before.beside, found.after.beside, BESIDE)]
    if found.before.spared is not None and found.after.spared is not None:
        allowed = Footprint(0, 8, DESCRIPTORS * found.workers, 100.0)
        pairs.append(("growth of the spared worker", found.before.spared, found.after.spared, allowed))
    return [
        Law(
            name,
            all(more <= most for more, most in zip(astuple(after - before), astuple(allowed), strict=True)),
            str(after - before),
            str(allowed),
        )
        for name, before, after, allowed in pairs
    ]


def uses(folder: Path, length: int, batch_size: int, seed: int, passes: int) -> Uses:
    """Read what the workers wrote down. Which pass a batch is of follows from its samples."""
    known = {}
    for number in range(passes):
        samples = order(length, True, seed, number).tolist()
        for place, at in enumerate(range(0, length, batch_size)):
            known[tuple(samples[at : at + batch_size])] = number, place
    by: dict[tuple[int, int], list[Use]] = defaultdict(list)
    strange = 0
    for path in sorted(folder.glob("*.samples")):
        rank, life = map(int, path.stem.split("-"))
        for line in path.read_text().splitlines():
            which = known.get(tuple(map(int, line.split())))
            if which is None:
                strange += 1
            else:
                by[which].append((rank, life))
    return Uses(length, batch_size, -(-length // batch_size), passes, dict(by), strange)
