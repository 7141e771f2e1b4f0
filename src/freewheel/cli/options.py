"""What commands share: options, most made from dataclasses' settings (settings.py), and the terminal."""

import contextlib
import dataclasses
import inspect
import operator
import shlex
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer.models import OptionInfo

from freewheel.errors import ConfigError

# Under which heading options stand, by their names, unless they name one; the others under Options.
PANELS = {
    "Machines": "compute_ms compute slow pause fault device workers_per_node jitter memory_gb",
    "Network": "mbit link_mbit out_mbit latency_ms slow_link backbone_mbit message_ms wire hosts",
    "Optimizer": "optimizer lr momentum weight_decay schedule warmup",
    "Checkpoints": "checkpoint every resume",
    "Results": "target report json_path json folder force wide tensorboard trace",
    "Several hosts": "most bind master tls secret",
    "Ray": "ray address gpus cpus",
}
FORMS = {1: "RANK:FACTOR, as in 0:5", 2: "RANK:AT_S:FOR_S, as in 0:0.5:1.0"}


def option(default: Any, meaning: str, *names: str, rare: bool = False, **how: Any) -> Any:
    """A rare one is shown by --help-all alone."""
    return typer.Option(default, *names, help=meaning, hidden=rare, **how)


def argument(default: Any, meaning: str, **how: Any) -> Any:
    return typer.Argument(default, help=meaning, show_default=False, **how)


def _help_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for one in context.command.params:
            one.hidden = False  # type: ignore[attr-defined]
        print(context.get_help())
        raise typer.Exit


HELP_ALL = option(False, "Show all options.", "--help-all", is_eager=True, callback=_help_all)
keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def takes(*classes: type, **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Offer the settings of dataclasses as a command's options; `defaults` replace the classes' own.

    The command's first parameters are dictionaries of them, one for each class.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        groups = [list(_options(one, defaults)) for one in classes]
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(classes) :]
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]

        def called(help_all: bool = False, **typed: Any) -> Any:
            settings = [
                {field: read(typed[one.name]) if read else typed[one.name] for field, one, read in group}
                for group in groups
            ]
            return command(*settings, **{one.name: typed[one.name] for one in own})

        offered = [one for group in groups for _, one, _ in group]
        parameters = [*own[:2], *offered, *own[2:], keyword("help_all", default=HELP_ALL, annotation=bool)]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return decorate


Read = Callable[[Any], Any] | None


def _options(cls: type, defaults: Mapping[str, Any]) -> Iterator[tuple[str, inspect.Parameter, Read]]:
    """For each setting: the field, the command's parameter, and a function that reads what is typed."""
    hints = typing.get_type_hints(cls)
    for one in dataclasses.fields(cls):
        if "meaning" not in one.metadata:
            continue
        flag = one.metadata["flag"] or f"--{one.name.replace('_', '-')}"
        meaning = one.metadata["meaning"]
        kind, default, usual = hints[one.name], defaults.get(one.name, one.default), one.default
        read: Read = None
        if typing.get_origin(kind) in (dict, Mapping):
            factors = defaults.get(one.name, {})
            kind, default, read = list[str] | None, None, partial(_factors, flag, factors)
            usual = ", ".join(f"{rank}:{factor:g}" for rank, factor in factors.items())
        elif default is True:  # the option takes it away
            default, read = False, operator.not_
        if default is None and usual is not None and one.name in defaults:
            meaning = f"{meaning.removesuffix('.')}; default: {usual}."
        shown = option(default, meaning, flag, rare=one.metadata["rare"])
        yield one.name, keyword(flag[2:].replace("-", "_"), default=shown, annotation=kind), read


def arrange(command: Callable[..., Any]) -> None:
    for name, one in inspect.signature(command).parameters.items():
        if isinstance(one.default, OptionInfo) and one.default.rich_help_panel is None:
            heads = (head for head, names in PANELS.items() if name in names.split())
            one.default.rich_help_panel = next(heads, None)


def command_line() -> str:
    return shlex.join(["freewheel", *sys.argv[1:]])


def _factors(flag: str, usual: dict[int, float], texts: list[str] | None) -> dict[int, float]:
    return {} if texts == ["none"] else dict(ranks_and_numbers(flag, texts, 1)) or usual


def ranks_and_numbers(option: str, texts: list[str] | None, numbers: int) -> list[tuple[Any, ...]]:
    """Read an option that may be given once for each worker, as in --slow 0:5."""
    read: list[tuple[Any, ...]] = []
    for text in texts or []:
        rank, *rest = text.split(":")
        try:
            if len(rest) != numbers:
                raise ValueError
            read.append((int(rank), *map(float, rest)))
        except ValueError:
            raise ConfigError(f"cannot read {option} {text!r}: write {FORMS[numbers]}.") from None
    twice = [rank for rank, times in Counter(rank for rank, *_ in read).items() if times > 1]
    if twice and numbers == 1:
        raise ConfigError(f"{option} is given twice for worker {min(twice)}; give it once.")
    return read


def output() -> Console:
    """Standard output; into a file or a pipe lines are as wide as they need to be."""
    console = Console(highlight=False)
    real = console.is_terminal and not console.is_dumb_terminal
    return console if real else Console(width=240, force_terminal=False, highlight=False)


@contextlib.contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr, as a table on stdout may go into a file; none where that is no terminal."""
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, share: shown.update(task, description=what, completed=share)
