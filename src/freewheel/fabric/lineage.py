"""What a worker says of itself when it is asked into a view, and whose weights go on in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.fabric.base import Note
from freewheel.fabric.notes import pack, read_all

LISTS = ([int],) * 5
"""What a record is as numbers, and the word that a view is installed."""
STAMPS, GROUPS = 2**40, 4096
"""Views of a run, and groups that merge, of which there are never so many."""


@dataclass(frozen=True)
class View:
    """A numbered membership: no two views of a run have the same number, on two sides of a cut neither."""

    number: int
    members: tuple[int, ...]

    def __str__(self) -> str:
        few = len(self.members) <= 16
        who = ", ".join(map(str, self.members)) if few else f"{len(self.members)} workers"
        return f"view {self.number}: {who}"


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
        lists = (self.line,), self.parents, self.heirs, self.members, flat(self.counted)
        return pack(*map(list, lists))

    @classmethod
    def unpack(cls, words: Sequence[int], world_size: int) -> Record:
        """The way back; ValueError if it cannot be one."""
        (line,), parents, heirs, members, counted = read_all(LISTS, iter(words))
        return cls(line, tuple(parents), ranks(heirs, world_size), ranks(members, world_size), pairs(counted))


@dataclass(frozen=True)
class Install:
    """What a leader says of a view that all have promised."""

    members: tuple[int, ...]
    heirs: tuple[int, ...]
    parents: tuple[int, ...]
    counted: dict[int, int]
    copies: dict[int, int]
    """Who copies whose weights: all members but the heirs."""

    def pack(self) -> Note:
        """As numbers."""
        lists = self.members, self.heirs, self.parents, flat(self.counted), flat(self.copies)
        return pack(*map(list, lists))

    @classmethod
    def unpack(cls, words: Sequence[int], world_size: int) -> Install:
        """The way back; ValueError if it cannot be one."""
        given, kept, parents, counted, copies = read_all(LISTS, iter(words))
        members, heirs, donors = ranks(given, world_size), ranks(kept, world_size), pairs(copies)
        others = set(members) - set(heirs)
        if not set(heirs) <= set(members) or set(donors) != others or not set(donors.values()) <= set(heirs):
            raise ValueError("a view that cannot be, or copies that nobody needs, or can give")
        return cls(members, heirs, tuple(parents), pairs(counted), donors)


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


def flat(counts: dict[int, int]) -> tuple[int, ...]:
    """A dictionary as a list."""
    return tuple(k for pair in sorted(counts.items()) for k in pair)


def pairs(numbers: Sequence[int]) -> dict[int, int]:
    """The way back."""
    if len(numbers) > 2 * GROUPS:
        raise ValueError("more groups than there can be")
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


def ranks(given: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Ranks of a run, in order and each once; ValueError if they are not."""
    if list(given) != sorted(set(given)) or any(not 0 <= k < world_size for k in given):
        raise ValueError("workers that cannot be")
    return tuple(given)


def check_stamp(stamp: int, leader: int, world_size: int) -> None:
    """ValueError unless it is one of this leader's."""
    number, whose = divmod(stamp, world_size)
    if whose != leader or not 0 <= number < STAMPS:
        raise ValueError("the stamp of another")
