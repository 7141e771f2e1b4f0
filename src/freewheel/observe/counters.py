"""What one worker counts while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    def stale(self, value: float) -> None:
        """Record the staleness of one step, in the strategy's own measure."""
        self.staleness_sum += value
        self.staleness_count += 1
        if value > self.staleness_max:
            self.staleness_max = value
