"""What workers print when they fail: each traceback in one piece, and the same one only once.

An error in a script fails all its workers at once. Shown as the lines come, their tracebacks would be mixed.
"""

from __future__ import annotations

import re
import sysconfig
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import freewheel
from freewheel.runtime.launch.processes import Output

BEGIN = ("Traceback (most recent call last):", '  File "')
"""The second is how Python says that a script cannot be read."""
PREFIX = "freewheel.errors."
FRAME = re.compile(r'  File "([^"]*)", line (\d+), in ')
LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
NOT_THE_SCRIPT = ("<", *LIBRARIES, str(Path(freewheel.__file__).parent))
HELD_S = 0.5
"""How long a traceback is held after its last line: the worker may go on, and print others."""
MOST_S = 2.0
"""How long anything is held: what looks like a traceback may be something else, or more may follow."""


@dataclass
class _Held:
    began_s: float
    lines: list[str] = field(default_factory=list)
    newest_s: float = 0.0

    def whole(self) -> bool:
        """Whether the line with the error is there, at least."""
        return self.lines[-1][:1] not in ("", " ") and self.lines[-1] != BEGIN[0]


class Tracebacks:
    """Output that holds back each worker's traceback until it is whole; `show` gets all lines in the end."""

    def __init__(self, show: Output) -> None:
        self._show = show
        self._held: dict[int, _Held] = {}
        self._seen: dict[str, int] = {}
        """Whose each kind of traceback was that has been shown."""

    def __call__(self, rank: int | None, text: str, error: bool) -> None:
        """Take one line."""
        if rank is not None and error and (rank in self._held or text.startswith(BEGIN)):
            held = self._held.setdefault(rank, _Held(time.monotonic()))
            held.lines.append(text)
            held.newest_s = time.monotonic()
            return
        if rank is None:  # the launcher says of a worker that it has ended: it will print nothing more
            self._let_go(one for one in list(self._held) if text.startswith(f"worker {one} ended "))
        self._show(rank, text, error)

    def tick(self) -> None:
        """Show what is whole and was not the end of its worker, and what goes on for too long to be one."""
        now_s = time.monotonic()
        held = list(self._held.items())
        self._let_go(
            rank
            for rank, one in held
            if (one.whole() and now_s > one.newest_s + HELD_S) or now_s > one.began_s + MOST_S
        )

    def end(self) -> None:
        """Show what is left."""
        self._let_go(list(self._held))

    def _let_go(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            lines = self._held.pop(rank).lines
            kind = re.sub(r"\d+", "#", "\n".join(lines))  # ranks, ports and times differ
            if kind in self._seen:
                first = self._seen[kind]
                whose = "before" if first == rank else f"worker {first}"
                error = lines[_error(lines)].removeprefix(PREFIX)
                lines = [f"the same error as {whose}: {textwrap.shorten(error, 100, placeholder=' …')}"]
            else:
                self._seen[kind] = rank
                lines = _ours(lines) or lines
            for line in lines:
                self._show(rank, line, True)


def _error(lines: list[str]) -> int:
    """Which line names the error: the first after the frames of the last traceback."""
    begin = max((k for k, line in enumerate(lines) if line.startswith(BEGIN)), default=0)
    return next((k for k in range(begin + 1, len(lines)) if lines[k][:1] not in ("", " ")), len(lines) - 1)


def _ours(lines: list[str]) -> list[str] | None:
    """A mistake that Freewheel explains: its words, and where in the script it was made; None: another."""
    error, frames = _error(lines), [found for line in lines if (found := FRAME.match(line))]
    if not lines[error].startswith(PREFIX) or lines.count(BEGIN[0]) > 1:  # its cause may say more
        return None
    script = [one for one in frames if not one[1].startswith(NOT_THE_SCRIPT)]
    where = "".join(f" ({one[1]}, line {one[2]})" for one in script[-1:])
    return [lines[error].removeprefix(PREFIX) + where, *lines[error + 1 :]]
