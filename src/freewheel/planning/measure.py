"""Numbers for a plan from what is there: a few steps of the user's script, and the links to other hosts."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from freewheel.errors import ConfigError, RunStopped
from freewheel.runtime.launch.launcher import Captured, launch
from freewheel.runtime.membership.entries import Options

STEPS = 30
PATIENCE_S = 600.0
"""How long a script may take to make its first steps."""
TOO_FEW = 3
"""The stopwatch's exit code for a script that ended by itself before it had made enough steps."""


@dataclass(frozen=True)
class Measurement:
    """What a few steps of a script showed."""

    steps: int
    compute_ms: float
    """From one step to the next: data, forward, backward and optimizer."""
    jitter: float
    model_mb: float
    """The weights that are trained."""
    optimizer_mb: float
    device: str


def measure_script(script: Sequence[str], steps: int = STEPS) -> Measurement:
    """Run a script alone, as one worker, and time its steps; it is ended after so many."""
    begun_s, output = time.monotonic(), Captured()

    def look() -> None:
        if time.monotonic() - begun_s > PATIENCE_S:
            raise RunStopped(f"{script[0]} has not made {steps} steps within {PATIENCE_S:g} s.")

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "freewheel.planning.stopwatch", str(out), str(steps), *script]
        code = launch(command, 1, output=output, options=Options(), tick=look)
        if code in (130, 143):
            raise KeyboardInterrupt
        if code == 0:
            return Measurement(**json.loads(out.read_text()))
        name = " ".join(script[:2]) if script[0] == "-m" else script[0]
        if code == TOO_FEW and out.exists():
            made = json.loads(out.read_text())["made"]
            raise ConfigError(
                f"{name} ended after {made} steps of its optimizer; about 10 are needed to time it. Let it "
                "train for longer, or give --model-mb and --compute-ms."
            )
    said = [line for line in output.lines[0] if line.strip()]
    last = said[-1] if said else "it said nothing"
    raise RunStopped(f"{name} ended with exit code {code} before it could be timed: {last}")


@dataclass(frozen=True)
class LinkTo:
    """The way to one host."""

    host: str
    latency_ms: float
    mbit: float
    """The slower of the two directions."""


def measure_links(hosts: Sequence[str], tls: Path | None = None) -> list[LinkTo]:
    """Time the ways from here to hosts on which `freewheel doctor --serve` runs, one after the other."""
    from freewheel.runtime.doctor.bandwidth import PORT, measure
    from freewheel.runtime.membership.place import parse_address

    found = []
    for text in hosts:
        host, port = parse_address(text, "the host", PORT)
        figure = measure(host, port, tls=tls)
        found.append(LinkTo(text, figure.latency_ms, min(figure.mbit_out, figure.mbit_in)))
    return found
