"""Which data, and how its order is cut into batches."""

from __future__ import annotations

from typing import NamedTuple

from freewheel.data.spans import Span


class Key(NamedTuple):
    """Which data, in which order: the same on all workers, whatever their batch sizes.

    `length` counts samples, or batches of a batch sampler; `mark` says which loader of the script it is, for
    all make them in the same order; `kind` is 0 in order, 1 shuffled, 2 by a sampler, 3 shuffled by blocks.
    Where all step together, the order is cut into `grid` batches, equal but for one sample.
    """

    length: int
    mark: int
    kind: int = 0
    seed: int = 0
    grid: int = 0

    def edge(self, batch: int) -> int:
        """Where a batch begins, of those that are equal."""
        return batch * self.length // self.grid

    def at(self, place: int) -> int:
        """Which of the equal batches begins at a place, or next behind it."""
        return -(-place * self.grid // self.length)

    def part(self, turn: int, members: int) -> Span:
        """One of as many parts as there are members, in whole batches."""
        return self.edge(turn * self.grid // members), self.edge((turn + 1) * self.grid // members)

    def cut(self, start: int, stop: int, size: int) -> list[Span]:
        """A worker's batches in a span that it was dealt."""
        if not self.grid:
            return [(at, min(stop, at + size)) for at in range(start, stop, size)]
        inner = [edge for batch in range(self.at(start), self.at(stop)) if (edge := self.edge(batch)) > start]
        return list(zip([start, *inner], [*inner, stop], strict=True))


class Lease(NamedTuple):
    """Samples of one pass, dealt to one worker: places of its order; `again`: a lost one had them before."""

    number: int
    place: int
    stop: int
    again: bool


class Batch(Lease):
    """A part of a lease that is used in one step."""
