"""Freewheel on Ray: Ray starts workers, places them and starts them again; they train as everywhere.

    import freewheel.ray
    answers = freewheel.ray.run(train, workers=4, most=16, gpus=1)     # {rank: what train() returned}

`train` calls `fw.attach` as any script does. `freewheel run --ray -n 4 train.py` does the same for a script.
"""

from freewheel.errors import ConfigError, NotInstalled

OLDEST, NEWEST = (2, 50), (2, 61)
"""Versions of Ray this was written for: from the first, to before the second."""

try:
    import ray as _ray
except ImportError:
    raise NotInstalled("freewheel.ray", "Ray", "ray") from None
_version = tuple(int(part) for part in _ray.__version__.split(".")[:2])
if not OLDEST <= _version < NEWEST:
    raise ConfigError(
        f"Ray {_ray.__version__} is not one that Freewheel knows: install ray>={OLDEST[0]}.{OLDEST[1]},"
        f"<{NEWEST[0]}.{NEWEST[1]}."
    )

from freewheel.ray.run import run  # noqa: E402

__all__ = ["run"]
