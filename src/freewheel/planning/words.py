"""A plan as people see it: tables, the recommendation in words, and how costs grow as an HTML file."""

from collections.abc import Callable, Sequence
from html import escape

from rich.table import Table

from freewheel.numbers import UNKNOWN, share, short, speed
from freewheel.planning.forecast import CEILING, Forecast, of
from freewheel.planning.plan import TIE, Plan
from freewheel.planning.setting import Setting
from freewheel.show.figures import Figure, axis, figure, line
from freewheel.show.report import document, places
from freewheel.show.shown import Shown, hues
from freewheel.show.tables import printed


def setting_in_words(setting: Setting) -> str:
    links = f"links of {speed(setting.link_mbit)} and {short(setting.latency_ms)} ms"
    where = "on one machine" if setting.alone else f"on {setting.nodes} machines, {links}"
    slow = [f"worker {rank} {short(factor)} times slower" for rank, factor in setting.slow.items()]
    slow += [f"worker {rank}'s link {short(one)} times slower" for rank, one in setting.slow_link.items()]
    slow += [f"steps vary by {share(setting.jitter, 0)}"] if setting.jitter else []
    model = f"a model of {short(setting.model_mb)} MB, {short(setting.compute_ms)} ms a gradient"
    return ", ".join([f"{setting.workers} workers {where}", model, *slow]) + "."


def recommendation(plan: Plan, script: Sequence[str]) -> list[str]:
    """Paragraphs; the lines to copy are indented."""
    best, sync = plan.recommended, of(plan.forecasts, "allreduce")
    said = (
        f"Use {best.strategy}. It makes {short(best.steps_per_s)} worker-steps/s, "
        f"{share(best.ideal_share, 0)} of the ideal, and needs {best.steps_needed:.2f} of them for one of "
        "synchronous SGD"
    )
    if best.name == "allreduce":
        said += "; PyTorch's DDP does the same"
    elif sync is not None:
        times = best.useful_steps_per_s / sync.useful_steps_per_s
        said += f": {short(times, 2)} times as fast as allreduce in all, which is what PyTorch's DDP does"
    enough = (1 - TIE) * best.useful_steps_per_s
    others = [one for one in plan.forecasts if one.name != CEILING and one is not best]
    alike = [one.strategy for one in others if one.useful_steps_per_s >= enough]
    tie = [f"As good within {share(TIE, 0)}, but asking more of you: {', '.join(alike)}."] if alike else []
    where = "" if plan.setting.alone else ", on a Ray cluster of these machines (others: docs/ENGINES.md)"
    return [
        f"{said}.",
        *tie,
        "In the script:",
        f"    {plan.attach_line}",
        f"To start it{where}:",
        f"    {plan.run_line(script)}",
    ]


def what_would_change(plan: Plan) -> list[str]:
    return [
        f"With {one.change}: {'' if one.changes else 'still '}{one.strategy} "
        f"({short(one.useful_steps_per_s)} useful steps/s)."
        for one in plan.what_if
    ]


Text = Callable[[Forecast], str]
# Columns of two tables: what each strategy reaches; what its steps are worth, and why.
SPEEDS: dict[str, Text] = {
    "strategy": lambda one: one.strategy,
    "useful/s": lambda one: UNKNOWN if one.name == CEILING else short(one.useful_steps_per_s, 4),
    "steps/s": lambda one: short(one.steps_per_s, 4),
    "of ideal": lambda one: share(one.ideal_share),
    "idle": lambda one: share(one.idle_share),
    "MB/step": lambda one: short(one.bytes_per_step / 1e6),
}
COSTS: dict[str, Text] = {
    "strategy": lambda one: one.name,
    "stale": lambda one: short(one.staleness_mean),
    "discrep.": lambda one: short(one.discrepancy, 2) + ("↑" if one.grows else " "),
    "needs": lambda one: UNKNOWN if one.name == CEILING else f"×{one.steps_needed:.2f}",
    "cost in convergence": lambda one: one.why,
}


def forecast_table(forecasts: Sequence[Forecast], columns: dict[str, Text]) -> Table:
    """A row for each strategy; the last column is folded where there is no room."""
    rows = [[text(one) for text in columns.values()] for one in forecasts]
    table = printed(list(columns), rows, (0, len(columns) - 1) if columns is COSTS else (0,))
    table.columns[-1].no_wrap = False
    return table


def growth(grown: dict[int, list[Forecast]]) -> Table:
    """Useful steps as a share of the ideal, for each number of workers."""
    rows = []
    for name, found in _by_name(grown).items():
        rows.append((name, *(share(one.useful_share) if one else UNKNOWN for one in found)))
    return printed(("strategy", *map(str, grown)), rows)


def _by_name(grown: dict[int, list[Forecast]]) -> dict[str, list[Forecast | None]]:
    names = dict.fromkeys(one.name for size in (max(grown), *grown) for one in grown[size])
    return {name: [of(forecasts, name) for forecasts in grown.values()] for name in names}


# Figures by field of a forecast: title, and what it shows.
FIGURES = {
    "useful_steps_per_s": ("Useful steps per second", "what the ranking is by"),
    "useful_share": ("Share of the ideal", "useful steps over the rate at which nobody ever waits"),
    "idle_share": ("Idle", "share of worker-time in which no gradient is computed"),
    "bytes_per_step": ("Bytes per step", "sent by a worker for each of its steps"),
    "discrepancy": ("Discrepancy", "largest distance of two workers, in updates"),
    "steps_needed": ("Steps needed", "worker-steps for one of synchronous SGD"),
}


def html(grown: dict[int, list[Forecast]], title: str, command: str) -> str:
    by_name = _by_name(grown)
    names = [name for name in by_name if name != CEILING]
    curves = [Shown(*one) for one in zip(names, range(len(names)), hues(names), strict=True)]
    workers = {"title": {"text": "workers"}, "type": "log", "tickvals": list(grown)}
    figures: dict[str, Figure] = {}
    for at, (field, (heading, said)) in enumerate(FIGURES.items()):
        data = []
        for curve in curves:
            values = [None if one is None else getattr(one, field) for one in by_name[curve.label]]
            data.append(line(curve, "%{x} workers: %{y:.3~s}", list(grown), values))
        figures[str(at)] = figure(heading, said, 340, data, xaxis=workers, yaxis=axis("", "~s"))
    command = f'<pre class="command"><code>{escape(command)}</code></pre>'
    return document(title, command + places("By number of workers", curves, figures), figures)
