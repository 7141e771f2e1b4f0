"""A plan in words: what to use, why, how to start it, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence

from freewheel.observe.table import short
from freewheel.planning.choice import CEILING, TIE, name
from freewheel.planning.plan import Plan
from freewheel.planning.setting import Setting

BACKWARD = 2 / 3
"""The part of a gradient's time that is the backward pass, roughly: during it DDP can send."""


def setting_in_words(setting: Setting) -> str:
    """One line on what was planned for."""
    links = f"links of {_speed(setting.link_mbit)} and {setting.latency_ms:.3g} ms"
    where = "on one machine" if setting.alone else f"on {setting.nodes} machines, {links}"
    slow = [f"worker {rank} {factor:g} times slower" for rank, factor in setting.slow.items()]
    slow += [f"worker {rank}'s link {factor:g} times slower" for rank, factor in setting.slow_link.items()]
    jitter = [f"steps vary by {100 * setting.jitter:.0f} %"] if setting.jitter else []
    model = f"a model of {setting.model_mb:.3g} MB, {setting.compute_ms:.3g} ms a gradient"
    return ", ".join([f"{setting.workers} workers {where}", model, *slow, *jitter]) + "."


def recommendation(plan: Plan, script: Sequence[str]) -> list[str]:
    """Paragraphs; the lines to copy are indented."""
    best, setting = plan.recommended, plan.setting
    ceiling = next((one for one in plan.forecasts if name(one) == CEILING), None)
    others = [one for one in plan.forecasts if name(one) not in (CEILING, name(best))]
    lines = [f"Use {best.strategy}. {_reason(plan)}"]
    alike = [
        one.strategy for one in others if abs(one.useful_steps_per_s / best.useful_steps_per_s - 1) <= TIE
    ]
    if alike:
        lines.append(f"As good within {100 * TIE:.0f} %: {', '.join(alike)}.")
    if ceiling is not None and best.steps_per_s < 0.5 * ceiling.steps_per_s:
        lines.append(
            f"Even so, workers compute for {100 * (1 - best.idle_share):.0f} % of the time: this network is "
            "too slow for this model."
        )
    lines += ["In the script:", f"    {plan.attach_line}"]
    if setting.alone:
        lines += ["To start it:", f"    {plan.run_line(script)}"]
    else:
        lines += [
            "To start it on each machine, --node from 0 on and --bind its own address (here machine 0):",
            f"    {plan.run_line(script)}",
        ]
    return lines


def _reason(plan: Plan) -> str:
    best = plan.recommended
    sync = next((one for one in plan.forecasts if name(one) == "allreduce"), None)
    said = f"It makes {short(best.steps_per_s)} worker-steps/s, {100 * best.ideal_share:.0f} % of the ideal"
    if best.steps_needed > 1.005:
        said += f", and needs {best.steps_needed:.2f} of them for one of synchronous SGD"
    if name(best) == "allreduce":
        return f"{said}; PyTorch's DDP does the same."
    if sync is not None:
        times = best.useful_steps_per_s / sync.useful_steps_per_s
        said += f": {times:.2g} times as fast as allreduce in all"
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


def _speed(mbit: float) -> str:
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"
