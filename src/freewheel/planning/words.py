"""A plan in words: what to use, why, how to start it, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence

from freewheel.numbers import given, share, short, speed
from freewheel.planning.choice import CEILING, TIE, name
from freewheel.planning.forecast import Forecast
from freewheel.planning.plan import Plan
from freewheel.planning.setting import Setting

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
    best, setting = plan.recommended, plan.setting
    ceiling = next((one for one in plan.forecasts if name(one) == CEILING), None)
    others = [one for one in plan.forecasts if name(one) not in (CEILING, name(best))]
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
    if setting.alone:
        lines += ["To start it:", f"    {plan.run_line(script)}"]
    else:
        lines += [
            "To start it, on a Ray cluster of these machines (torchrun and Slurm: docs/ENGINES.md):",
            f"    {plan.run_line(script)}",
        ]
    return lines


def _passed_over(one: Forecast, best: Forecast) -> str:
    """Why a strategy is not recommended that the table ranks higher; `choice.best` decides by the same."""
    more = one.useful_steps_per_s / best.useful_steps_per_s - 1
    far = "less than 1 %" if more < 0.01 else share(more, 0)
    reasons = (
        (one.discrepancy > 0 >= best.discrepancy, "keeps all replicas equal"),
        (best.keeps_mean and not one.keeps_mean, "keeps the mean of all replicas, so no update is lost"),
        (best.waits_for == "nobody" != one.waits_for, f"waits for nobody, {name(one)} for {one.waits_for}"),
        (best.bytes_per_step < one.bytes_per_step, "sends less"),
    )
    why = next((words for holds, words in reasons if holds), "asks no more of you")
    return (
        f"{one.strategy} is {far} ahead; less than {share(TIE, 0)} a plan cannot tell apart, and "
        f"{name(best)} {why}."
    )


def _reason(plan: Plan) -> str:
    best = plan.recommended
    sync = next((one for one in plan.forecasts if name(one) == "allreduce"), None)
    said = f"It makes {short(best.steps_per_s)} worker-steps/s, {share(best.ideal_share, 0)} of the ideal"
    if best.steps_needed > 1.005:
        said += f", and needs {best.steps_needed:.2f} of them for one of synchronous SGD"
    if name(best) == "allreduce":
        return f"{said}; PyTorch's DDP does the same."
    if sync is not None:
        times = best.useful_steps_per_s / sync.useful_steps_per_s
        said += f": {short(times, 2)} times as fast as allreduce in all"
    return f"{said}."


def about_ddp(plan: Plan) -> str | None:
    """What is known of DDP: allreduce, which sends during the backward pass where there is time."""
    sync = next((one for one in plan.forecasts if name(one) == "allreduce"), None)
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
    lines = []
    for one in plan.what_if:
        verdict = f"{one.strategy}" if one.changes else f"still {one.strategy}"
        lines.append(f"With {one.change}: {verdict} ({short(one.useful_steps_per_s)} useful steps/s).")
    return lines
