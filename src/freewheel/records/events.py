"""What happened in a run, as people are told it: what several workers noticed is one event.

A link that was cut is noticed at both ends. Only where several links of one worker break is that worker cut
off; one link is a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TOGETHER_S = 5.0
"""What several workers notice within this time is one event."""

Key = tuple[str, int | None, int | str | None]


@dataclass
class Event:
    """Something that happened to a worker, to all, or to the link to a `peer`; `by` has noticed it."""

    time: float
    what: str
    text: str
    rank: int | None = None
    life: int | None = None
    by: list[int | str] = field(default_factory=list)
    peer: int | None = None
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Of a cut: whom who has lost."""
    last_s: float = 0.0
    """The last time that somebody noticed it, by a clock that may be another's than that of `time`."""

    @property
    def link(self) -> str:
        """What happened to a link, in words; nothing where it happened to a worker."""
        if self.peer is None:
            return ""
        verb = "was cut" if self.what == "cut" else "is whole again"
        return f"the link between {self.rank} and {self.peer} {verb}"

    def noticed_by(self, most: int = 6, others_than: Sequence[int | None] = ()) -> str:
        """Who noticed, in words: ranks in order, or how many where there are many, then the others."""
        ranks = sorted(one for one in self.by if isinstance(one, int) and one not in others_than)
        workers = [f"{len(ranks)} workers"] if len(ranks) > most else map(str, ranks)
        return ", ".join([*workers, *(one for one in self.by if isinstance(one, str))])


class Events:
    """All events of a run, in order of time once `sort` was called."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.last: dict[Key, Event] = {}
        """The last event of each kind, of each life of a worker; of all workers: of each text."""
        self._cuts: dict[int, list[Event]] = {}
        """Cuts by when they were first noticed, in parts as long as what belongs together."""

    def sort(self) -> None:
        """Put them in order; of one moment, first what the launcher or the simulator has done."""
        self.all.sort(key=lambda event: (event.time, all(isinstance(one, int) for one in event.by)))

    def add(self, line: dict[str, Any]) -> None:
        """Take in what somebody noticed; raises KeyError, TypeError or ValueError where it is no event."""
        rank, life, peer = (_whole(line.get(name)) for name in ("rank", "life", "peer"))
        time_s, by = float(line["time"]), line["by"]
        if not isinstance(line["what"], str) or not isinstance(by, int | str):
            raise TypeError("what and by must be words")
        new = Event(time_s, line["what"], str(line.get("text", "")), rank, life, [by], peer, last_s=time_s)
        if new.what == "cut" and rank is not None and isinstance(by, int):
            new.seen = {(rank, by)}
            part = int(time_s // TOGETHER_S)
            parts = range(part + 2, part - 3, -1)
            near = [cut for at in parts for cut in reversed(self._cuts.get(at, ()))]
            if any(_is_cut(cut, new, (rank, by)) for cut in near):
                return
        key = (new.what, rank, new.text if rank is None else life)
        event = self.last.get(key)
        fits = event is not None and _together(event, new) and event.peer == peer and not event.seen
        if event is not None and fits and by not in event.by:
            _join(event, new)
            return
        self.all.append(new)
        self.last[key] = new
        if new.what == "cut":
            self._cuts.setdefault(int(time_s // TOGETHER_S), []).append(new)


def _is_cut(event: Event, new: Event, seen: tuple[int, int]) -> bool:
    """Whether a link that broke belongs to a cut that is known; then that one says so."""
    if event.what != "cut" or event.rank is None or not _together(event, new) or seen in event.seen:
        return False
    links = {frozenset(one) for one in event.seen}
    told = any(isinstance(by, str) for by in event.by)
    if told:  # somebody who is none of them knows what was cut
        common = frozenset(one for one in (event.rank, event.peer) if one is not None)
        fits = common <= set(seen)
    else:
        common = frozenset.intersection(*links, frozenset(seen))  # whom all these links have in common
        fits = bool(common)
    if not fits:
        return False
    _join(event, new)
    event.seen.add(seen)
    if told:
        return True
    if len(common) == 1:
        (rank,) = common
        event.life = event.life if rank == event.rank else None
        event.rank, event.peer = rank, None
    elif event.seen >= {seen, seen[::-1]}:  # both ends say so
        event.rank, event.peer = sorted(seen)
    return True


def _together(one: Event, other: Event) -> bool:
    return abs(one.time - other.time) < TOGETHER_S


def _join(event: Event, new: Event) -> None:
    event.by += [by for by in new.by if by not in event.by]
    if new.by == ["launcher"]:
        event.text = new.text  # it knows how the process ended; others see a line that is closed
    event.time, event.last_s = min(event.time, new.time), max(event.last_s, new.last_s)


def _whole(value: Any) -> int | None:
    if value is not None and not isinstance(value, int):
        raise TypeError("rank, life and peer must be whole numbers")
    return value
