"""What one worker counts while it runs, and when it did what, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST = 20_000
"""What is kept until it is written: more than a worker does between two samples."""
UNITS = 10_000
"""Of a second."""


class Timeline:
    """What one worker did since the last time anybody asked, for a replay. Any thread may add to it.

        {"life": 1, "from": 12.5, "gradients": [0, 503, 504, 1011], "exchanges": [700, 22, 3], "merges": []}

    Times are tenths of a millisecond after `from`. Of a gradient: when it began and ended. Of an exchange:
    when it was complete, how long it took, with whom. Of a merge: when, how long, and with whom.
    """

    def __init__(self, now: Callable[[], float], life: int) -> None:
        self._now, self._life = now, life
        self._gradients: deque[tuple[float, float]] = deque(maxlen=MOST)
        self._exchanges: deque[tuple[float, float, int]] = deque(maxlen=MOST)
        self._merges: deque[tuple[float, float, Sequence[int]]] = deque(maxlen=MOST)

    def gradient(self, seconds: float, ago_s: float = 0.0) -> None:
        """A gradient is there, for so long, after so many seconds of computing."""
        end_s = self._now() - ago_s
        self._gradients.append((end_s - seconds, end_s))

    def exchange(self, peer: int, took_s: float) -> None:
        """An exchange with a peer is complete."""
        self._exchanges.append((self._now(), took_s, peer))

    def merge(self, peers: Sequence[int], took_s: float) -> None:
        """A merge with some peers is complete."""
        self._merges.append((self._now(), took_s, peers))

    def take(self) -> dict[str, Any] | None:
        """All of it, as a line; None: there is nothing."""
        gradients, exchanges = _taken(self._gradients), _taken(self._exchanges)
        merges = _taken(self._merges)
        from_s = min((one[0] for one in (*gradients, *exchanges, *merges)), default=None)
        if from_s is None:
            return None

        def units(seconds: float, since_s: float = 0.0) -> int:
            return round((seconds - since_s) * UNITS)

        return {
            "life": self._life,
            "from": round(from_s, 4),
            "gradients": [units(end_s, from_s) for pair in gradients for end_s in pair],
            "exchanges": [
                k for at_s, took_s, peer in exchanges for k in (units(at_s, from_s), units(took_s), peer)
            ],
            "merges": [[units(at_s, from_s), units(took_s), list(peers)] for at_s, took_s, peers in merges],
        }


def _taken(kept: deque[Any]) -> list[Any]:
    return [kept.popleft() for _ in range(len(kept))]


CAUSES = ("peers", "data", "checkpoint")
"""Why training may wait: for a strategy that waits, for the loader, for a checkpoint to be copied."""
TOLD = ("discrepancy", "discrepancy_max", "staleness_max", "bytes_out", "bytes_in", "messages_out",
        "messages_dropped", "samples", "samples_again", "gradient_norm_max")  # fmt: skip
"""What a worker says as it counts it."""


@dataclass(slots=True)
class Counters:
    """Sums and maxima of one worker; times in seconds, sizes in bytes."""

    steps: int = 0
    compute_s: float = 0.0
    blocked_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    bytes_out: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    messages_dropped: int = 0
    exchanges: dict[str, int] = field(default_factory=lambda: {"done": 0, "busy": 0, "half": 0, "failed": 0})
    merges: dict[str, int] = field(default_factory=lambda: {"done": 0, "dropped": 0, "half": 0})
    peers: dict[int, tuple[int, float | None]] = field(default_factory=dict)
    """Of every peer met: exchanges done with it, how far it was at the last one."""
    merged: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The same of merges, by all peers of a merge: adding to each of them would be dear with many workers."""
    staleness_sum: float = 0.0
    staleness_count: int = 0
    staleness_max: float = 0.0
    staleness_classes: list[int] = field(default_factory=lambda: [0] * 64)
    """How many were 0, 1, 2 to 3, 4 to 7, 8 to 15, …"""
    discrepancy: float | None = None
    """How far the last peer met was; after a merge, how far the mean was: where that was asked for."""
    discrepancy_max: float = 0.0
    """The largest distance to a peer, or to the mean at a merge, of those that were measured."""
    measure: bool = False
    """Whether somebody wants to know how far the others are at the next exchange or merge."""
    measure_always: bool = False
    """The same for all of them: in virtual time it costs nothing."""
    gradient_norm_max: float = 0.0
    samples: int = 0
    """Dealt by leases and finished."""
    samples_again: int = 0
    """Of these, dealt before; and doubles this worker found as a dealer. See data/dealing.py."""
    waiting: tuple[str, float] | None = None
    """What training waits for now, and since when."""
    timeline: Timeline | None = None
    """Where single gradients, exchanges and merges are written down, if anywhere."""

    def wait(self, cause: str, now_s: float) -> None:
        """Training begins to wait."""
        self.waiting = (cause, now_s)

    def go_on(self, now_s: float) -> None:
        """Training goes on."""
        if self.waiting is not None:
            cause, since_s = self.waiting
            self.waiting = None
            self.blocked_s[cause] += now_s - since_s

    def blocked(self, now_s: float) -> dict[str, float]:
        """How long training has waited, by cause, what it waits for now included."""
        blocked, waiting = dict(self.blocked_s), self.waiting
        if waiting is not None:
            blocked[waiting[0]] += max(0.0, now_s - waiting[1])
        return blocked

    def met(self, peer: int, apart: float | None, took_s: float = 0.0) -> None:
        """An exchange with a peer is done; `apart`: how far it was, where that was measured."""
        if self.timeline is not None:
            self.timeline.exchange(peer, took_s)
        times, before = self.peers.get(peer, (0, None))
        self.peers[peer] = (times + 1, before if apart is None else apart)
        if apart is not None:
            self.measured(apart)

    def measured(self, apart: float) -> None:
        """How far a peer was, or the mean of a merge."""
        self.discrepancy = apart
        self.discrepancy_max = max(self.discrepancy_max, apart)

    def met_all(self, peers: tuple[int, ...], now_s: float = 0.0) -> None:
        """A merge with some peers is done."""
        if self.timeline is not None:
            self.timeline.merge(peers, now_s - self.waiting[1] if self.waiting is not None else 0.0)
        self.merged[peers] = self.merged.get(peers, 0) + 1
        if len(self.merged) > 64:
            self.peers, self.merged = self._met(), {}

    def _met(self) -> dict[int, tuple[int, float | None]]:
        """Of every peer: exchanges and merges done with it, how far it was where known."""
        met = self.peers.copy()
        for peers, times in self.merged.copy().items():
            for peer in peers:
                before, apart = met.get(peer, (0, None))
                met[peer] = (before + times, apart)
        return met

    def figures(self) -> dict[str, Any]:
        """What a worker says of itself, as plain data."""
        stale = self.staleness_count
        return {
            "exchanges": dict(self.exchanges),
            "merges": dict(self.merges),
            "peers": dict(sorted(self._met().items())),
            "staleness_mean": self.staleness_sum / stale if stale else 0.0,
            "staleness_counts": {1 << k >> 1: n for k, n in enumerate(self.staleness_classes) if n},
            **{name: getattr(self, name) for name in TOLD},
        }

    def stale(self, value: float) -> None:
        """Record the staleness of one step, in the strategy's own measure."""
        self.staleness_sum += value
        self.staleness_count += 1
        self.staleness_classes[int(value).bit_length()] += 1
        if value > self.staleness_max:
            self.staleness_max = value
