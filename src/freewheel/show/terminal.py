"""A run as lines of text that fit a terminal: a header, a table of workers, the last events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from freewheel.numbers import share, short
from freewheel.records.events import Event
from freewheel.records.run import Run
from freewheel.show.rows import (
    GOING,
    Row,
    elapsed_s,
    history,
    most_telling,
    rows,
    standing,
    total,
    window_s,
)
from freewheel.show.summary import reached_s

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK = (6, 24)
"""The least and the greatest width of what is drawn."""
GAP = "  "
STYLES = {
    "training": "green", "joining": "cyan", "finished": "blue", "dead": "bold red", "silent": "yellow",
    "died": "red", "failed": "red", "cut": "red", "store lost": "red", "half": "yellow", "left": "yellow",
    "joined": "green", "restarted": "green", "store back": "green", "resumed": "green",
}  # fmt: skip
WORDS = {
    "died": "worker {} died", "cut": "worker {} is cut off", "joined": "worker {} joined",
    "left": "worker {} left", "half": "half an exchange with worker {}", "failed": "worker {} failed",
    "restarted": "worker {}", "resumed": "worker {} resumed",
    "checkpoint": "worker {} wrote a checkpoint", "store lost": "worker {} lost the rendezvous",
    "store back": "worker {} has the rendezvous again", "thinned": "records of worker {} were thinned",
    "slowed": "worker {} is slower",
}  # fmt: skip
DROPPED = ("steps", "exch.", "merges", "restarts", "sent", "node", "stale", "rate", "discrep.", "blocked",
           "loss", "state")  # fmt: skip
"""Which columns go first where the terminal is narrow; `rate` is what is drawn."""
ASCII = str.maketrans(BLOCKS + "·–…×", "_.,-=+*#|-~x")


@dataclass
class Column:
    """A heading and a cell for each row; `key` is its name among those that may be dropped."""

    key: str
    heading: str
    cells: list[str]
    left: bool = False

    @property
    def width(self) -> int:
        """As wide as its widest cell."""
        return max(map(len, (self.heading, *self.cells)))


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
        lines = [*head, *gaps, *table, *(gaps if events else []), *events]
        for line in lines[: height if height is not None else None]:
            if ascii_only:
                line.plain = line.plain.translate(ASCII).encode("ascii", "replace").decode()
            if cell_len(line.plain) > width:
                line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
            line.no_wrap = True
        return lines[: height if height is not None else None]

    def _table(self, run: Run, width: int, room: int | None) -> list[Text]:
        everyone = rows(run)
        shown, rest = everyone, ""
        if room is not None and len(everyone) > room:
            shown = most_telling(everyone, max(1, room - 1))
            ranks = {row.rank for row in shown}
            left = Counter(row.state for row in everyone if row.rank not in ranks)
            rest = f"… {left.total()} more: " + ", ".join(f"{n} {state}" for state, n in left.most_common())
        columns = self._fit(_columns(run, [*shown, total(run, everyone)]), width)
        for column in columns:
            if column.key == "rate":
                _draw(run, column, [row.rank for row in shown], self._widths["rate"])
        lines = [self._line(columns, None, "bold")]
        for number, row in enumerate(shown):
            line = self._line(columns, number, "" if row.state in (*GOING, "finished") else "dim")
            at = line.plain.find(row.state)
            line.stylize(STYLES.get(row.state, ""), at, at + len(row.state))
            lines.append(line)
        if rest:
            lines.append(Text(rest, style="dim"))
        return [*lines, self._line(columns, len(shown), "bold")]

    def _fit(self, columns: list[Column], width: int) -> list[Column]:
        """Leave columns out until the others fit; what is drawn takes the room that is left."""
        for column in columns:
            self._widths[column.key] = max(self._widths.get(column.key, 0), column.width)
        self._widths["rate"] = SPARK[0]
        for drop in ("", *DROPPED):
            columns = [column for column in columns if column.key != drop]
            free = width - sum(self._widths[column.key] + len(GAP) for column in columns) + len(GAP)
            if free >= 0:
                self._widths["rate"] += min(free, SPARK[1] - SPARK[0])
                break
        return columns

    def _line(self, columns: list[Column], number: int | None, style: str) -> Text:
        cells = []
        for column in columns:
            cell = column.heading if number is None else column.cells[number]
            wide = self._widths[column.key]
            cells.append(cell.ljust(wide) if column.left else cell.rjust(wide))
        return Text(GAP.join(cells).rstrip(), style=style)


def _columns(run: Run, shown: list[Row]) -> list[Column]:
    scale, unit = 1e3, "kB/s"
    most = max((row.bytes_per_s or 0.0 for row in shown[:-1]), default=0.0)
    if most >= 1e6:
        scale, unit = (1e6, "MB/s") if most < 1e9 else (1e9, "GB/s")
    sent = [None if row.bytes_per_s is None else row.bytes_per_s / scale for row in shown]
    columns = [
        Column("rank", "rank", ["all" if row.rank is None else str(row.rank) for row in shown]),
        Column("state", "state", [row.state for row in shown], left=True),
        Column("steps", "steps", [f"{row.steps:,.0f}" for row in shown]),
        Column("steps/s", "steps/s", numbers([row.steps_per_s for row in shown])),
        Column("rate", "", [""] * len(shown), left=True),
        Column("blocked", "blocked", [share(row.blocked_share) for row in shown]),
        Column("stale", "stale", numbers([row.staleness for row in shown])),
        Column("discrep.", "discrep.", numbers([row.discrepancy for row in shown], 3)),
    ]
    # A strategy has exchanges or merges or neither, hardly ever both.
    if any(row.exchanges for row in shown):
        columns.append(Column("exch.", "exch.", [f"{row.exchanges:,.0f}" for row in shown]))
    if any(row.merges for row in shown):
        columns.append(Column("merges", "merges", [f"{row.merges:,.0f}" for row in shown]))
    columns.append(Column("sent", unit, numbers(sent)))
    columns.append(Column("loss", "loss", numbers([row.loss for row in shown], 4)))
    if any(row.restarts for row in shown):
        columns.insert(2, Column("restarts", "restarts", [str(row.restarts) for row in shown]))
    if len({row.node for row in shown[:-1]}) > 1:
        columns.insert(2, Column("node", "node", [printable(row.node) for row in shown], left=True))
    always = ("state", "steps/s", "rate", "blocked")
    return [one for one in columns if one.key in always or any(cell != "–" for cell in one.cells)]


def _draw(run: Run, column: Column, ranks: list[int | None], cells: int) -> None:
    """Fill in what is drawn: steps per second over time, each row from 0 to its own greatest."""
    last_s = window_s(run)
    words = ("steps/s, whole run", "whole run", "run")
    if last_s is not None:
        words = (f"steps/s, last {last_s:.0f} s", f"last {last_s:.0f} s", f"{last_s:.0f} s")
    column.heading = next((word for word in words if len(word) <= cells), words[-1])
    drawn = history(run, cells)
    column.cells = [spark(drawn.get(rank, [])) for rank in [*ranks, None]]


def spark(values: Sequence[float | None]) -> str:
    """A small drawing, from 0 to the greatest; blank where nothing is known.

    The first and the last part may hold a step and hardly any time: they do not say how high it is drawn.
    """
    inner = [value for value in values[1:-1] if value]
    most = max(inner or [value for value in values if value is not None], default=0.0)
    cells = []
    for value in values:
        if value is None or not math.isfinite(value):
            cells.append(" ")
        else:
            cells.append(BLOCKS[min(7, max(0, round(7 * value / most))) if most > 0 else 0])
    return "".join(cells)


def numbers(values: Sequence[float | None], digits: int = 2) -> list[str]:
    """A column of numbers with the same decimals, so many that the greatest has a few digits."""
    # The last of several is their total, which is greater and needs no decimals of its own.
    usual = [abs(one) for one in values[:-1] or values if one is not None and abs(one) < 1e6]
    before = len(f"{max(usual, default=0.0):.0f}")
    after = max(0, digits + 1 - before)  # from 10 on a digit fewer after the point, from 100 on another
    cells = []
    for value in values:
        if value is None or not math.isfinite(value):
            cells.append("–")
        elif value != 0 and (abs(value) >= 1e6 or abs(value) < 0.5 * 10**-after):
            cells.append(f"{value:.1e}")
        else:
            cells.append(f"{value:,.{after}f}")
    return cells


def clock_time(run: Run, seconds: float) -> str:
    """A time since the run began: 1:05 or 1:02:05; short virtual times as seconds."""
    if run.clock == "virtual" and run.last_s < 600:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: object) -> str:
    """What a file says, on one line and without anything that steers a terminal."""
    return "".join(one if one.isprintable() else " " for one in str(text)).strip()


def status(run: Run) -> str:
    """Whether it goes on, in a word."""
    word = standing(run)
    return {"live": "simulating", "finished": "simulated"}.get(word, word) if run.clock == "virtual" else word


def header(run: Run, width: int, align: int) -> list[Text]:
    """Two lines: what is run and for how long; how far it is. What does not fit is left out, last first."""
    align = min(width, max(align, 60))
    name = printable(run.about.get("name") or run.folder.name)
    strategy, workers = printable(run.about.get("strategy", "")), len(run.ranks)
    left = [name, *([strategy] if strategy else []), f"{workers} worker{'s' * (workers != 1)}"]
    clock = "wall clock" if run.clock == "wall" else "virtual time"
    lasted = clock_time(run, elapsed_s(run))
    right = [f"{status(run)} · {clock} {lasted}", f"{status(run)} · {lasted}"]
    for parts, end in ((left, right[0]), (left, right[1]), (left[:2], right[1]), (left[:1], right[1])):
        begin = " · ".join(parts)
        room = align - cell_len(begin) - len(end)
        if room >= 2:
            break
    else:
        begin, room = begin[: max(0, align - len(end) - 3)] + "…", 2
    first = Text.assemble((begin, "bold"), " " * room, end)
    kept = ""
    for item in _figures(run):
        longer = f"{kept} · {item}" if kept else item
        if len(longer) <= width:
            kept = longer
    return [first, Text(kept)]


def _figures(run: Run) -> list[str]:
    """How far the run is, the most important first."""
    sums = dict(run.totals())
    found = [f"{sums['steps']:,.0f} steps"]
    progress = max((track.value("progress") or 0.0 for track in run.workers.values()), default=0.0)
    measured = [one for one in run.evaluations if one.accuracy is not None or one.loss is not None]
    if measured:
        last = measured[-1]
        best = max((one.accuracy for one in measured if one.accuracy is not None), default=None)
        if last.accuracy is not None:
            found.append(f"accuracy {share(last.accuracy)}")
            if best is not None and best > last.accuracy:
                found.append(f"best {share(best)}")
        if last.loss is not None:
            found.append(f"evaluated loss {numbers([last.loss], 4)[0]}")
    if progress:
        found.append(f"{progress:.2f} passes")
    if run.about.get("target") is not None:
        after_s = reached_s(run)
        after = "" if after_s is None else f" after {short(after_s)} s"
        found.append(f"target {share(run.about['target'])}{after}")
    trouble = Counter[str]()
    for life in (life for track in run.workers.values() for life in track.lives):
        for kind in ("exchanges", "merges"):
            for outcome in ("half", "failed"):
                trouble[f"{kind} {outcome}"] += (life.get(kind) or {}).get(outcome, 0)
        trouble["messages dropped"] += life.get("messages_dropped") or 0
    trouble["lines that cannot be read"] = run.broken
    return found + [f"{what}: {number:,}" for what, number in trouble.items() if number]


def _events(run: Run, most: int) -> list[Text]:
    """The last events, the latest last."""
    skipped = max(0, len(run.events) - most)
    lines = [event_line(run, event) for event in run.events[skipped:]]
    if skipped and most > 2:
        lines[0] = Text(f"… {skipped + 1} earlier events", style="dim")
    return lines


def event_line(run: Run, event: Event) -> Text:
    """When, what, and who noticed."""
    when = clock_time(run, max(0.0, event.time - run.began_s))
    text = printable(event.text or event.what)
    if event.rank is not None:
        known = WORDS.get(event.what, f"worker {{}}: {printable(event.what)}")
        text = known.replace("{}", str(event.rank), 1) + (f": {text}" if event.text else "")
    if event.link:
        text = event.link + (f": {printable(event.text)}" if event.text else "")
    ends = (event.rank,) if event.peer is None else (event.rank, event.peer)
    who = [one for one in event.by if one not in ends]
    by = f" (seen by {_several(who)})" if who else ""
    return Text.assemble((f"{when:>7}  ", "dim"), (text, STYLES.get(event.what, "")), (by, "dim"))


def _several(who: list[int | str]) -> str:
    ranks = sorted(one for one in who if isinstance(one, int))
    names = [printable(one) for one in who if not isinstance(one, int)]
    workers = ", ".join(map(str, ranks)) if len(ranks) <= 5 else f"{len(ranks)} workers"
    return ", ".join([*([workers] if workers else []), *names])


def plain_line(run: Run, width: int | None = None) -> str:
    """All workers in one line, for a log; what does not fit the width is left out, last first."""
    all_rows = rows(run)
    row = total(run, all_rows)
    states = Counter(one.state for one in all_rows)
    parts = [
        clock_time(run, elapsed_s(run)),
        ", ".join(f"{number} {state}" for state, number in states.most_common()),
        f"{row.steps:,.0f} steps",
        f"{numbers([row.steps_per_s])[0]} steps/s",
        f"blocked {share(row.blocked_share)}",
    ]
    if row.staleness is not None:
        parts.append(f"stale {numbers([row.staleness])[0]}")
    if row.exchanges or row.merges:
        many, what = (row.exchanges, "exchanges") if row.exchanges else (row.merges, "merges")
        parts.append(f"{many:,.0f} {what}")
    if row.bytes_per_s is not None:
        parts.append(f"{numbers([row.bytes_per_s / 1e6])[0]} MB/s")
    if row.loss is not None:
        parts.append(f"loss {numbers([row.loss], 4)[0]}")
    while width is not None and len(parts) > 1 and len(GAP.join(parts)) > width:
        parts.pop()
    return GAP.join(parts)
