"""Everything Freewheel raises on purpose. A message says what was given, what is allowed and what to do."""

import difflib
import math
from collections.abc import Iterable


class FreewheelError(Exception):
    """The root: catch this to catch everything Freewheel raises on purpose."""


class ConfigError(FreewheelError, ValueError):
    """A value given by the user is not allowed."""


class UnknownName(ConfigError):
    """There is nothing of this kind and name; the message says what there is, and the nearest name."""

    def __init__(self, kind: str, given: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {given!r}.{hint} Known: {', '.join(names)}.")


class NotInstalled(ConfigError, ImportError):
    """A library that the user asks for is not installed."""

    def __init__(self, what: str, library: str, extra: str) -> None:
        super().__init__(
            f"{what} needs {library}, which is not installed here. Install it: pip install "
            f"'freewheel[{extra}]'."
        )


class PeerLost(FreewheelError):
    """A peer's connection broke or it has been silent past the deadline."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(f"worker {peer} is gone ({why})")
        self.peer = peer
        self.why = why


class RunStopped(FreewheelError):
    """The run cannot go on; the message says since when and why."""


class WorkerLost(RunStopped):
    """A worker is gone that the strategy cannot do without."""


class Deadlock(RunStopped):
    """Nothing is left to wait for, yet workers wait; the message says who waits for whom."""


class Diverged(RunStopped):
    """A loss or a weight stopped being a finite number."""


def at_least(what: str, value: float | None, least: float) -> None:
    """Refuse a setting below its smallest allowed value; None means not set."""
    if value is not None and not value >= least:
        raise ConfigError(f"{what} must be at least {least:g}, not {value:g}.")


def above_zero(what: str, value: float) -> None:
    """Refuse a setting that is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{what} must be above 0 and finite, not {value:g}.")


def first_line(error: BaseException, longest: int = 120) -> str:
    """What an error of another library says, in one line; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:longest].rstrip(".")
