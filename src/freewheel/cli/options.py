"""Options of the command line: most are made from the settings of dataclasses (settings.py)."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from freewheel.errors import ConfigError


def option(*names: str, meaning: str, rare: bool = False, **how: Any) -> Any:
    """An option; a rare one is shown by --help-all alone."""
    return typer.Option(*names, help=meaning, hidden=rare, **how)


def _help_all(context: typer.Context, wanted: bool) -> None:
    """Show the rare options, too."""
    if wanted:
        rare = [one for one in context.command.params if getattr(one, "hidden", False)]
        for one in rare:
            one.hidden = False  # type: ignore[attr-defined]
        print(context.get_help())
        for one in rare:
            one.hidden = True  # type: ignore[attr-defined]
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, option("--help-all", meaning="Show all options.", is_eager=True, callback=_help_all)
    ],
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
            found = [
                {one.field: one.read(given.pop(one.parameter.name)) for one in group} for group in groups
            ]
            return command(*found, **given)

        parameters = [*own[:2], *(one.parameter for group in groups for one in group), *own[2:], HELP_ALL]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return decorate


@dataclasses.dataclass(frozen=True)
class _Option:
    """A setting as an option, and how what is typed becomes its value."""

    field: str
    parameter: inspect.Parameter
    read: Callable[[Any], Any]


def _options(cls: type, defaults: Mapping[str, Any]) -> list[_Option]:
    hints, found = typing.get_type_hints(cls), []
    for one in dataclasses.fields(cls):
        if "meaning" not in one.metadata:
            continue
        kind, default = hints[one.name], defaults.get(one.name, one.default)
        flag = one.metadata["flag"] or f"--{one.name.replace('_', '-')}"
        meaning, how = one.metadata["meaning"], {"rare": one.metadata["rare"]}
        read: Callable[[Any], Any] = _as_it_is
        if typing.get_origin(kind) in (dict, Mapping):
            kind, default, read = list[str] | None, None, _factors(flag)
            how |= {"metavar": "RANK:FACTOR"}
        elif default is True:  # the option takes it away
            default, read = False, lambda given: not given
        if default is None and one.default is not None and one.name in defaults:
            meaning = f"{meaning.removesuffix('.')}; default: {one.default}."
        shown = option(flag, meaning=meaning, **how)
        name = flag.removeprefix("--").replace("-", "_")
        parameter = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
        )
        found.append(_Option(one.name, parameter, read))
    return found


def _as_it_is(given: Any) -> Any:
    return given


def _factors(flag: str) -> Callable[[list[str] | None], dict[int, float]]:
    return lambda texts: {rank: factor for rank, (factor,) in ranks_and_numbers(flag, texts, 1)}


def command_line() -> str:
    """What was typed."""
    return shlex.join(["freewheel", *sys.argv[1:]])


def ranks_and_numbers(
    option: str, texts: list[str] | None, numbers: int
) -> list[tuple[int, tuple[float, ...]]]:
    """Read an option that is given once for each worker it speaks of."""
    read = [_rank_and_numbers(option, text, numbers) for text in texts or []]
    twice = {rank for rank, _ in read if [r for r, _ in read].count(rank) > 1}
    if twice and numbers == 1:
        raise ConfigError(f"{option} is given twice for worker {min(twice)}; give it once.")
    return read


def _rank_and_numbers(option: str, text: str, numbers: int) -> tuple[int, tuple[float, ...]]:
    """Read RANK:NUMBER or RANK:NUMBER:NUMBER."""
    rank, *rest = text.split(":")
    try:
        if len(rest) != numbers:
            raise ValueError
        return int(rank), tuple(float(number) for number in rest)
    except ValueError:
        form = {1: "RANK:FACTOR, as in 0:5", 2: "RANK:AT_S:FOR_S, as in 0:0.5:1.0"}[numbers]
        raise ConfigError(f"cannot read {option} {text!r}: write {form}.") from None
