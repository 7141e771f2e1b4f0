"""Lists and tuples as the numbers of a note, and back.

A tuple is its parts, one after the other; a list is its length, then its parts. A shape says what is read:
`int` a whole number, `(a, b)` one of each, `[a]` any number of them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

Shape: TypeAlias = Any


def pack(*values: Any) -> tuple[float, ...]:
    numbers: list[float] = []
    for value in values:
        if isinstance(value, list):
            numbers.append(len(value))
        if isinstance(value, list | tuple):
            numbers += pack(*value)
        else:
            numbers.append(value)
    return tuple(numbers)


def read(shape: Shape, numbers: Iterator[int]) -> Any:
    """Undo `pack`; ValueError if there are too few numbers."""
    if isinstance(shape, list):
        if (count := read(int, numbers)) < 0:
            raise ValueError("a list shorter than none")
        return [read(shape[0], numbers) for _ in range(count)]
    if isinstance(shape, tuple):
        return tuple([read(one, numbers) for one in shape])
    for number in numbers:
        return number
    raise ValueError("numbers are missing")


def read_all(shape: Shape, numbers: Iterator[int]) -> Any:
    """Undo `pack`; ValueError if there are too few numbers or too many."""
    found = read(shape, numbers)
    for _ in numbers:
        raise ValueError("more numbers than were awaited")
    return found


def whole(numbers: Sequence[float]) -> Iterator[int]:
    """Check that numbers are whole and not negative, one by one; ValueError at the first that is not."""
    for number in numbers:
        if not (0 <= number < math.inf and number == int(number)):
            raise ValueError(f"{number} is not a whole number")
        yield int(number)
