"""A run as lines of text that fit a terminal: a header, a table of workers, the last events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from freewheel.numbers import UNKNOWN, column, count, share, short
from freewheel.records.events import Event
from freewheel.records.run import Run
from freewheel.show.rates import elapsed_s, reached_s, standing, trouble
from freewheel.show.rows import (
    GOING,
    Column,
    columns,
    history,
    most_telling,
    printable,
    rows,
    total,
    window_s,
)
from freewheel.show.shown import EVENTS

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = str.maketrans(BLOCKS + "·–…×", "_.,-=+*#|-~x")
SPARK = (6, 24)
"""The least and the greatest width of what is drawn."""
GAP = "  "
SUMMED = ("steps", "steps/s", "waiting", "stale", "exch.", "merges", "sent", "loss")
"""What a line for a log says of all workers."""
STYLES = {"training": "green", "joining": "cyan", "finished": "blue", "dead": "bold red", "silent": "yellow"}
DROPPED = ("steps", "exch.", "merges", "restarts", "sent", "node", "stale", "rate", "discrep.", "waiting",
           "loss", "state")  # fmt: skip
"""Which columns go first where the terminal is narrow; `rate` is what is drawn."""


class Screen:
    """Draws a run again and again; columns never get narrower, so that the table stands still."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}

    def lines(
        self, run: Run, width: int, height: int | None = None, *, note: str = "", ascii_only: bool = False
    ) -> list[Text]:
        """The run now, in at most so many columns and lines."""
        gaps = [Text()] if height is None or height >= 18 else []
        events = _events(run, 20 if height is None else max(1, min(8, height // 4)))
        # Everything but the workers: the header, headings, totals and events with lines between them.
        others = 2 + bool(note) + 2 + len(events) + len(gaps) * (2 if events else 1)
        table = self._table(run, width, None if height is None else max(1, height - others))
        head = header(run, width, max(len(line) for line in table))
        head += [Text(note, style="dim")] if note else []
        lines = [*head, *gaps, *table, *(gaps if events else []), *events][:height]
        for line in lines:
            if ascii_only:
                line.plain = line.plain.translate(ASCII).encode("ascii", "replace").decode()
            if cell_len(line.plain) > width:
                line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
            line.no_wrap = True
        return lines

    def _table(self, run: Run, width: int, room: int | None) -> list[Text]:
        everyone = rows(run)
        shown, rest = everyone, []
        if room is not None and len(everyone) > room:
            shown = most_telling(everyone, max(1, room - 1))
            left = Counter(row.state for row in everyone if row not in shown)
            states = ", ".join(f"{number} {state}" for state, number in left.most_common())
            rest = [Text(f"… {left.total()} more: {states}", style="dim")]
        found = [one for one in columns([*shown, total(run, everyone)]) if one.key != "windows"]
        fitting = self._fit(found, width)
        for one in fitting:
            if one.key == "rate":
                _draw(run, one, [row.rank for row in shown], self._widths["rate"])
        lines = [self._line(fitting, None, "bold")]
        for number, row in enumerate(shown):
            line = self._line(fitting, number, "" if row.state in (*GOING, "finished") else "dim")
            at = line.plain.find(row.state)
            line.stylize(STYLES.get(row.state, ""), at, at + len(row.state))
            lines.append(line)
        return [*lines, *rest, self._line(fitting, len(shown), "bold")]

    def _fit(self, columns: list[Column], width: int) -> list[Column]:
        """Leave columns out until the others fit; what is drawn takes the room that is left."""
        for one in columns:
            widest = max(map(len, (one.heading or one.key, *one.cells)))
            self._widths[one.key] = max(self._widths.get(one.key, 0), widest)
        self._widths["rate"] = SPARK[0]
        for drop in ("", *DROPPED):
            columns = [one for one in columns if one.key != drop]
            free = width - sum(self._widths[one.key] + len(GAP) for one in columns) + len(GAP)
            if free >= 0:
                self._widths["rate"] += min(free, SPARK[1] - SPARK[0])
                break
        return columns

    def _line(self, columns: list[Column], number: int | None, style: str) -> Text:
        cells = []
        for one in columns:
            cell = one.heading or one.key if number is None else one.cells[number]
            wide = self._widths[one.key]
            cells.append(cell.ljust(wide) if one.key in ("state", "node", "rate") else cell.rjust(wide))
        return Text(GAP.join(cells).rstrip(), style=style)


def _draw(run: Run, one: Column, ranks: list[int | None], cells: int) -> None:
    """Fill in what is drawn: steps per second over time, all workers on one scale: who is slow is low."""
    last_s = window_s(run)
    span, least = ("whole run", "run") if last_s is None else (f"last {last_s:.0f} s", f"{last_s:.0f} s")
    words = (f"steps/s, {span}", span, least)
    one.heading = next((word for word in words if len(word) <= cells), least)
    drawn = history(run, cells)
    top = max((_peak(drawn.get(rank, [])) for rank in ranks), default=0.0)
    one.cells = [*(spark(drawn.get(rank, []), top) for rank in ranks), spark(drawn.get(None, []))]


def _peak(values: Sequence[float | None]) -> float:
    """The greatest; the first and the last part may hold a step and hardly any time, and do not count."""
    inner = [value for value in values[1:-1] if value]
    return max(inner or [value for value in values if value is not None], default=0.0)


def spark(values: Sequence[float | None], top: float | None = None) -> str:
    """A small drawing, from 0 to `top`, or to the greatest; blank where nothing is known."""
    most = _peak(values) if top is None else top
    return "".join(
        " " if value is None or not math.isfinite(value)
        else BLOCKS[min(7, max(0, round(7 * value / most))) if most > 0 else 0]
        for value in values
    )  # fmt: skip


def clock_time(run: Run, seconds: float) -> str:
    """A time since the run began: 1:05 or 1:02:05; short virtual times as seconds."""
    if run.clock == "virtual" and run.last_s < 600:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def header(run: Run, width: int, align: int) -> list[Text]:
    """Two lines: what is run and for how long; how far it is. What does not fit is left out, last first."""
    align = min(width, max(align, 60))
    names = (run.about.get("name") or run.folder.name, run.about.get("strategy", ""))
    left = [*filter(None, map(printable, names)), count(len(run.ranks), "worker")]
    status, clock = standing(run), "wall clock"
    if run.clock == "virtual":
        status, clock = {"live": "simulating", "finished": "simulated"}.get(status, status), "virtual time"
    lasted = clock_time(run, elapsed_s(run))
    long, brief = f"{status} · {clock} {lasted}", f"{status} · {lasted}"
    for parts, end in ((left, long), (left, brief), (left[:2], brief), (left[:1], brief)):
        begin = " · ".join(parts)
        room = align - cell_len(begin) - len(end)
        if room >= 2:
            break
    else:
        begin, room = begin[: max(0, align - len(end) - 3)] + "…", 2
    kept = ""
    for item in _figures(run):
        longer = f"{kept} · {item}" if kept else item
        kept = longer if len(longer) <= width else kept
    return [Text.assemble((begin, "bold"), " " * room, end), Text(kept)]


def _figures(run: Run) -> list[str]:
    """How far the run is, the most important first."""
    found = [f"{run.total('steps'):,.0f} steps"]
    measured = [one for one in run.evaluations if one.accuracy is not None or one.loss is not None]
    if measured:
        last = measured[-1]
        best = max((one.accuracy for one in measured if one.accuracy is not None), default=None)
        if last.accuracy is not None:
            found.append(f"accuracy {share(last.accuracy)}")
            if best is not None and best > last.accuracy:
                found.append(f"best {share(best)}")
        if last.loss is not None:
            found.append(f"evaluated loss {column([last.loss], 4)[0]}")
    if progress := max((track.value("progress") or 0.0 for track in run.workers.values()), default=0.0):
        found.append(f"{progress:.2f} passes")
    if run.about.get("target") is not None:
        after_s = reached_s(run)
        after = "" if after_s is None else f" after {short(after_s)} s"
        found.append(f"target {share(run.about['target'])}{after}")
    broken = [f"lines that cannot be read: {run.broken:,}"] if run.broken else []
    return [*found, *trouble(run.lives), *broken]


def _events(run: Run, most: int) -> list[Text]:
    """The last events, the latest last."""
    skipped = max(0, len(run.events) - most)
    lines = [event_line(run, event) for event in run.events[skipped:]]
    if skipped and most > 2:
        lines[0] = Text(f"… {skipped + 1} earlier events", style="dim")
    return lines


def event_line(run: Run, event: Event) -> Text:
    """When, what, and who noticed."""
    when, said = clock_time(run, max(0.0, event.time - run.began_s)), printable(event.text)
    text, kind = said or printable(event.what), EVENTS.get(event.what)
    if event.rank is not None:
        about = f"worker {event.rank}" + (f" {kind.words}" if kind else f": {printable(event.what)}")
        text = (event.link or about) + (f": {said}" if event.text else "")
    by = event.noticed_by((event.rank, event.peer))
    seen = f" (seen by {printable(by)})" if by else ""
    return Text.assemble((f"{when:>7}  ", "dim"), (text, kind.style if kind else ""), (seen, "dim"))


def plain_line(run: Run, width: int | None = None) -> str:
    """All workers in one line, for a log; what does not fit the width is left out, last first."""
    everyone = rows(run)
    states = Counter(one.state for one in everyone)
    parts = [
        clock_time(run, elapsed_s(run)),
        ", ".join(f"{number} {state}" for state, number in states.most_common()),
        *(
            f"{one.heading or one.key} {one.cells[-1]}"
            for one in columns([*everyone, total(run, everyone)])
            if one.key in SUMMED and one.cells[-1] != UNKNOWN
        ),
    ]
    while width is not None and len(parts) > 1 and len(GAP.join(parts)) > width:
        parts.pop()
    return GAP.join(parts)
