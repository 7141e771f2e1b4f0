"""A plan as the terminal shows it: tables, what to use, why, how to start it, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from freewheel.numbers import UNKNOWN, given, share, short, speed
from freewheel.planning.forecast import CEILING, Forecast, of
from freewheel.planning.plan import PREFERENCES, TIE, Plan
from freewheel.planning.setting import Setting
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


def speeds(forecasts: Sequence[Forecast]) -> Table:
    """What each strategy reaches."""
    rows = [
        (
            one.strategy,
            UNKNOWN if one.name == CEILING else short(one.useful_steps_per_s, 4),
            short(one.steps_per_s, 4),
            share(one.ideal_share),
            share(one.idle_share),
            short(one.bytes_per_step / 1e6),
        )
        for one in forecasts
    ]
    return printed(("strategy", "useful/s", "steps/s", "of ideal", "idle", "MB/step"), rows)


def costs(forecasts: Sequence[Forecast]) -> Table:
    """What its steps are worth, and why."""
    rows = [
        (
            one.name,
            short(one.staleness_mean),
            short(one.discrepancy, 2) + ("↑" if one.grows else " "),
            UNKNOWN if one.name == CEILING else f"×{one.steps_needed:.2f}",
            one.why,
        )
        for one in forecasts
    ]
    table = printed(("strategy", "stale", "discrep.", "needs", "cost in convergence"), rows, left={0, 4})
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
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
