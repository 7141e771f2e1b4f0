"""What a worker says of itself when it is called into a view, and whose weights go on in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from freewheel.fabric.base import Note
from freewheel.fabric.notes import pack

Pair: TypeAlias = tuple[int, int]
PAIRS = [(int, int)]
RECORD = (int, [int], [int], PAIRS)
"""What a record is as numbers."""
STAMPS, GROUPS = 2**40, 4096
"""Views of a run, and groups that merge, of which there are never so many."""


@dataclass(frozen=True)
class View:
    """A numbered membership: no two views of a run have the same number, on two sides of a cut neither."""

    number: int
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"view {self.number}: {', '.join(map(str, self.members))}"


@dataclass
class Record:
    """What a worker says of itself when it is called into a view; and what a leader says of the new one."""

    line: int
    """The number of the last view in which it had the main line's weights; -1: it has none."""
    parents: tuple[int, ...]
    """The lines that view came from."""
    heirs: tuple[int, ...]
    """Who came into that view with the main line's weights."""
    counted: dict[int, int]
    """How many merges of each group have counted."""

    def pack(self) -> Note:
        """As numbers."""
        return pack(self.line, list(self.parents), list(self.heirs), sorted(self.counted.items()))

    @classmethod
    def of(cls, size: int, words: Sequence[Any]) -> Record:
        """The way back, in a run of this size; ValueError if it cannot be one."""
        line, parents, heirs, counted = words[-4:]
        return cls(line, tuple(parents), ranks(heirs, size), pairs(counted))


def main_line(answers: dict[int, Record]) -> tuple[int, ...]:
    """Whose weights go on: the most workers that come from one view; of equals those with the lowest rank.

    From a view come those whose line it is, and those who went into it from one of its parents but have not
    heard of its beginning: nothing can have counted there without them.
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


def pairs(given: Sequence[Pair]) -> dict[int, int]:
    """A dictionary; ValueError if it is longer than any can be."""
    if len(given) > GROUPS:
        raise ValueError("more groups than there can be")
    return dict(given)


def ranks(given: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Ranks of a run, in order and each once; ValueError if they are not."""
    if list(given) != sorted(set(given)) or any(not 0 <= k < world_size for k in given):
        raise ValueError("workers that cannot be")
    return tuple(given)
