"""What a worker says of itself when it is asked into a view, and whose weights go on in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.fabric.base import Note

LISTS = 5
"""Of a record, and of the word that a view is installed."""


@dataclass(frozen=True)
class View:
    """A numbered membership: no two views of a run have the same number, on two sides of a cut neither."""

    number: int
    members: tuple[int, ...]


@dataclass
class Record:
    """What a worker says of itself when it is asked into a view."""

    line: int
    """The stamp of the last view in which it had the main line's weights; -1: it has none."""
    parents: tuple[int, ...]
    """The lines that view came from."""
    heirs: tuple[int, ...]
    """Who came into that view with the main line's weights."""
    members: tuple[int, ...]
    """Who is in its present view."""
    counted: dict[int, int]
    """How many merges of each group have counted."""

    def pack(self) -> Note:
        """As numbers."""
        return pack((self.line,), self.parents, self.heirs, self.members, flat(self.counted))

    @classmethod
    def unpack(cls, note: Note) -> Record:
        """The way back."""
        (line,), parents, heirs, members, counted = unpack(note)
        return cls(line, parents, heirs, members, pairs(counted))


def main_line(answers: dict[int, Record]) -> tuple[int, ...]:
    """Whose weights go on: the most workers that come from one view; of equals those with the lowest rank.

    From a view come those whose line it is, and those who went into it from one of its parents but have not
    heard of its install: nothing can have counted there without them.
    """
    best: list[int] = []
    for record in sorted(answers.values(), key=lambda record: -record.line):
        if record.line < 0:
            continue
        kin = [
            peer
            for peer, other in sorted(answers.items())
            if other.line == record.line or (other.line in record.parents and peer in record.heirs)
        ]
        best = max(best, kin, key=lambda ranks: (len(ranks), -min(ranks, default=0)))
    return tuple(best) or (min(answers),)


def pack(*lists: Sequence[int]) -> Note:
    """Lists as one list, each after its length."""
    return tuple(float(k) for one in lists for k in (len(one), *one))


def unpack(note: Note) -> list[tuple[int, ...]]:
    """The way back."""
    lists, at = [], 0
    while at < len(note):
        end = at + 1 + int(note[at])
        if not at < end <= len(note):
            raise ValueError("lists that are not as long as they say")
        lists.append(tuple(int(k) for k in note[at + 1 : end]))
        at = end
    if len(lists) != LISTS:
        raise ValueError(f"{len(lists)} lists, not {LISTS}")
    return lists


def flat(counts: dict[int, int]) -> tuple[int, ...]:
    """A dictionary as a list."""
    return tuple(k for pair in sorted(counts.items()) for k in pair)


def pairs(numbers: Sequence[int]) -> dict[int, int]:
    """The way back."""
    return dict(zip(numbers[::2], numbers[1::2], strict=True))
