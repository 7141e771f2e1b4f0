"""What one worker counts while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counters:
    """Sums and maxima of one worker; times in seconds, sizes in bytes."""

    steps: int = 0
    compute_s: float = 0.0
    alive_s: float = 0.0
    blocked_s: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    messages_dropped: int = 0
    exchanges: dict[str, int] = field(default_factory=lambda: {"done": 0, "busy": 0, "half": 0, "failed": 0})
    merges: dict[str, int] = field(default_factory=lambda: {"done": 0, "dropped": 0, "half": 0})
    staleness_sum: float = 0.0
    staleness_count: int = 0
    staleness_max: float = 0.0
    discrepancy_max: float = 0.0
    gradient_norm_max: float = 0.0
    samples: int = 0
    """Dealt by leases and finished."""
    samples_again: int = 0
    """Of these, dealt before; and doubles this worker found as a dealer. See data/dealing.py."""

    def figures(self) -> dict[str, Any]:
        """What a real worker says of itself, as plain data."""
        stale = self.staleness_count
        return {
            "exchanges": dict(self.exchanges),
            "merges": dict(self.merges),
            "staleness_mean": self.staleness_sum / stale if stale else 0.0,
            "staleness_max": self.staleness_max,
            "discrepancy_max": self.discrepancy_max,
            "bytes_out": self.bytes_out,
            "bytes_in": self.bytes_in,
            "messages_dropped": self.messages_dropped,
            "samples": self.samples,
            "samples_again": self.samples_again,
        }

    def stale(self, value: float) -> None:
        """Record the staleness of one step, in the strategy's own measure."""
        self.staleness_sum += value
        self.staleness_count += 1
        if value > self.staleness_max:
            self.staleness_max = value
