"""What one worker counts and notices while it runs, and when it did what, one by one."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST = 60_000  # entries kept until they are written: more than a worker makes between two samples
MOST_EVENTS = 1000
UNITS = 10_000  # in a second, of the numbers in a timeline


class Timeline:
    """What one worker did since the last `take`, for a replay. Any thread may add to it.

        {"life": 1, "from": 12.5, "gradients": [0, 503, 504, 1011], "exchanges": [700, 22, 3], "merges": []}

    Times are tenths of a millisecond after `from`: when a gradient began and ended; when an exchange or merge
    was complete, how long it took, and with whom.
    """

    def __init__(self, now: Callable[[], float], life: int) -> None:
        self._now, self._life = now, life
        self._done: deque[tuple[str, float, float, Any]] = deque(maxlen=MOST)

    def gradient(self, seconds: float, ago_s: float = 0.0) -> None:
        """A gradient that took `seconds` ended `ago_s` seconds ago."""
        end_s = self._now() - ago_s
        self._done.append(("gradients", end_s - seconds, end_s, None))

    def exchange(self, peer: int, took_s: float) -> None:
        self._done.append(("exchanges", self._now(), took_s, peer))

    def merge(self, peers: Sequence[int], took_s: float) -> None:
        self._done.append(("merges", self._now(), took_s, peers))

    def take(self) -> dict[str, Any] | None:
        done = [self._done.popleft() for _ in range(len(self._done))]
        if not done:
            return None
        from_s = min(at_s for _, at_s, *_ in done)
        found: dict[str, list[Any]] = {"gradients": [], "exchanges": [], "merges": []}
        for what, at_s, other_s, whom in done:
            at = round((at_s - from_s) * UNITS)
            if what == "gradients":
                found[what] += [at, round((other_s - from_s) * UNITS)]
            elif what == "exchanges":
                found[what] += [at, round(other_s * UNITS), whom]
            else:
                found[what].append([at, round(other_s * UNITS), list(whom)])
        return {"life": self._life, "from": round(from_s, 4), **found}


CAUSES = ("peers", "data", "checkpoint")  # why training may wait: strategy, loader, a checkpoint being copied
# Counters that stand in a sample as they are.
TOLD = ("discrepancy", "discrepancy_max", "staleness_max", "bytes_out", "bytes_in", "messages_out",
        "messages_dropped", "samples", "samples_again", "gradient_norm_max")  # fmt: skip


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
    peers: dict[int, tuple[int, float | None]] = field(default_factory=dict)  # exchanges, last distance
    # Merges by their members: with many workers it would be slow to count each merge at each of them.
    merged: dict[tuple[int, ...], int] = field(default_factory=dict)
    staleness_sum: float = 0.0
    staleness_max: float = 0.0
    staleness_classes: list[int] = field(default_factory=lambda: [0] * 64)  # of 0, 1, 2 to 3, 4 to 7, …
    discrepancy: float | None = None  # the last measured distance to a peer, or to the mean of a merge
    discrepancy_max: float = 0.0
    measure: bool = False  # whether it is to be measured at the next exchange or merge
    measure_always: bool = False  # or at all of them: in virtual time it costs nothing
    gradient_norm_max: float = 0.0
    samples: int = 0  # dealt by leases and finished
    samples_again: int = 0  # of these, dealt before; and doubles found as a dealer: see data/dealing.py
    waiting: tuple[str, float] | None = None  # what training waits for now, and since when
    timeline: Timeline | None = None  # of single gradients, exchanges and merges, where it is kept

    def wait(self, cause: str, now_s: float) -> None:
        self.waiting = (cause, now_s)

    def go_on(self, now_s: float) -> None:
        if self.waiting is not None:
            cause, since_s = self.waiting
            self.waiting = None
            self.blocked_s[cause] += now_s - since_s

    def blocked(self, now_s: float) -> dict[str, float]:
        """How long training has waited, by cause, including the wait that goes on."""
        blocked, waiting = dict(self.blocked_s), self.waiting
        if waiting is not None:
            blocked[waiting[0]] += max(0.0, now_s - waiting[1])
        return blocked

    def met(self, peer: int, apart: float | None, took_s: float = 0.0) -> None:
        """Count an exchange; `apart` is the distance to the peer, where it was measured."""
        if self.timeline is not None:
            self.timeline.exchange(peer, took_s)
        times, before = self.peers.get(peer, (0, None))
        self.peers[peer] = (times + 1, before if apart is None else apart)
        if apart is not None:
            self.measured(apart)

    def measured(self, apart: float) -> None:
        self.discrepancy = apart
        self.discrepancy_max = max(self.discrepancy_max, apart)

    def met_all(self, peers: tuple[int, ...], now_s: float = 0.0) -> None:
        if self.timeline is not None:
            self.timeline.merge(peers, now_s - self.waiting[1] if self.waiting is not None else 0.0)
        self.merged[peers] = self.merged.get(peers, 0) + 1
        if len(self.merged) > 64:
            self.peers, self.merged = self._met(), {}

    def _met(self) -> dict[int, tuple[int, float | None]]:
        """Of every peer: exchanges and merges with it, and its last known distance."""
        met = self.peers.copy()
        for peers, times in self.merged.copy().items():
            for peer in peers:
                before, apart = met.get(peer, (0, None))
                met[peer] = (before + times, apart)
        return met

    def figures(self) -> dict[str, Any]:
        stale = sum(self.staleness_classes)
        return {
            "exchanges": dict(self.exchanges),
            "merges": dict(self.merges),
            "peers": dict(sorted(self._met().items())),
            "staleness_mean": self.staleness_sum / stale if stale else 0.0,
            "staleness_counts": {1 << k >> 1: n for k, n in enumerate(self.staleness_classes) if n},
            **{name: getattr(self, name) for name in TOLD},
        }

    def stale(self, value: float) -> None:
        """Count one step's staleness, in the strategy's own measure."""
        self.staleness_sum += value
        self.staleness_classes[int(value).bit_length()] += 1
        self.staleness_max = max(self.staleness_max, value)


class Noticed:
    """What a worker has noticed and not written yet. Any thread may `note`."""

    def __init__(self) -> None:
        self.begun = False  # whether training has begun: before that nobody "joins"
        self.lives: Mapping[int, int] = {}
        self.over = False  # whether this worker leaves: others that leave with it have not died
        self.muted = False  # whether nothing is written any more, as a later life of this worker writes
        self.noted: deque[tuple[float, str, int | None, int | None, str]] = deque(maxlen=MOST_EVENTS)

    def note(self, what: str, rank: int | None, text: str) -> None:
        """Something happened to a worker, or to all (rank None)."""
        late = self.over and what not in ("failed", "checkpoint")
        if not (late or what == "finished" or (what == "joined" and not self.begun)):
            life = None if rank is None else self.lives.get(rank)
            self.noted.append((time.time(), what, rank, life, text))
