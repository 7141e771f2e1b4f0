"""Spans of places in a pass's order, and how they are cut into batches."""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

Span: TypeAlias = tuple[int, int]  # half-open
Spans: TypeAlias = list[Span]  # sorted; they neither overlap nor touch


def union(*sets: Iterable[Span]) -> Spans:
    """The parts may come in any order and overlap."""
    joined: Spans = []
    for start, stop in sorted(span for spans in sets for span in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return joined


def minus(spans: Spans, less: Spans) -> Spans:
    kept: Spans = []
    at = 0
    for start, stop in spans:
        while at < len(less) and less[at][0] < stop:
            if less[at][0] > start:
                kept.append((start, less[at][0]))
            start = max(start, less[at][1])
            if start >= stop:  # it may reach into the next one
                break
            at += 1
        if start < stop:
            kept.append((start, stop))
    return kept


def common(spans: Spans, others: Spans) -> Spans:
    return minus(spans, minus(spans, others))


def size(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def first(spans: Spans, start: int, least: int = 1) -> Span | None:
    """The first span from `start` on, or from the beginning; one that holds `least` rather than a shorter."""
    behind = [(max(a, start), b) for a, b in spans if b > start]
    found = behind + [(a, min(b, start)) for a, b in spans if a < start]
    return next((span for span in found if span[1] - span[0] >= least), found[0] if found else None)


class Key(NamedTuple):
    """Which data, in which order: the same on all workers, whatever their batch sizes."""

    length: int  # counts samples, or batches of a batch sampler
    mark: int  # which loader of the script it is, for all make them in the same order
    kind: int = 0  # an index of order.KINDS
    seed: int = 0
    grid: int = 0  # where all step together: into how many batches the order is cut, equal but for one sample

    def edge(self, batch: int) -> int:
        """Where one of the equal batches begins."""
        return batch * self.length // self.grid

    def at(self, place: int) -> int:
        """Which of the equal batches is the first that begins at a place or behind it."""
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
    """Samples of one pass, dealt to one worker: places of its order."""

    number: int
    place: int
    stop: int
    again: bool  # whether a lost worker had them before


Batch: TypeAlias = Lease  # a part of one that is used in one step
