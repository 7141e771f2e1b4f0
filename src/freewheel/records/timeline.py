"""When a worker did what, one by one: gradients, exchanges and merges. A replay is made of it.

    {"life": 1, "from": 12.5, "gradients": [0, 503, 504, 1011], "exchanges": [700, 22, 3], "merges": []}

Times are tenths of a millisecond after `from`. Of a gradient: when it began and ended. Of an exchange: when
it was complete, how long it took, with whom. Of a merge: when, how long, and with whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MOST = 20_000
"""What is kept until it is written: more than a worker does between two samples."""
UNITS = 10_000
"""Of a second."""


class Timeline:
    """What one worker did since the last time anybody asked. Any thread may add to it."""

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
        firsts = [one[0] for some in (gradients, exchanges, merges) for one in some[:1]]
        if not firsts:
            return None
        from_s = min(firsts)

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


def seconds(line: dict[str, Any], numbers: Iterable[int]) -> list[float]:
    """Moments of a line, as seconds of the run's clock."""
    return [line["from"] + number / UNITS for number in numbers]
