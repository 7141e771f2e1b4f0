"""A run as lines of text that fit a terminal: a header, a table of workers, the last events."""

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from freewheel.numbers import UNKNOWN, column, count, share, short
from freewheel.records.events import Event
from freewheel.records.run import Run
from freewheel.show.rates import elapsed_s, standing, trouble
from freewheel.show.rows import GOING, Column, columns, history, most_telling, printable, rows, total
from freewheel.show.shown import EVENTS

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = str.maketrans(BLOCKS + "·–…×", "_.,-=+*#|-~x")
SPARK = (6, 24)  # least and greatest width of the drawing
GAP = "  "
# Columns of which a line for a log gives the totals.
SUMMED = ("steps", "steps/s", "waiting", "stale", "exch.", "merges", "MB/s", "loss")
STYLES = {"training": "green", "joining": "cyan", "finished": "blue", "dead": "bold red", "silent": "yellow"}
# Columns in the order in which a narrow terminal drops them; `60 s` and `run` are drawings.
DROPPED = ("steps", "exch.", "merges", "restarts", "MB/s", "node", "stale", "60 s", "run", "discrep.",
           "waiting", "loss", "state")  # fmt: skip


def screen(
    run: Run, width: int, height: int | None = None, *, note: str = "", ascii_only: bool = False
) -> list[Text]:
    room = height or 10_000
    gap = [Text()] if room >= 18 else []
    most = max(1, min(20, room // 4))
    skipped = max(0, len(run.events) - most)
    events = [event_line(run, event) for event in run.events[skipped:]]
    if skipped and most > 2:
        events[0] = Text(f"… {skipped + 1} earlier events", style="dim")
    above = [*header(run, width), *([Text(note, style="dim")] if note else []), *gap]
    below = [*gap, *events] if events else []
    lines = [*above, *_table(run, width, max(1, room - len(above) - len(below) - 2)), *below][:height]
    for line in lines:
        if ascii_only:
            line.plain = line.plain.translate(ASCII).encode("ascii", "replace").decode()
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
        line.no_wrap = True
    return lines


def _table(run: Run, width: int, room: int) -> list[Text]:
    everyone = rows(run)
    shown, rest = everyone, []
    if len(everyone) > room:
        shown = most_telling(everyone, max(1, room - 1))
        left = Counter(row.state for row in everyone if row not in shown)
        states = ", ".join(f"{number} {state}" for state, number in left.most_common())
        rest = [Text(f"… {left.total()} more: {states}", style="dim")]
    found = [one for one in columns([*shown, total(run, everyone)]) if one.key != "windows"]
    drawn = Column("60 s" if run.live and run.clock == "wall" else "run", [" " * SPARK[0]], [])
    found.insert(1 + [one.key for one in found].index("steps/s"), drawn)
    for drop in ("", *DROPPED):
        found = [one for one in found if one.key != drop]
        free = width + len(GAP) - sum(max(map(len, (one.key, *one.cells))) + len(GAP) for one in found)
        if free >= 0:
            break
    past = history(run, min(SPARK[1], SPARK[0] + max(0, free)))
    speeds = [past.get(row.rank, []) for row in shown]
    top = max(map(_peak, speeds), default=0.0)  # one scale for all: slow workers are low
    drawn.cells = [*(spark(one, top) for one in speeds), spark(past.get(None, []))]
    cells = [[one.key, *one.cells] for one in found]
    sides = [str.ljust if one.key in ("state", "node", "60 s", "run") else str.rjust for one in found]
    wide = [[side(one, max(map(len, of))) for one in of] for side, of in zip(sides, cells, strict=True)]
    head, *texts, whole = [GAP.join(line).rstrip() for line in zip(*wide, strict=True)]
    lines = [Text(head, style="bold")]
    for row, text in zip(shown, texts, strict=True):
        line = Text(text, style="" if row.state in (*GOING, "finished") else "dim")
        at = text.find(row.state)
        line.stylize(STYLES.get(row.state, ""), at, at + len(row.state))
        lines.append(line)
    return [*lines, *rest, Text(whole, style="bold")]


def _peak(values: Sequence[float | None]) -> float:
    """The first and last part do not count: they may hold a step in hardly any time."""
    inner = [value for value in values[1:-1] if value]
    return max(inner or [value for value in values if value is not None], default=0.0)


def spark(values: Sequence[float | None], top: float | None = None) -> str:
    """A bar of blocks from 0 to `top`, or to the peak; blank where nothing is known."""
    most = _peak(values) if top is None else top
    heights = [None if value is None else min(7, round(7 * value / (most or 1.0))) for value in values]
    return "".join(" " if height is None else BLOCKS[height] for height in heights)


def clock_time(run: Run, seconds: float) -> str:
    """1:05 or 1:02:05; short virtual times in seconds."""
    if run.clock == "virtual" and run.last_s < 600:
        return f"{short(seconds)} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def header(run: Run, width: int) -> list[Text]:
    """Two lines: the run and its time; its progress, the most important first."""
    names = (run.about.get("name") or run.folder.name, run.about.get("strategy", ""))
    begin = " · ".join([*filter(None, map(printable, names)), count(len(run.ranks), "worker")])
    status, clock = standing(run), "wall clock"
    if run.clock == "virtual":
        status, clock = {"live": "simulating", "finished": "simulated"}.get(status, status), "virtual time"
    end = f"{status} · {clock} {clock_time(run, elapsed_s(run))}"
    room = min(width, 80) - len(end) - len(GAP)
    first = Text(begin, style="bold")
    first.truncate(max(0, room), overflow="ellipsis", pad=True)
    found = [f"{run.total('steps'):,.0f} steps"]
    measured = [one for one in run.evaluations if one.keys() & {"accuracy", "loss"}]
    accuracies = [one["accuracy"] for one in measured if "accuracy" in one]
    if accuracies:
        found.append(f"accuracy {share(accuracies[-1])}, best {share(max(accuracies))}")
    if measured and "loss" in measured[-1]:
        found.append(f"evaluated loss {column([measured[-1]['loss']], 4)[0]}")
    if progress := max((track.value("progress") or 0.0 for track in run.workers.values()), default=0.0):
        found.append(f"{progress:.2f} passes")
    if (target := run.about.get("target")) is not None:
        reached = (one["time"] for one in measured if one.get("accuracy", 0.0) >= target > 0)
        after_s = next(reached, run.began_s) - run.began_s
        found.append(f"target {share(target)}" + (f" after {short(after_s)} s" if after_s > 0 else ""))
    broken = [f"lines that cannot be read: {run.broken:,}"] if run.broken else []
    said = " · ".join([*found, *trouble(run.lives), *broken])
    return [Text.assemble(first, GAP, end), Text(said)]


def event_line(run: Run, event: Event) -> Text:
    when, said = clock_time(run, max(0.0, event.time - run.began_s)), printable(event.text)
    text, kind = said or printable(event.what), EVENTS.get(event.what)
    if event.rank is not None:
        about = f"worker {event.rank}" + (f" {kind.words}" if kind else f": {printable(event.what)}")
        text = (event.link or about) + (f": {said}" if event.text else "")
    by = event.noticed_by((event.rank, event.peer))
    seen = f" (seen by {printable(by)})" if by else ""
    return Text.assemble((f"{when:>7}  ", "dim"), (text, kind.colour if kind else ""), (seen, "dim"))


def plain_line(run: Run) -> str:
    everyone = rows(run)
    states = Counter(one.state for one in everyone)
    sums = columns([*everyone, total(run, everyone)])
    said = ", ".join(f"{number} {state}" for state, number in states.most_common())
    told = [f"{one.key} {one.cells[-1]}" for one in sums if one.key in SUMMED and one.cells[-1] != UNKNOWN]
    return GAP.join([clock_time(run, elapsed_s(run)), said, *told])
