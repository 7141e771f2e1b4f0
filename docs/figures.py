"""Draw the figures of the pages: ``python docs/figures.py``, into docs/pictures.

All but one are drawn from simulated runs, which are the same everywhere; the chart of README is drawn from
a table of docs/benchmarks. The screenshots beside them are by benchmarks/pictures.py.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import freewheel as fw
from freewheel.records.run import Run
from freewheel.show import shown as palette
from freewheel.show.replay import LABELS, html
from freewheel.strategies import ALL

DOCS = Path(__file__).parent
FOLDER = DOCS / "pictures"
WORKERS, SLOW = 6, 5
STRAGGLER = fw.Compute(ms=50, kind="lognormal", spread=0.1, slow={0: SLOW})
COMPUTING, SLOWLY, WAITING, MEETING, LINE = "#3b82f6", "#f0791e", "#f4c9c0", "#1e3a8a", "#e2e5ea"
INK, PALE = "#1b2230", "#667085"
OWN = {name: palette.COLOURS[hue] for name, hue in palette.OWN.items()}
BASELINE = OWN["ddp"]
COLOURS = ("#2f7ef5", "#16996a", "#9254de", "#0e7490", "#c0267a", "#4d5b70")
"""Of curves. Orange is the straggler's alone."""
RARE = ("hierarchical_sasgd", "nodelay", "sasgd")
OFTEN_S, RARE_S = (1.0, 2.0), (1.0, 5.0)
"""Which seconds of a run lanes show: those who meet rarely are shown for longer."""
FONT = "system-ui,'DejaVu Sans',sans-serif"


class Drawing:
    """An SVG on a white card, so that it reads on light and dark pages."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self.parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, colour: str, **more: str) -> None:
        """A box."""
        self._add("rect", x=x, y=y, width=max(0.0, width), height=height, fill=colour, **more)

    def line(self, *points: tuple[float, float], colour: str = LINE, width: float = 1.0, **more: str) -> None:
        """Through all points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polyline", points=path, fill="none", stroke=colour, stroke_width=width, **more)

    def dot(self, x: float, y: float, radius: float, colour: str, **more: str) -> None:
        """A disc."""
        self._add("circle", cx=x, cy=y, r=radius, fill=colour, **more)

    def text(self, x: float, y: float, words: str, size: float = 12, colour: str = INK, **more: str) -> None:
        """Words; anchor= says where x lies in them."""
        self._add("text", words, x=x, y=y, font_size=size, fill=colour, **more)

    def _add(self, kind: str, words: str | None = None, **given: Any) -> None:
        given = {"text-anchor" if key == "anchor" else key.replace("_", "-"): v for key, v in given.items()}
        shown = {
            key: f"{v:.1f}".removesuffix(".0") if isinstance(v, float) else v for key, v in given.items()
        }
        inside = "/>" if words is None else f">{escape(words)}</{kind}>"
        self.parts.append(" ".join([f"<{kind}", *(f'{k}="{v}"' for k, v in shown.items())]) + inside)

    def svg(self) -> str:
        """The file."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">'
            f"<title>{escape(self.label)}</title>"
            f'<rect x="0.5" y="0.5" width="{self.width - 1:g}" height="{self.height - 1:g}" rx="8" '
            f'fill="#fff" stroke="{LINE}"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


@cache
def played(strategy: str, steps: int = 110, task: str = "digits", **settings: Any) -> dict[str, Any]:
    """A simulated run as a replay plays it, and its result."""
    with tempfile.TemporaryDirectory() as spare:
        given = {"workers": WORKERS, "compute": STRAGGLER, "model_mb": 2.0, "steps": steps} | settings
        result = fw.simulate(strategy, task, folder=spare, evaluations=40, **given)
        found = re.search(r'type="application/json">(.*?)</script>', html([Run(Path(spare))], ""))
    assert found
    (run,) = json.loads(found[1])["runs"]
    return {**run, "result": result}


def lanes(drawing: Drawing, run: dict[str, Any], box: tuple[float, ...], span: tuple[float, float]) -> None:
    """Who computes and who waits, and who meets whom, one lane for each worker."""
    left, top, width, height = box
    begin, end = span
    row = height / len(run["spans"])

    def x(at: float) -> float:
        return left + width * (min(max(at, begin), end) - begin) / (end - begin)

    def y(rank: int) -> float:
        return top + row * (rank + 0.5)

    for rank, spans in enumerate(run["spans"]):
        drawing.text(left - 8, y(rank) + 4, str(rank), 11, PALE, anchor="end")
        drawing.rect(left, top + row * rank + 2, width, row - 5, WAITING)
        for a, b in zip(spans[::2], spans[1::2], strict=True):
            if b > begin and a < end:
                colour = SLOWLY if rank == 0 else COMPUTING
                drawing.rect(x(a), top + row * rank + 2, x(b) - x(a) - 1, row - 5, colour)
    for at, took, members in run["meetings"]:
        if not begin < at + took < end:
            continue
        ends = [(x(at + took), y(one)) for one in members]
        if len(members) == 2:
            drawing.line(*ends, colour=MEETING, width=1.4)
        else:
            drawing.rect(x(at), y(min(members)), max(2.0, x(at + took) - x(at)),
                         y(max(members)) - y(min(members)), MEETING, opacity="0.35")  # fmt: skip
        for one in ends:
            drawing.dot(*one, 2.6, MEETING)
    drawing.text(left + width, top + height + 14, f"{end - begin:.2g} s", 11, PALE, anchor="end")


def legend(drawing: Drawing, x: float, y: float, meeting: str = "exchange or merge") -> None:
    """What colours mean."""
    shown = ((COMPUTING, "computing a gradient"), (SLOWLY, "the same, slow worker"), (WAITING, "waiting"))
    for colour, words in shown:
        drawing.rect(x, y - 9, 10, 10, colour)
        drawing.text(x + 15, y, words, 11, PALE)
        x += 26 + 6.1 * len(words)
    drawing.dot(x + 5, y - 4, 3.5, MEETING)
    drawing.text(x + 15, y, meeting, 11, PALE)


def axes(
    drawing: Drawing, box: tuple[float, ...], ticks: Sequence[tuple[float, str]], end: str, words: str
) -> None:
    """Lines across at shares of the height, and what lies to the right."""
    left, top, width, height = box
    for share, label in ticks:
        y = top + height * (1 - share)
        drawing.line((left, y), (left + width, y))
        drawing.text(left - 6, y + 4, label, 11, PALE, anchor="end")
    drawing.text(left, top + height + 14, "0", 11, PALE)
    drawing.text(left + width, top + height + 14, end, 11, PALE, anchor="end")
    drawing.text(left, top - 8, words, 12)


def curve(
    drawing: Drawing, box: tuple[float, ...], points: Sequence[tuple[float, float]], colour: str, **more: str
) -> None:
    """Points from 0 to 1 in both directions."""
    left, top, width, height = box
    inside = [(left + width * x, top + height * (1 - y)) for x, y in points if 0 <= x <= 1]
    drawing.line(*inside, colour=colour, width=2.2, stroke_linejoin="round", **more)


def strategy(name: str) -> Drawing:
    """What a strategy does beside what it reaches, with one slow worker."""
    drawing = Drawing(860, 250, f"{name}: six workers, one of them five times slower")
    run, base = played(name), played("allreduce")
    drawing.text(20, 24, "Six workers, worker 0 five times slower", 13, font_weight="600")
    lanes(drawing, run, (34, 36, 430, 168), RARE_S if name in RARE else OFTEN_S)
    legend(drawing, 34, 238)
    box, until = (530, 40, 300, 164), 6.0
    axes(drawing, box, [(0, "0 %"), (0.5, "50 %"), (1, "100 %")], f"{until:g} s", "Accuracy over time")
    own = [(name, run, OWN.get(name, COLOURS[2]))] if name != "allreduce" else []
    drawn = [("allreduce", base, BASELINE), *own]
    for place, (label, one, colour) in enumerate(drawn):
        curve(drawing, box, [(at / until, share) for at, share in one["accuracy"]], colour)
        drawing.text(box[0] + box[2] - 6, box[1] + box[3] - 10 - 16 * place, label, 12, colour, anchor="end")
    return drawing


def waiting() -> Drawing:
    """The same six workers, with AllReduce and with AD-PSGD."""
    drawing = Drawing(860, 232, "AllReduce waits for its slow worker, AD-PSGD does not")
    shown = (("allreduce", "AllReduce (what DDP does)"), ("adpsgd", "AD-PSGD"))
    for place, (name, words) in enumerate(shown):
        run, left = played(name), 34 + 415 * place
        idle = f"{100 * run['result'].idle_share:.0f} % of the time spent waiting"
        drawing.text(left - 14, 24, words, 13, font_weight="600")
        drawing.text(left + 385, 24, idle, 12, PALE, anchor="end")
        lanes(drawing, run, (left, 34, 385, 150), OFTEN_S)
    legend(drawing, 34, 220)
    return drawing


def averaging() -> Drawing:
    """Weights of workers who only average with one other at a time: they meet at the mean."""
    drawing = Drawing(860, 230, "Pairwise averaging brings all replicas to their mean")
    values = [0.95, 0.8, 0.65, 0.4, 0.2, 0.05]
    ring = [(0, 1), (4, 5), (2, 3), (1, 2), (3, 4), (5, 0)]
    order = [*ring[:2], *ring, *ring, *ring]
    box = (60, 40, 770, 150)
    mean = sum(values) / len(values)
    traces = [[(0.0, value)] for value in values]
    meetings = []
    for number, (a, b) in enumerate(order):
        at = (number + 1) / (len(order) + 1)
        for one in (a, b):
            traces[one].append((at, values[one]))
        meetings.append((at, values[a], values[b]))
        values[a] = values[b] = (values[a] + values[b]) / 2
        for one in (a, b):
            traces[one].append((at, values[one]))
    axes(drawing, box, [(0, ""), (1, "")], "exchanges", "One weight of six workers that average in pairs")
    curve(drawing, box, [(0, mean), (1, mean)], PALE, stroke_dasharray="5 4")
    for rank, trace in enumerate(traces):
        curve(drawing, box, [*trace, (1.0, trace[-1][1])], COLOURS[rank])
    for at, low, high in meetings:
        x = box[0] + box[2] * at
        drawing.line(*((x, box[1] + box[3] * (1 - y)) for y in (low, high)), colour=MEETING, width=1.2)
    drawing.text(60, 218, "Dashed: their mean, which no exchange changes. Vertical: an exchange.", 11, PALE)
    return drawing


def staleness() -> Drawing:
    """A gradient that others' updates overtake."""
    drawing = Drawing(860, 200, "Staleness: updates that came while a gradient was computed")
    said = "Worker 0 computes a gradient on weights that others change meanwhile"
    drawing.text(20, 26, said, 13, font_weight="600")
    rows = {"worker 0": 60, "the model": 110, "others": 160}
    for words, y in rows.items():
        drawing.text(90, y + 4, words, 12, PALE, anchor="end")
        drawing.line((105, y), (835, y))
    drawing.rect(150, 48, 420, 24, SLOWLY)
    drawing.text(360, 64, "gradient on version 1", 12, "#fff", anchor="middle")
    moments = (150, 260, 370, 480, 570)
    for version, x in enumerate(moments, 1):
        drawing.dot(x, 110, 11, COLOURS[0] if version < 5 else SLOWLY)
        drawing.text(x, 114, str(version), 12, "#fff", anchor="middle")
    drawing.line((150, 99), (150, 72), colour=SLOWLY, width=2)
    for x in moments[1:4]:
        drawing.rect(x - 95, 148, 90, 24, COMPUTING)
        drawing.line((x - 5, 160), (x, 121), colour=COMPUTING, width=2)
    drawing.line((570, 72), (570, 99), colour=SLOWLY, width=2)
    drawing.text(592, 102, "added to version 4:", 12)
    drawing.text(592, 120, "staleness 3", 12, font_weight="600")
    return drawing


def consensus() -> Drawing:
    """How far replicas are from their mean, by strategy."""
    drawing = Drawing(860, 250, "Consensus distance over training")
    box, names = (60, 40, 560, 176), ("adpsgd:topology=ring", "adpsgd", "nodelay_free", "sasgd:interval=16")
    runs = {name: played(name, steps=60, model_mb=0.2)["result"] for name in names}
    points = {
        name: [(one.worker_steps, math.sqrt(one.consensus)) for one in run.curve]
        for name, run in runs.items()
    }
    most = max(y for some in points.values() for _, y in some)
    steps = max(x for some in points.values() for x, _ in some)
    axes(drawing, box, [(0, "0"), (1, f"{most:.2f}")], f"{steps} steps of all workers",
         "Consensus distance: root mean square of |x − mean| over workers")  # fmt: skip
    for place, (name, some) in enumerate(points.items()):
        curve(drawing, box, [(x / steps, y / most) for x, y in some], COLOURS[place])
        drawing.rect(650, 60 + 26 * place, 12, 12, COLOURS[place])
        drawing.text(668, 70 + 26 * place, name, 12)
    return drawing


def table(page: str, name: str) -> list[list[str]]:
    """The rows of the table that a page gives to this chart."""
    found = re.search(rf"<!-- {name}, drawn by docs/figures.py -->\n((?:\|.*\n)+)", (DOCS / page).read_text())
    assert found, f"{page} has no table {name}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()[2:]]


def straggler() -> Drawing:
    """How long CIFAR-10 takes with one slow worker, from a table of docs/benchmarks."""
    title = "Time to 85.5 % accuracy, one of 4 workers 5× slower"
    drawing = Drawing(640, 236, f"{title}: DDP 175 s, AD-PSGD 47 s")
    drawing.text(20, 38, title, 19.5, font_weight="600")
    rows = [
        (row[0], float(row[1].removesuffix(" s")), row[3]) for row in table("benchmarks/real.md", "straggler")
    ]
    longest, first = max(s for _, s, _ in rows), rows[0][1]
    for place, (name, seconds, end) in enumerate(rows):
        y, width = 60 + 70 * place, 480 * seconds / longest
        drawing.text(
            120, y + 35, LABELS.get(name, name.partition(" ")[0]), 20, anchor="end", font_weight="600"
        )
        drawing.rect(132, y, width, 56, COLOURS[0] if place else BASELINE, rx="4")
        after, colour = (width + 12, INK) if place else (14, "#fff")
        sooner = f": {first / seconds:.1f}× sooner" if place else ""
        drawing.text(132 + after, y + 25, f"{seconds:.0f} s{sooner}", 21, colour, font_weight="600")
        drawing.text(132 + after, y + 47, f"ends at {end}", 17, colour)
    drawing.text(20, 220, "CIFAR-10, ResNet-20, 30 epochs; real processes on one H200, DDP on gloo", 15, PALE)
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    one.__name__: one for one in (waiting, averaging, staleness, consensus, straggler)
}
FIGURES |= {f"strategies/{name}": lambda name=name: strategy(name) for name in ALL}  # type: ignore[misc]


if __name__ == "__main__":
    (FOLDER / "strategies").mkdir(exist_ok=True)
    for figure in sys.argv[1:] or FIGURES:
        (FOLDER / f"{figure}.svg").write_text(FIGURES[figure]().svg())
