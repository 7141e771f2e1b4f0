"""A plan as people see it: tables, what to use and why in words; how costs grow, as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from rich.table import Table

from freewheel.numbers import UNKNOWN, given, share, short, speed
from freewheel.planning.forecast import CEILING, Forecast, of
from freewheel.planning.plan import PREFERENCES, TIE, Plan
from freewheel.planning.setting import Setting
from freewheel.show.figures.common import Figure, axis, figure, line, log_axis
from freewheel.show.report import document, places
from freewheel.show.shown import Shown, hues
from freewheel.show.tables import printed

BARS = " ▁▂▃▄▅▆▇█"
BACKWARD = 2 / 3
"""The part of a gradient's time that is the backward pass, roughly: during it DDP can send."""


def setting_in_words(setting: Setting) -> str:
    """One line on what was planned for."""
    links = f"links of {speed(setting.link_mbit)} and {short(setting.latency_ms)} ms"
    where = "on one machine" if setting.alone else f"on {setting.nodes} machines, {links}"
    slow = [f"worker {rank} {given(factor)} times slower" for rank, factor in setting.slow.items()]
    slow += [
        f"worker {rank}'s link {given(factor)} times slower" for rank, factor in setting.slow_link.items()
    ]
    jitter = [f"steps vary by {share(setting.jitter, 0)}"] if setting.jitter else []
    model = f"a model of {short(setting.model_mb)} MB, {short(setting.compute_ms)} ms a gradient"
    return ", ".join([f"{setting.workers} workers {where}", model, *slow, *jitter]) + "."


def recommendation(plan: Plan, script: Sequence[str]) -> list[str]:
    """Paragraphs; the lines to copy are indented."""
    best = plan.recommended
    ceiling = of(plan.forecasts, CEILING)
    others = [one for one in plan.forecasts if one.name not in (CEILING, best.name)]
    lines = [f"Use {best.strategy}. {_reason(plan)}"]
    ahead = [one for one in others if one.useful_steps_per_s > best.useful_steps_per_s]
    lines += [_passed_over(one, best) for one in ahead]
    alike = [
        one.strategy
        for one in others
        if one not in ahead and one.useful_steps_per_s >= (1 - TIE) * best.useful_steps_per_s
    ]
    if alike:
        lines.append(f"As good within {share(TIE, 0)}: {', '.join(alike)}.")
    if ceiling is not None and best.steps_per_s < 0.5 * ceiling.steps_per_s:
        lines.append(
            f"Even so, workers compute for {share(1 - best.idle_share, 0)} of the time: this network is "
            "too slow for this model."
        )
    lines += ["In the script:", f"    {plan.attach_line}"]
    where = ", on a Ray cluster of these machines (torchrun and Slurm: docs/ENGINES.md)"
    return [*lines, f"To start it{'' if plan.setting.alone else where}:", f"    {plan.run_line(script)}"]


def _passed_over(one: Forecast, best: Forecast) -> str:
    """Why a strategy is not recommended that the table ranks higher."""
    more = one.useful_steps_per_s / best.useful_steps_per_s - 1
    far = "less than 1 %" if more < 0.01 else share(more, 0)
    reasons = (words.format(one) for asks, words in PREFERENCES if asks(best) < asks(one))
    why = next(reasons, "asks no more of you")
    return (
        f"{one.strategy} is {far} ahead; less than {share(TIE, 0)} a plan cannot tell apart, and "
        f"{best.name} {why}."
    )


def _reason(plan: Plan) -> str:
    best = plan.recommended
    sync = of(plan.forecasts, "allreduce")
    said = f"It makes {short(best.steps_per_s)} worker-steps/s, {share(best.ideal_share, 0)} of the ideal"
    if best.steps_needed > 1.005:
        said += f", and needs {best.steps_needed:.2f} of them for one of synchronous SGD"
    if best.name == "allreduce":
        return f"{said}; PyTorch's DDP does the same."
    if sync is not None:
        times = best.useful_steps_per_s / sync.useful_steps_per_s
        said += f": {short(times, 2)} times as fast as allreduce in all"
    return f"{said}."


def about_ddp(plan: Plan) -> str | None:
    """What is known of DDP: allreduce, which sends during the backward pass where there is time."""
    sync = of(plan.forecasts, "allreduce")
    if sync is None:
        return None
    step_s = plan.setting.workers / sync.steps_per_s
    hidden_s = min(plan.setting.merge_s, BACKWARD * plan.setting.grad_s)
    best = plan.setting.workers / max(step_s - hidden_s, plan.setting.grad_s)
    return (
        f"PyTorch's DDP is allreduce; if all it can send during the backward pass is hidden, "
        f"{short(best)} instead of {short(sync.steps_per_s)} steps/s."
    )


def what_would_change(plan: Plan) -> list[str]:
    """One line for each thing that might be different."""
    return [
        f"With {one.change}: {'' if one.changes else 'still '}{one.strategy} "
        f"({short(one.useful_steps_per_s)} useful steps/s)."
        for one in plan.what_if
    ]


# -- tables, no wider than 80 columns unless there is more room --


Text = Callable[[Forecast], str]

SPEEDS: dict[str, Text] = {
    "strategy": lambda one: one.strategy,
    "useful/s": lambda one: UNKNOWN if one.name == CEILING else short(one.useful_steps_per_s, 4),
    "steps/s": lambda one: short(one.steps_per_s, 4),
    "of ideal": lambda one: share(one.ideal_share),
    "idle": lambda one: share(one.idle_share),
    "MB/step": lambda one: short(one.bytes_per_step / 1e6),
}
"""What each strategy reaches."""
COSTS: dict[str, Text] = {
    "strategy": lambda one: one.name,
    "stale": lambda one: short(one.staleness_mean),
    "discrep.": lambda one: short(one.discrepancy, 2) + ("↑" if one.grows else " "),
    "needs": lambda one: UNKNOWN if one.name == CEILING else f"×{one.steps_needed:.2f}",
    "cost in convergence": lambda one: one.why,
}
"""What its steps are worth, and why."""


def forecast_table(forecasts: Sequence[Forecast], columns: dict[str, Text]) -> Table:
    """A row for each strategy; long words are folded."""
    words = [at for at, head in enumerate(columns) if head in ("strategy", "cost in convergence")]
    table = printed(list(columns), [[text(one) for text in columns.values()] for one in forecasts], words)
    for at in words[1:]:
        table.columns[at].no_wrap, table.columns[at].overflow = False, "fold"
    return table


def growth(grown: dict[int, list[Forecast]]) -> Table:
    """Useful steps as a share of the ideal, for each number of workers, and a line of blocks."""
    names = dict.fromkeys(one.name for size in (max(grown), *grown) for one in grown[size])
    rows = []
    for name in names:
        every = [of(found, name) for found in grown.values()]
        shares = [None if one is None else one.useful_share for one in every]
        blocks = "".join(" " if part is None else BARS[max(1, round(8 * part))] for part in shares)
        rows.append((name, *map(share, shares), blocks))
    return printed(("strategy", *map(str, grown), ""), rows)


Value = Callable[[Forecast], float | None]

FIGURES: dict[str, tuple[str, bool, Value]] = {
    "Useful steps per second": (
        "worker-steps/s over the steps needed for one of synchronous SGD",
        True,
        lambda one: None if one.name == CEILING else one.useful_steps_per_s,
    ),
    "Share of the ideal": (
        "useful steps over the rate at which nobody ever waits",
        False,
        lambda one: one.useful_share,
    ),
    "Idle": ("share of worker-time in which no gradient is computed", False, lambda one: one.idle_share),
    "MB per step": (
        "sent by a worker for each of its steps",
        True,
        lambda one: one.bytes_per_step / 1e6 or None,
    ),
    "Discrepancy": ("largest distance of two workers, in updates", True, lambda one: one.discrepancy or None),
    "Steps needed": (
        "worker-steps for one of synchronous SGD",
        True,
        lambda one: None if one.name == CEILING else one.steps_needed,
    ),
}
"""By title: what is drawn, whether on a logarithmic axis, and the value."""


def html(grown: dict[int, list[Forecast]], title: str, command: str) -> str:
    """The page, in the style of a report."""
    strategies = list(dict.fromkeys(one.name for found in reversed(grown.values()) for one in found))
    curves = [
        Shown(strategy, place, hue)
        for place, (strategy, hue) in enumerate(zip(strategies, hues(strategies), strict=True))
    ]
    figures = {str(at): _figure(grown, curves, heading) for at, heading in enumerate(FIGURES)}
    command = f'<pre class="command"><code>{escape(command)}</code></pre>'
    return document(title, command + places("By number of workers", curves, figures), figures)


def _figure(grown: dict[int, list[Forecast]], curves: list[Shown], heading: str) -> Figure:
    said, log, value = FIGURES[heading]
    sizes = list(grown)
    data = []
    for curve in curves:
        by_size = [of(found, curve.label) for found in grown.values()]
        values = [None if one is None else value(one) for one in by_size]
        data.append(line(curve, "", "%{x} workers: %{y:.3~g}", x=sizes, y=values, mode="lines+markers"))
    workers = {"title": {"text": "workers"}, "type": "log", "tickvals": sizes}
    upwards = log_axis("", data) if log else axis("")
    return figure(heading, said, 340, data, xaxis=workers, yaxis=upwards)
