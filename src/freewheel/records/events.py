"""What happened in a run, as people are told it: what several workers noticed is one event.

A broken link is noticed at both ends. A worker is cut off only if several of its links break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TOGETHER_S = 5.0  # what several workers notice within this time is one event
LATELY = 256  # how many events back a cut may be part of a known one


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
    last_s: float = 0.0  # when somebody last noticed it, maybe by another clock than that of `time`
    links: set[tuple[int, int]] = field(default_factory=set)  # of a cut: who was lost, and by whom

    @property
    def link(self) -> str:
        """What happened to a link, in words; empty where it happened to a worker."""
        if self.peer is None:
            return ""
        verb = "was cut" if self.what == "cut" else "is whole again"
        return f"the link between {self.rank} and {self.peer} {verb}"

    def noticed_by(self, others_than: Sequence[int | None] = ()) -> str:
        """Up to five ranks are listed, more are counted."""
        ranks = sorted(one for one in self.by if isinstance(one, int) and one not in others_than)
        workers = [f"{len(ranks)} workers"] if len(ranks) > 5 else map(str, ranks)
        return ", ".join([*workers, *(one for one in self.by if isinstance(one, str))])

    def near(self, other: Event) -> bool:
        return abs(self.time - other.time) < TOGETHER_S

    def join(self, other: Event) -> None:
        self.by += [by for by in other.by if by not in self.by]
        self.links |= other.links
        if other.by == ["launcher"]:
            self.text = other.text  # it knows how the process ended; peers see a closed connection
        self.time, self.last_s = min(self.time, other.time), max(self.last_s, other.last_s)

    def takes_link(self, other: Event) -> bool:
        """Join another broken link to this cut, if one worker is an end of all its links."""
        (link,) = other.links
        if self.what != "cut" or not self.near(other) or link in self.links:
            return False
        sure = any(isinstance(by, str) for by in self.by)  # the simulator knows what was cut
        ends = {one for one in (self.rank, self.peer) if one is not None}
        common = ends if sure else set(link).intersection(*self.links)
        if not common or not common <= set(link):
            return False
        self.join(other)
        if not sure and len(common) == 1:
            (rank,) = common
            self.life = self.life if rank == self.rank else None
            self.rank, self.peer = rank, None
        elif not sure:
            self.rank, self.peer = sorted(common)
        return True


class Events:
    """All events of a run."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        # The last event by kind, worker and life; of events of all workers by their text.
        self._last: dict[tuple[str, int | None, int | str | None], Event] = {}

    def add(self, line: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError where the line is no event."""
        rank, life, peer = (line.get(name) for name in ("rank", "life", "peer"))
        time_s, what, by = float(line["time"]), line["what"], line["by"]
        if not all(isinstance(one, int | None) for one in (rank, life, peer)):
            raise TypeError("rank, life and peer must be whole numbers")
        if not isinstance(what, str) or not isinstance(by, int | str):
            raise TypeError("what and by must be words")
        new = Event(time_s, what, str(line.get("text", "")), rank, life, [by], peer, time_s)
        if what == "cut" and rank is not None and isinstance(by, int):
            new.links = {(rank, by)}
            if any(event.takes_link(new) for event in reversed(self.all[-LATELY:])):
                return
        key = (what, rank, new.text if rank is None else life)
        event = self._last.get(key)
        if event and event.near(new) and event.peer == peer and not event.links and by not in event.by:
            event.join(new)
            return
        self.all.append(new)
        self._last[key] = new
