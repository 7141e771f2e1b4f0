"""``freewheel plan``: which strategy to use, before anything is run."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from freewheel import names
from freewheel.cli.options import argument, bar, command_line, option, output, takes
from freewheel.cli.run import python
from freewheel.errors import ConfigError, at_least
from freewheel.numbers import share, short, speed
from freewheel.planning.setting import Setting
from freewheel.records.files import check_writable, write_whole


@takes(Setting, link_mbit=None, latency_ms=None, jitter=None)
def plan(
    machines: dict[str, Any],
    context: typer.Context,
    workers: int | None = option(None, "How many workers; --scale says it, too."),
    command: list[str] | None = argument(
        None,
        "The training script, after all options of plan: what follows it is the script's. Where "
        "that has options of the same names, write -- before SCRIPT.",
        metavar="[SCRIPT]",
    ),
    measure: bool = option(
        False, "Run SCRIPT alone for a few steps to get model, time and jitter.", "--measure"
    ),
    module: bool = option(False, "SCRIPT is a module, as in python -m.", "-m", rare=True),
    hosts: str | None = option(
        None, "HOST[:PORT],…: time the links to these; each runs `freewheel doctor --serve`."
    ),
    tls: Path | None = option(None, "Keys for --hosts, as freewheel keys makes them.", rare=True),
    model_mb: float | None = option(None, "What the weights weigh; or --measure."),
    compute_ms: float | None = option(None, "Mean time of a step; or --measure."),
    strategy: str = option("all", "Only these, separated by commas; with settings: sasgd:interval=8."),
    steps: int | None = option(
        None, "Simulated steps of each worker; default: what each strategy needs.", rare=True
    ),
    scale: str | None = option(None, "Numbers of workers, as in 4,16,64: how costs grow, instead of a plan."),
    report: Path | None = option(None, "With --scale: draw it into this HTML file.", rare=True),
    json_path: Path | None = option(None, "Write the plan here.", "--json", rare=True),
) -> None:
    """Say which strategy to use: all of them in virtual time, ranked by what their steps are worth."""
    from freewheel.planning import plan as planner
    from freewheel.planning import words
    from freewheel.planning.forecast import candidates
    from freewheel.planning.measure import measure_links, measure_script

    script = _script(context, command or [], measure, module)
    sizes = None if scale is None else _sizes(scale)
    if (workers is None) == (sizes is None):
        raise ConfigError("give either --workers or --scale: how many workers are there to be?")
    at_least("--steps", steps, 2)
    if report is not None and sizes is None:
        raise ConfigError("--report draws how costs grow: give --scale, as in --scale 4,16,64.")
    for path in (report, json_path):
        check_writable(path)
    chosen = [] if strategy == "all" else names.split(strategy)
    machines |= {"workers": sizes[-1] if sizes else workers, "model_mb": model_mb, "compute_ms": compute_ms}
    given = {key: value for key, value in machines.items() if value is not None}
    # Mistakes are found before minutes are spent on measuring; 1 stands for what is measured.
    candidates(chosen, Setting(**{"model_mb": 1.0, "compute_ms": 1.0} | given))
    for name, value in (("--model-mb", model_mb), ("--compute-ms", compute_ms)):
        if value is None and not measure:
            raise ConfigError(f"{name} is missing: give it, or let it be measured: --measure train.py.")
    with bar() as progress:
        progress("measuring", 0.0)
        measured = asdict(measure_script(script)) if measure else {}
        links = measure_links(names.split(hosts), tls) if hosts else {}
        found = {key: measured[key] for key in measured.keys() - {"steps", "device"}}
        if links:  # the slowest stands for all
            found["link_mbit"] = min(min(one.mbit_out, one.mbit_in) for one in links.values())
            found["latency_ms"] = max(one.latency_ms for one in links.values())
        setting = Setting(**found | given)
        if sizes is not None:
            grown = planner.scale(setting, sizes, chosen, steps=steps, progress=progress)
        else:
            made = planner.make(setting, chosen, steps=steps, progress=progress)
    console = output()
    if measured:
        size, step = f"{short(measured['model_mb'])} MB", f"{short(measured['compute_ms'])} ms a step"
        how = f"{step}, varying by {share(measured['jitter'], 0)}, {size} of weights"
        _say(console, f"Measured: {measured['steps']} steps alone on {measured['device']}: {how}.")
    for host, link in links.items():
        out, back = speed(link.mbit_out), speed(link.mbit_in)
        _say(console, f"Link to {host}: {out} out, {back} in, {short(link.latency_ms)} ms.")
    result: dict[str, Any] = {"setting": asdict(setting)}
    if sizes is not None:
        _say(console, "Useful steps as a share of the ideal, by number of workers; none: all steps.", "")
        console.print(words.growth(grown))
        if report is not None:
            heading = f"Freewheel: {short(setting.model_mb)} MB on {speed(setting.link_mbit)}"
            write_whole(report, words.html(grown, heading, command_line()))
            _say(console, "", f"Drawn: {report.resolve()}")
        result["scale"] = {str(size): [asdict(one) for one in found] for size, found in grown.items()}
    else:
        script = script or ["train.py"]
        _say(console, words.setting_in_words(made.setting), "")
        console.print(words.forecast_table(made.forecasts, words.SPEEDS), "")
        console.print(words.forecast_table(made.forecasts, words.COSTS))
        _say(console, "", *words.recommendation(made, script))
        _say(console, "", "What would change it:", *words.what_would_change(made))
        _say(console, *(f"Left out: {name} {why}." for name, why in made.left_out.items()))
        result = made.as_json() | {"run": made.run_line(script)}
    if json_path is not None:
        timed = [{"host": host, **asdict(link)} for host, link in links.items()]
        write_whole(json_path, json.dumps(result | {"measured": measured or None, "links": timed}, indent=2))


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        # What is to be copied stays one line; the rest is folded between words.
        console.print(line, markup=False, soft_wrap=line.startswith("    "))


def _script(context: typer.Context, command: list[str], measure: bool, module: bool) -> list[str]:
    """The script as `freewheel run` takes it; options of plan behind it, which it would get, are refused."""
    own = {name for option in context.command.params for name in option.opts if name.startswith("-")}
    late = [word for word in command[1:] if word.partition("=")[0] in own]
    if late and sys.argv[-len(command) - 1] != "--":
        raise ConfigError(
            f"{late[0]} stands behind the script {command[0]!r}, whose option it would be: put options of "
            f"plan before the script. If it is the script's own, write -- {command[0]}."
        )
    if measure and not command:
        raise ConfigError("--measure needs a script: freewheel plan --workers 4 --measure train.py.")
    if measure:
        python(command, module)
    return ["-m", *command] if module and command else command


def _sizes(text: str) -> list[int]:
    sizes = names.split(text)
    if not sizes or not all(size.isdecimal() and int(size) >= 2 for size in sizes):
        raise ConfigError(
            f"cannot read --scale {text!r}: write numbers of workers, 2 or more, as in 4,16,64."
        )
    return sorted({int(size) for size in sizes})
