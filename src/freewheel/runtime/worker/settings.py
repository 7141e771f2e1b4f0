"""The settings of `fw.attach`, checked: all it may be given beside a model, its optimizer and a strategy."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

import torch

from freewheel.errors import ConfigError, UnknownName, at_least

WIRES = {"fp32": None, "bf16": torch.bfloat16}  # what vectors are rounded to on their way


class Given(TypedDict, total=False):
    """The settings as a user gives them: so editors and type checkers know the names."""

    wire: Literal["fp32", "bf16"]
    bind: str | None
    tls: str | Path | None
    folder: str | Path | None
    tensorboard: str | Path | None
    resume: str | Path | None
    seed: int
    join_timeout_s: float
    heartbeat_s: float
    leave_s: float | None


@dataclass(frozen=True)
class Settings:
    """The same with defaults; `fw.attach` says what each means."""

    wire: Literal["fp32", "bf16"] = "fp32"
    bind: str | None = None
    tls: str | Path | None = None
    folder: str | Path | None = None
    tensorboard: str | Path | None = None
    resume: str | Path | None = None
    seed: int = 0
    join_timeout_s: float = 300.0
    heartbeat_s: float = 2.0
    leave_s: float | None = None

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            raise ConfigError(f"wire must be one of {', '.join(WIRES)}, not {self.wire!r}.")
        at_least("heartbeat_s", self.heartbeat_s, 0.1)

    @classmethod
    def of(cls, given: Any) -> Self:
        """From keywords; UnknownName if there is no setting of that name."""
        names = [field.name for field in fields(cls)]
        for name in given.keys() - set(names):
            raise UnknownName("setting of attach", name, names)
        return cls(**given)
