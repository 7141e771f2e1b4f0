"""The ledger of a data set's passes: which samples are finished, who holds which, what is left to deal.

State without input or output. A pass is numbered, the places of its order are numbered, and every worker has
a ledger of what it knows. Places are counted in samples, so workers whose batches differ share one ledger.
What ledgers say of finished samples only grows, so two are merged by union, in any order and any number of
times:

    finished    samples somebody has finished
    counts      how many each worker has finished, in each of its lives
    lost        samples dealt to a worker that was lost before anybody heard that it had finished them
    left        whether a worker has broken the pass off, so that it may never be completed

More counted than finished are samples finished twice (`excess`). Who holds what is only the dealer's to say,
and its holders': it is not merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from freewheel.data.batches import Lease
from freewheel.data.spans import Span, Spans, common, minus, size, union
from freewheel.fabric.notes import pack, read

Owner: TypeAlias = tuple[int, int]
"""A worker's rank, and which life of it."""
BEHIND = 3
"""A pass is closed when another is so many ahead: until then a worker that was cut off may bring news."""
MOST_SPANS = 2048
"""How many finished spans are told of one pass; shorter ones beyond are dealt again rather than told."""
MOST_NUMBERS = 24000
"""How long a ledger may be as numbers, so that it fits into a message; the oldest passes are left out."""
MOST_ENTRIES = 1 << 17
"""How many passes, spans and owners a ledger takes in from others: far more than workers make, some 20 MB."""
LEDGER = (int, int, [(int, int, [(int, int)], [(int, int)], [(int, int, int)], [(int, int, int, int)])])
"""As numbers: floor, past; of a pass its number, whether it was left, finished, lost, counts, who holds."""


@dataclass(slots=True)
class Pass:
    """One pass over the data."""

    finished: Spans = field(default_factory=list)
    lost: Spans = field(default_factory=list)
    counts: dict[Owner, int] = field(default_factory=dict)
    held: dict[Owner, Spans] = field(default_factory=dict)
    left: bool = False

    def excess(self) -> int:
        """How many samples are known to have been finished more than once."""
        return sum(self.counts.values()) - size(self.finished)

    def entries(self) -> int:
        """How much memory it takes, in spans and owners."""
        held = sum(map(len, self.held.values()))
        return 1 + len(self.finished) + len(self.lost) + len(self.counts) + len(self.held) + held

    def had(self) -> Counter[int]:
        """How many samples each worker has finished or holds, by rank, as far as is known."""
        had: Counter[int] = Counter()
        for (rank, _), count in self.counts.items():
            had[rank] += count
        for (rank, _), spans in self.held.items():
            had[rank] += size(spans)
        return had


class Ledger:
    """What one worker knows of the passes over one data set of so many samples."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.floor = 0
        """Passes below this one are closed."""
        self.past = 0
        """How many samples were finished in them."""
        self.passes: dict[int, Pass] = {}

    def entries(self) -> int:
        """How much memory it takes: passes, spans and owners."""
        return sum(one.entries() for one in self.passes.values())

    # -- dealing --

    def open(self, number: int) -> Pass | None:
        """A pass, begun if need be; None if it is closed."""
        if number < self.floor:
            return None
        return self.passes.setdefault(number, Pass())

    def free(self, number: int) -> Spans:
        """What is left to deal in a pass."""
        one = self.passes.get(number)
        if number < self.floor:
            return []
        return minus([(0, self.length)], union(one.finished, *one.held.values()) if one else [])

    def deal(
        self, owner: Owner, number: int, cut: Callable[[int, Spans], Span | None], since: int = 0
    ) -> Lease | None:
        """Deal what `cut` takes of what is left in a pass; None: nothing.

        What lost workers left over in earlier passes, from pass `since` on, comes first. In this pass it
        comes last: a worker that was only cut off may come back meanwhile and say that it has finished it.
        """
        self.open(number)
        for q in sorted(self.passes):
            one = self.passes[q]
            if not since <= q <= number:
                continue
            free = self.free(q)
            fresh, before = minus(free, one.lost), common(free, one.lost)
            for again in (True, False) if q < number else (False, True):
                span = cut(q, before if again else fresh)
                if span is not None:
                    one.held[owner] = union(one.held.get(owner, []), [span])
                    return Lease(q, *span, again)
        return None

    def held_by(self, owner: Owner) -> dict[int, Spans]:
        """What a worker holds, by pass."""
        return {q: one.held[owner] for q, one in self.passes.items() if one.held.get(owner)}

    def held(self, number: int, but: Owner) -> bool:
        """Whether anybody else holds samples of this pass or an earlier one."""
        return any(
            spans and owner != but
            for q, one in self.passes.items()
            if q <= number
            for owner, spans in one.held.items()
        )

    # -- what is heard --

    def finish(self, owner: Owner, number: int, start: int, stop: int) -> None:
        """A worker has finished samples it held."""
        one = self.open(number)
        if one is None:
            return
        done = [(start, stop)]
        one.finished = union(one.finished, done)
        one.counts[owner] = one.counts.get(owner, 0) + stop - start
        one.held[owner] = minus(one.held.get(owner, []), done)

    def hold(self, owner: Owner, held: dict[int, Spans]) -> None:
        """A worker says what it holds: this and nothing else."""
        for number in {*self.passes, *held}:
            if (one := self.open(number)) is None:
                continue
            if spans := minus(union(held.get(number, [])), one.finished):
                one.held[owner] = spans
            else:
                one.held.pop(owner, None)

    def lose(self, owner: Owner) -> None:
        """A worker is lost: what it held may be dealt again."""
        for one in self.passes.values():
            one.lost = minus(union(one.lost, one.held.pop(owner, [])), one.finished)

    def leave(self, number: int) -> None:
        """A pass was broken off: it need not be kept until it is complete."""
        if (one := self.open(number)) is not None:
            one.left = True

    def merge(self, theirs: Ledger) -> None:
        """Learn what another ledger knows, but for who holds what; ValueError: more than workers make."""
        if self.entries() + theirs.entries() > MOST_ENTRIES:
            raise ValueError(f"more than {MOST_ENTRIES} passes, spans and owners")
        if theirs.floor > self.floor:
            self.floor, self.past = theirs.floor, theirs.past
            for number in [q for q in self.passes if q < self.floor]:
                del self.passes[number]
        for number, other in theirs.passes.items():
            one = self.open(number)
            if one is None:
                continue
            one.finished = union(one.finished, other.finished)
            one.lost = minus(union(one.lost, other.lost), one.finished)
            one.left = one.left or other.left
            for owner, count in other.counts.items():
                one.counts[owner] = max(count, one.counts.get(owner, 0))
            for owner, spans in one.held.items():
                one.held[owner] = minus(spans, one.finished)

    def holding(self, owner: Owner, ledger: Ledger) -> Ledger:
        """The same finished samples, and what an owner holds by another ledger."""
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
        while self.passes and (over := max(self.passes) - BEHIND + 1) > self.floor:
            one = self.passes.get(self.floor)
            if one is None:  # all in one go: somebody may say that it is in any pass
                begun = min(over, *(q for q in self.passes if q > self.floor))
                self.past += self.length * (begun - self.floor)
                self.floor = begun
                continue
            done = size(one.finished)
            if not one.left and (done < self.length or any(one.held.values())):
                return
            del self.passes[self.floor]
            self.past += done
            self.floor += 1

    def progress(self) -> float:
        """Passes made by all workers together; one that nobody began counts if a later one has begun."""
        newest = max(self.passes, default=self.floor)
        skipped = newest - self.floor - sum(self.floor <= q < newest for q in self.passes)
        return (self.past + sum(size(one.finished) for one in self.passes.values())) / self.length + skipped

    # -- as numbers --

    def encode(self, held: bool = False) -> list[float]:
        """All of it as numbers, with who holds what if asked to."""
        told: list[tuple[float, ...]] = []
        left = MOST_NUMBERS
        for number in sorted(self.passes, reverse=True):
            row = self._encode(number, held)
            if (left := left - len(row)) < 0:
                break
            told.insert(0, row)
        return [self.floor, self.past, *pack(told)]

    def _encode(self, number: int, held: bool) -> tuple[float, ...]:
        one = self.passes[number]
        spans = [sorted(spans, key=lambda span: span[0] - span[1]) for spans in (one.finished, one.lost)]
        counts = [(*who, count) for who, count in one.counts.items()]
        holds = [(*who, *span) for who, spans in one.held.items() for span in spans if held]
        rows: list[Sequence[tuple[int, ...]]] = [*spans, counts, holds]
        return pack(number, one.left, *(some[:MOST_SPANS] for some in rows))

    @classmethod
    def decode(cls, length: int, numbers: Iterator[int]) -> Ledger:
        """The way back; ValueError if these numbers are no ledger."""

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
