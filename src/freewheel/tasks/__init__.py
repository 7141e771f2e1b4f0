"""What the commands train: small problems with known answers, and data you bring along."""

from freewheel import names
from freewheel.task import Task
from freewheel.tasks.chars import Chars
from freewheel.tasks.cifar10 import Cifar10
from freewheel.tasks.digits import Digits
from freewheel.tasks.quadratic import Quadratic

ALL: dict[str, type[Task]] = {"quadratic": Quadratic, "digits": Digits, "cifar10": Cifar10, "chars": Chars}


def resolve(spec: str | Task) -> Task:
    """A task from its name, ``name:setting=value``, or itself."""
    return spec if isinstance(spec, Task) else names.build("task", spec, ALL)
