"""What a benchmark finds: Freewheel's number, the opponent's, their ratio, and the raw numbers below them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One comparison. `opponent` is the key its number has in JSON: ddp, gloo or plain."""

    name: str
    of: str  # which of several: the strategy, the size, the device
    freewheel: float
    opponent: str
    theirs: float
    ratio: float
    unit: str
    raw: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "of": self.of,
            "freewheel": self.freewheel,
            self.opponent: self.theirs,
            "ratio": self.ratio,
            "unit": self.unit,
            **self.raw,
        }
