"""Options that several commands have."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from freewheel.errors import ConfigError

Optimizer = Annotated[str, typer.Option(help="sgd or adamw.")]
Decay = Annotated[float, typer.Option(help="Weight decay.")]
Curve = Annotated[
    str, typer.Option(help="How the learning rate falls after the warm-up: constant, linear or cosine.")
]
Warmup = Annotated[
    float | None,
    typer.Option(help="Steps of each worker (--seconds: seconds) in which it grows; default: 5 %; 0: none."),
]


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
