"""What goes wrong, and when: faults at given virtual times.

crash:3@0.5        worker 3 dies at 0.5 s
restart:3@1.0      and comes back at 1.0 s with a copy of a living worker's weights
leave:3@0.5        worker 3 is told to leave: it hands over what it has at a boundary, and goes
cut:3@0.5          worker 3 can reach nobody; cut:3-5@0.5 cuts one link
heal:3@2.0         the reverse
slow:3x10@0.5      worker 3 computes 10 times slower from then on (x0.1: faster again)
throttle:3x10@0.5  its link is 10 times slower from then on
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from freewheel.errors import ConfigError, UnknownName

KINDS = ("crash", "restart", "leave", "cut", "heal", "slow", "throttle")
_NUMBER = r"(\d*\.?\d+(?:[eE][+-]?\d+)?)"
_FORM = re.compile(rf"(\w+):(\d+)(?:-(\d+))?(?:x{_NUMBER})?@{_NUMBER}$")


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one worker, or to the link between two, at a virtual time."""

    kind: str
    rank: int
    at_s: float
    peer: int | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("fault", self.kind, KINDS)
        if not (0 <= self.at_s < math.inf and 0 < self.factor < math.inf):
            raise ConfigError(f"fault {self}: the time must be 0 s or more and the factor above 0.")
        if self.peer is not None and self.kind not in ("cut", "heal"):
            raise ConfigError(f"fault {self}: only cut and heal take two workers.")
        if self.peer == self.rank:
            raise ConfigError(f"fault {self}: a worker has no link to itself.")
        if (self.factor != 1.0) != (self.kind in ("slow", "throttle")):
            raise ConfigError(
                f"fault {self}: slow and throttle take a factor, as in slow:{self.rank}x10@{self.at_s:g}; no "
                "other fault does."
            )

    def __str__(self) -> str:
        peer = "" if self.peer is None else f"-{self.peer}"
        factor = "" if self.factor == 1.0 else f"x{self.factor:g}"
        return f"{self.kind}:{self.rank}{peer}{factor}@{self.at_s:g}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read one fault in the form above."""
        match = _FORM.match(text.strip())
        if not match:
            raise ConfigError(
                f"cannot read the fault {text!r}. Write KIND:WORKER@SECONDS, as in crash:3@0.5, cut:3-5@0.5 "
                f"or slow:3x10@0.5; kinds: {', '.join(KINDS)}."
            )
        kind, rank, peer, factor, at_s = match.groups()
        return cls(kind, int(rank), float(at_s), int(peer) if peer else None, float(factor or 1.0))
