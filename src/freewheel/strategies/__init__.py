"""One algorithm per file, in the order and letters of its paper."""

import importlib
import pkgutil

from freewheel import names
from freewheel.errors import ConfigError
from freewheel.strategy import Strategy


def _found() -> dict[str, type[Strategy]]:
    """The strategy of each file of this folder."""
    files = sorted(one.name for one in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{one}") for one in files]
    classes = (one for module in modules for one in vars(module).values() if isinstance(one, type))
    own = [one for one in classes if issubclass(one, Strategy) and "name" in vars(one)]
    return {one.name: one for one in own}


ALL: dict[str, type[Strategy]] = _found()


def resolve(spec: str | Strategy) -> Strategy:
    """A strategy from its name, ``name:setting=value``, or itself."""
    if isinstance(spec, type):
        raise ConfigError(f"a strategy is an object, not a class: write {spec.__name__}(), or a name.")
    if spec == "ddp":
        raise ConfigError(
            "ddp is PyTorch's own, which compare runs on real processes. Elsewhere take allreduce."
        )
    return spec if isinstance(spec, Strategy) else names.build("strategy", spec, ALL)


def resolve_all(text: str) -> list[Strategy]:
    """Strategies from a comma-separated list; ``all`` is every one of them."""
    specs = [name for part in names.split(text) for name in (ALL if part == "all" else [part])]
    if not specs:
        raise ConfigError(f"no strategy given. Known: {', '.join(ALL)}; or all.")
    return [resolve(spec) for spec in specs]
