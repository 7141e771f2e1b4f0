"""The ledger of a data set's passes: which samples are finished, who holds which, what is left to deal.

Every worker keeps one, without input or output. Places of a pass are counted in samples, so workers whose
batches differ share one ledger. What is finished only grows, so ledgers are merged by union, in any order and
any number of times. What a worker holds is said by the dealer and that worker only: it is not merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from freewheel.data.batches import Lease, Span, Spans, common, minus, size, union
from freewheel.fabric.notes import pack, read

Owner: TypeAlias = tuple[int, int]  # a worker's rank, and which life of it
BEHIND = 3  # a pass is closed when another is so many ahead: till then workers cut off may still report
MOST_SPANS = 2048  # encoded of one pass; the shortest ones beyond are dealt again
MOST_NUMBERS = 24000  # in an encoded ledger, so that it fits into a message; the oldest passes are left out
MOST_ENTRIES = 1 << 17  # passes, spans and owners taken in: far more than workers make, some 20 MB
LEDGER = (int, int, [(int, int, [(int, int)], [(int, int)], [(int, int, int)], [(int, int, int, int)])])
"""floor, past; of each pass its number, left, finished, lost, counts, held."""


@dataclass(slots=True)
class Pass:
    """One pass over the data."""

    finished: Spans = field(default_factory=list)  # by anybody
    lost: Spans = field(default_factory=list)  # dealt to workers that were lost before they told
    counts: dict[Owner, int] = field(default_factory=dict)  # how many each has finished, in each of its lives
    held: dict[Owner, Spans] = field(default_factory=dict)
    left: bool = False  # whether a worker has broken it off, so that it may never be completed

    def excess(self) -> int:
        """How many samples are known to have been finished twice: more are counted than finished."""
        return sum(self.counts.values()) - size(self.finished)


class Ledger:
    """What one worker knows of the passes over one data set."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.floor = self.past = 0  # passes below are closed; how many samples were finished in them
        self.passes: dict[int, Pass] = {}

    def entries(self) -> int:
        """Its size: passes, spans and owners."""
        parts = [(one.finished, one.lost, one.counts, one.held) for one in self.passes.values()]
        held = [spans for *_, held in parts for spans in held.values()]
        return len(parts) + sum(map(len, held)) + sum(len(some) for each in parts for some in each)

    def open(self, number: int) -> Pass | None:
        """A pass, made if need be; None: it is closed."""
        return self.passes.setdefault(number, Pass()) if number >= self.floor else None

    def free(self, number: int) -> Spans:
        """What is neither finished nor held."""
        one = self.open(number)
        return [] if one is None else minus([(0, self.length)], union(one.finished, *one.held.values()))

    def deal(
        self, owner: Owner, number: int, cut: Callable[[int, Spans], Span | None], since: int = 0
    ) -> Lease | None:
        """Deal what `cut` takes of the free samples; None: nothing.

        What lost workers held in earlier passes, from pass `since` on, comes first. In this pass it comes
        last: a worker that was only cut off may come back and report it finished.
        """
        self.open(number)
        for q in sorted(q for q in self.passes if since <= q <= number):
            one, free = self.passes[q], self.free(q)
            fresh, before = minus(free, one.lost), common(free, one.lost)
            for again in (True, False) if q < number else (False, True):
                span = cut(q, before if again else fresh)
                if span is not None:
                    one.held[owner] = union(one.held.get(owner, []), [span])
                    return Lease(q, *span, again)
        return None

    def held_by(self, owner: Owner) -> dict[int, Spans]:
        return {q: one.held[owner] for q, one in self.passes.items() if one.held.get(owner)}

    def held(self, number: int, but: Owner) -> bool:
        """Whether anybody else holds samples of this pass or an earlier one."""
        holders = (one.held.items() for q, one in self.passes.items() if q <= number)
        return any(spans and owner != but for held in holders for owner, spans in held)

    def finish(self, owner: Owner, number: int, start: int, stop: int) -> None:
        if (one := self.open(number)) is not None:
            done = [(start, stop)]
            one.finished = union(one.finished, done)
            one.counts[owner] = one.counts.get(owner, 0) + stop - start
            one.held[owner] = minus(one.held.get(owner, []), done)

    def hold(self, owner: Owner, held: dict[int, Spans]) -> None:
        """Enter all that a worker holds."""
        for number in {*self.passes, *held}:
            if (one := self.open(number)) is not None:
                one.held.pop(owner, None)
                if spans := minus(union(held.get(number, [])), one.finished):
                    one.held[owner] = spans

    def leave(self, number: int) -> None:
        """Mark a pass as broken off: it need not be complete to be closed."""
        if (one := self.open(number)) is not None:
            one.left = True

    def merge(self, theirs: Ledger) -> None:
        """Take in what another ledger knows, except who holds what; ValueError: more than workers make."""
        if self.entries() + theirs.entries() > MOST_ENTRIES:
            raise ValueError(f"more than {MOST_ENTRIES} passes, spans and owners")
        if theirs.floor > self.floor:
            self.floor, self.past = theirs.floor, theirs.past
            self.passes = {q: one for q, one in self.passes.items() if q >= self.floor}
        for number, other in theirs.passes.items():
            if (one := self.open(number)) is None:
                continue
            one.finished = union(one.finished, other.finished)
            one.lost = minus(union(one.lost, other.lost), one.finished)
            one.left = one.left or other.left
            for owner, count in other.counts.items():
                one.counts[owner] = max(count, one.counts.get(owner, 0))
            for owner, spans in one.held.items():
                one.held[owner] = minus(spans, one.finished)

    def holding(self, owner: Owner, ledger: Ledger) -> Ledger:
        """A copy, with only what an owner holds, by another ledger."""
        told = Ledger(self.length)
        told.merge(self)
        told.hold(owner, ledger.held_by(owner))
        return told

    def account(self, owner: Owner, finished: Mapping[int, Spans]) -> list[float]:
        """What a checkpoint keeps: these samples as an owner's, beside passes that are closed."""
        kept = Ledger(self.length)
        kept.floor, kept.past = self.floor, self.past
        for number, spans in sorted(finished.items()):
            if (one := kept.open(number)) is not None:
                one.finished, one.counts = spans, {owner: size(spans)}
        return kept.encode()

    def tidy(self) -> None:
        """Close passes that are long over, or were broken off or never begun."""
        over = max(self.floor, max(self.passes, default=0) - BEHIND + 1)
        for q in sorted({over, *(q for q in self.passes if q < over)}):
            self.past += self.length * (q - self.floor)  # in one go: somebody may say that it is in any pass
            self.floor = q
            one = self.passes.get(q, Pass())
            done = size(one.finished)
            if q == over or (not one.left and (done < self.length or any(one.held.values()))):
                return
            del self.passes[q]
            self.past += done
            self.floor += 1

    def progress(self) -> float:
        """Passes made by all workers together; a skipped pass counts."""
        newest = max(self.passes, default=self.floor)
        skipped = newest - self.floor - sum(self.floor <= q < newest for q in self.passes)
        return (self.past + sum(size(one.finished) for one in self.passes.values())) / self.length + skipped

    def encode(self, held: bool = True) -> list[float]:
        """As a list of numbers; `held` says whether with who holds what."""
        told: list[tuple[float, ...]] = []
        left = MOST_NUMBERS
        for number, one in sorted(self.passes.items(), reverse=True):
            spans = [sorted(some, key=lambda span: span[0] - span[1]) for some in (one.finished, one.lost)]
            counts = [(*who, count) for who, count in one.counts.items()]
            holds = [(*who, *span) for who, some in one.held.items() for span in some if held]
            rows: tuple[list[Any], ...] = (*spans, counts, holds)
            row = pack(number, one.left, *(some[:MOST_SPANS] for some in rows))
            if (left := left - len(row)) < 0:
                break
            told.insert(0, row)
        return [self.floor, self.past, *pack(told)]

    @classmethod
    def decode(cls, length: int, numbers: Iterator[int]) -> Ledger:
        """ValueError if these numbers are no ledger."""

        def spans(ends: list[Span]) -> Spans:
            return union((start, min(stop, length)) for start, stop in ends)

        ledger = cls(length)
        ledger.floor, ledger.past, rows = read(LEDGER, numbers)
        for number, left, finished, lost, counts, held in rows:
            one = ledger.passes[number] = Pass(spans(finished), spans(lost), left=bool(left))
            one.counts = {(rank, life): count for rank, life, count in counts}
            for rank, life, start, stop in held:
                one.held[rank, life] = union(one.held.get((rank, life), []), spans([(start, stop)]))
        return ledger
