"""Names with settings: the one grammar in which strategies, tasks and topologies are named.

    adpsgd                         a name
    sasgd:interval=8               a name and a setting
    random_regular:degree=4:seed=1 several settings

A list of them is separated by commas.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from freewheel.errors import ConfigError, UnknownName

T = TypeVar("T")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {
    bool: (lambda text: BOOLEANS[text.lower()], "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "text"),
}


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value:key=value`` into the name and its settings, all still text."""
    name, *rest = spec.strip().split(":")
    settings: dict[str, str] = {}
    for item in rest:
        key, sign, value = item.partition("=")
        if not sign or not key or not value:
            raise ConfigError(
                f"cannot read {item!r} in {spec!r}. Write settings as NAME:key=value:key=value."
            )
        if key.strip() in settings:
            raise ConfigError(f"{key.strip()!r} is given twice in {spec!r}; give it once.")
        settings[key.strip()] = value.strip()
    return name.strip(), settings


def build(kind: str, spec: str, known: Mapping[str, Callable[..., T]], *given: Any) -> T:
    """Call what ``spec`` names with ``given`` and the settings, which are read as its parameters' types."""
    name, settings = parse(spec)
    if name not in known:
        raise UnknownName(kind, name, known)
    make = known[name]
    hints = typing.get_type_hints(make)
    takes = list(inspect.signature(make).parameters)[len(given) :]
    values: dict[str, Any] = {}
    for key, text in settings.items():
        if key not in takes:
            raise UnknownName(f"setting of {kind} {name!r}:", key, takes or ["(it has none)"])
        values[key] = read_value(f"{name}:{key}", text, hints[key])
    return make(*given, **values)


def read_value(what: str, text: str, wanted: Any) -> Any:
    """`wanted`: bool, int, float, str or a Literal, or a union of them with None."""
    several = typing.get_origin(wanted) in (types.UnionType, typing.Union)
    options = typing.get_args(wanted) if several else (wanted,)
    if text.lower() == "none" and type(None) in options:
        return None
    for kind in options:
        if typing.get_origin(kind) is typing.Literal:
            if text not in typing.get_args(kind):
                raise UnknownName(f"value of {what}:", text, typing.get_args(kind))
            return text
        if kind in KINDS:
            read, expected = KINDS[kind]
            try:
                return read(text)
            except (ValueError, KeyError):
                raise ConfigError(f"{what} must be {expected}, not {text!r}.") from None
    raise ConfigError(f"{what} cannot be given as text; set it from Python.")
