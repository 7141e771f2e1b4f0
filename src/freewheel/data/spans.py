"""Sets of whole numbers as spans: sorted half-open pairs that neither overlap nor touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
Spans: TypeAlias = list[Span]


def union(*sets: Iterable[Span]) -> Spans:
    """What is in any of them. The parts may come in any order and overlap."""
    joined: Spans = []
    for start, stop in sorted(span for spans in sets for span in spans):
        if joined and start <= joined[-1][1]:
            if stop > joined[-1][1]:
                joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined


def minus(spans: Spans, less: Spans) -> Spans:
    """What is in the first and not in the second."""
    kept: Spans = []
    at = 0
    for start, stop in spans:
        while at < len(less) and less[at][1] <= start:
            at += 1
        k = at
        while start < stop and k < len(less) and less[k][0] < stop:
            if less[k][0] > start:
                kept.append((start, less[k][0]))
            start = max(start, less[k][1])
            k += 1
        if start < stop:
            kept.append((start, stop))
    return kept


def common(spans: Spans, others: Spans) -> Spans:
    """What is in both."""
    return minus(spans, minus(spans, others))


def size(spans: Spans) -> int:
    """How many numbers they hold."""
    return sum(stop - start for start, stop in spans)


def first(spans: Spans, start: int, least: int = 1) -> Span | None:
    """The first span from `start` on, or from the beginning; one that holds `least` rather than a shorter."""
    behind = [(max(a, start), b) for a, b in spans if b > start]
    found = behind + [(a, min(b, start)) for a, b in spans if a < start]
    return next((span for span in found if span[1] - span[0] >= least), found[0] if found else None)
