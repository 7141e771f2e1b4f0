"""Freewheel on Ray: Ray starts workers, places them and starts them again; they train as everywhere.

    import freewheel.ray
    answers = freewheel.ray.run(train, workers=4, most=16, gpus=1)     # {rank: what train() returned}

`train` calls `fw.attach` as any script does. `freewheel run --ray -n 4 train.py` does the same for a script.
Ray Train's TorchTrainer takes `freewheel.ray.FreewheelConfig()` as its `torch_config`.
"""

from typing import Any

from freewheel.errors import ConfigError, NotInstalled

VERSIONS = ">=2.57,<2.61"  # of Ray, that this was written for

try:
    import ray as _ray
    from packaging.specifiers import SpecifierSet  # which Ray brings
except ImportError:
    raise NotInstalled("freewheel.ray", "Ray", "ray") from None
if _ray.__version__ not in SpecifierSet(VERSIONS):
    raise ConfigError(f"Ray {_ray.__version__} is not one that Freewheel knows: install ray{VERSIONS}.")

from freewheel.ray.run import run  # noqa: E402

__all__ = ["FreewheelConfig", "run"]


def __getattr__(name: str) -> Any:
    if name != "FreewheelConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import ray.train  # noqa: F401
    except ImportError:  # it wants more than Ray itself does
        raise NotInstalled("FreewheelConfig", "Ray Train", "ray-train") from None
    from freewheel.ray.train import FreewheelConfig

    return FreewheelConfig
