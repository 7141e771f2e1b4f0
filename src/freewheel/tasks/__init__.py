"""What the commands train: small problems with known answers."""

from __future__ import annotations

from freewheel import names
from freewheel.task import Task
from freewheel.tasks.digits import Digits
from freewheel.tasks.quadratic import Quadratic

ALL: dict[str, type[Task]] = {"quadratic": Quadratic, "digits": Digits}


def resolve(spec: str | Task) -> Task:
    """A task from its name, ``name:setting=value``, or itself."""
    return spec if isinstance(spec, Task) else names.build("task", spec, ALL)


__all__ = ["ALL", "Digits", "Quadratic", "Task", "resolve"]
