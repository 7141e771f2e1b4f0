"""Options of the command line: most are made from the settings of dataclasses (settings.py)."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.models import OptionInfo

from freewheel.errors import ConfigError

PANELS = {
    "Machines": "compute_ms compute slow pause fault device workers_per_node jitter memory_gb",
    "Network": "mbit link_mbit out_mbit latency_ms slow_link backbone_mbit message_ms wire hosts",
    "Optimizer": "optimizer lr momentum weight_decay schedule warmup",
    "Checkpoints": "checkpoint every resume",
    "Results": "target report json_path json folder force wide tensorboard trace",
    "Several hosts": "most bind master tls secret",
    "Ray": "ray address gpus cpus",
}
"""Under which heading options stand, by their names, unless they name one; the others under Options."""


def option(default: Any, meaning: str, *names: str, rare: bool = False, **how: Any) -> Any:
    """An option; a rare one is shown by --help-all alone."""
    return typer.Option(default, *names, help=meaning, hidden=rare, **how)


def argument(default: Any, meaning: str, **how: Any) -> Any:
    """What is given without a name; ...: it must be."""
    return typer.Argument(default, help=meaning, **how)


def _help_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for one in context.command.params:
            one.hidden = False  # type: ignore[attr-defined]
        print(context.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=option(False, "Show all options.", "--help-all", is_eager=True, callback=_help_all),
    annotation=bool,
)


def takes(*classes: type, **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take the settings of dataclasses: it gets those of each class in a dictionary.

    The command's first parameters are these dictionaries, in the order of the classes. `defaults` are
    others than the class's own.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        groups = [_options(one, defaults) for one in classes]
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(classes) :]
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]

        def called(help_all: bool = False, **given: Any) -> Any:
            found: list[dict[str, Any]] = [{} for _ in groups]
            for settings, group in zip(found, groups, strict=True):
                for field, parameter, read in group:
                    text = given.pop(parameter.name)
                    settings[field] = read(text) if read else text
            return command(*found, **given)

        parameters = [*own[:2], *(one for group in groups for _, one, _ in group), *own[2:], HELP_ALL]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return decorate


def _options(
    cls: type, defaults: Mapping[str, Any]
) -> list[tuple[str, inspect.Parameter, Callable[[Any], Any] | None]]:
    """Settings as options: the field, the parameter, and how what is typed becomes its value."""
    hints, found = typing.get_type_hints(cls), []
    for one in dataclasses.fields(cls):
        if "meaning" not in one.metadata:
            continue
        kind, default = hints[one.name], defaults.get(one.name, one.default)
        flag = one.metadata["flag"] or f"--{one.name.replace('_', '-')}"
        meaning = one.metadata["meaning"]
        read: Callable[[Any], Any] | None = None
        usual = one.default  # what it is where nothing is given
        if typing.get_origin(kind) in (dict, Mapping):
            factors = defaults.get(one.name, {})
            kind, default, read = list[str] | None, None, _factors(flag, factors)
            usual = ", ".join(f"{rank}:{factor:g}" for rank, factor in factors.items())
        elif default is True:  # the option takes it away
            default, read = False, lambda given: not given
        if default is None and usual is not None and one.name in defaults:
            meaning = f"{meaning.removesuffix('.')}; default: {usual}."
        parameter = inspect.Parameter(
            flag.removeprefix("--").replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=option(default, meaning, flag, rare=one.metadata["rare"]),
            annotation=kind,
        )
        found.append((one.name, parameter, read))
    return found


def arrange(command: Callable[..., Any]) -> None:
    """Put options under headings."""
    for name, one in inspect.signature(command, eval_str=True).parameters.items():
        if isinstance(one.default, OptionInfo) and one.default.rich_help_panel is None:
            one.default.rich_help_panel = next(
                (head for head, of in PANELS.items() if name in of.split()), None
            )


RUNS = argument(..., "Folders of runs, or folders with runs in them.", metavar="RUN...")


# -- what is typed --


def _factors(flag: str, default: dict[int, float]) -> Callable[[list[str] | None], dict[int, float]]:
    def read(texts: list[str] | None) -> dict[int, float]:
        if texts == ["none"]:
            return {}
        given = {rank: factor for rank, (factor,) in ranks_and_numbers(flag, texts, 1)}
        return given if texts else default

    return read


def command_line() -> str:
    """What was typed."""
    return shlex.join(["freewheel", *sys.argv[1:]])


def ranks_and_numbers(
    option: str, texts: list[str] | None, numbers: int
) -> list[tuple[int, tuple[float, ...]]]:
    """Read an option that is given once for each worker it speaks of."""
    read: list[tuple[int, tuple[float, ...]]] = []
    for text in texts or []:
        rank, *rest = text.split(":")
        try:
            if len(rest) != numbers:
                raise ValueError
            read.append((int(rank), tuple(map(float, rest))))
        except ValueError:
            form = {1: "RANK:FACTOR, as in 0:5", 2: "RANK:AT_S:FOR_S, as in 0:0.5:1.0"}[numbers]
            raise ConfigError(f"cannot read {option} {text!r}: write {form}.") from None
    ranks = [rank for rank, _ in read]
    twice = {rank for rank in ranks if ranks.count(rank) > 1}
    if twice and numbers == 1:
        raise ConfigError(f"{option} is given twice for worker {min(twice)}; give it once.")
    return read
