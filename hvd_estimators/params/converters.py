"""What a param accepts: functions of its name and a value, which return the value as it is kept.

All of them raise `ParamError` for what they do not accept. Run on the driver.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np

from hvd_estimators.exceptions import ParamError

__all__ = [
    "Converter",
    "boolean",
    "functions",
    "integer",
    "names",
    "number",
    "numbers",
    "objects",
    "one_of",
    "places",
    "shapes",
    "text",
    "type_names",
]

Converter = Callable[[str, Any], Any]


def integer(minimum: int | None = None) -> Converter:
    """Return a converter to an integer that is not below a minimum."""

    def convert(name: str, value: Any) -> int:
        if isinstance(value, bool) or int(value) != value:
            raise ParamError(f"{name}: expected a whole number, found {value!r}.")
        if minimum is not None and value < minimum:
            raise ParamError(f"{name}: expected {minimum} or more, found {value!r}.")
        return int(value)

    return _guarded(convert, "a whole number")


def number(minimum: float | None = None) -> Converter:
    """Return a converter to a finite float that is not below a minimum."""

    def convert(name: str, value: Any) -> float:
        if minimum is not None and value < minimum:
            raise ParamError(f"{name}: expected {minimum} or more, found {value!r}.")
        if not math.isfinite(float(value)):
            raise ParamError(f"{name}: expected a finite number, found {value!r}.")
        return float(value)

    return _guarded(convert, "a number")


def boolean(name: str, value: Any) -> bool:
    """Accept True and False."""
    if not isinstance(value, bool):
        raise ParamError(f"{name}: expected True or False, found {value!r}.")
    return value


def text(name: str, value: Any) -> str:
    """Accept a string."""
    if not isinstance(value, str):
        raise ParamError(f"{name}: expected a string, found {value!r}.")
    return value


def names(name: str, value: Any) -> list[str]:
    """Accept a list of column names, or one of them."""
    if isinstance(value, (Set, Mapping)):
        # A set has an order of its own in each process.
        raise ParamError(
            f"{name}: expected a list of column names, whose order counts, found {value!r}."
        )
    single = isinstance(value, str) or not isinstance(value, Iterable)
    values = [value] if single else list(value)
    for entry in values:
        if not isinstance(entry, str):
            raise ParamError(f"{name}: expected names of columns, found {entry!r}.")
    repeated = sorted({entry for entry in values if values.count(entry) > 1})
    if repeated:
        raise ParamError(f"{name}: found {', '.join(map(repr, repeated))} more than once.")
    return values


def places(name: str, value: Any) -> list[int | str]:
    """Accept a list of positions and names, or one of them."""
    if isinstance(value, (Set, Mapping)):
        raise ParamError(f"{name}: expected a list, whose order counts, found {value!r}.")
    single = isinstance(value, str) or not isinstance(value, Iterable)
    values = [value] if single else list(value)
    for entry in values:
        is_position = isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0
        if not is_position and not isinstance(entry, str):
            raise ParamError(
                f"{name}: expected positions (0 or more) or names of outputs, found {entry!r}."
            )
    if not values or len(set(values)) < len(values):
        raise ParamError(f"{name}: expected one or more different outputs, found {value!r}.")
    return values


def type_names(name: str, value: Any) -> list[str | None]:
    """Accept a list of Spark's types, as DDL strings, as objects, or None; or one of them."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    found: list[str | None] = []
    for entry in values:
        entry = entry() if isinstance(entry, type) else entry
        described = getattr(entry, "simpleString", None)
        if not (entry is None or isinstance(entry, str) or callable(described)):
            raise ParamError(
                f"{name}: expected types as 'double' or 'array<float>', found {entry!r}."
            )
        found.append(described() if callable(described) else entry)
    return found


def numbers(name: str, value: Any) -> list[float]:
    """Accept a list of numbers, or one of them."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    values = value if isinstance(value, (list, tuple)) else [value]
    convert = number()
    return [convert(name, entry) for entry in values]


def functions(name: str, value: Any) -> list[Any]:
    """Accept a list of callables, or one of them."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    for entry in values:
        if not callable(entry):
            raise ParamError(f"{name}: expected callables, found {entry!r}.")
    return values


def objects(name: str, value: Any) -> list[Any]:
    """Accept a list of objects, or anything else that holds several in an order."""
    if isinstance(value, (str, bytes, Set, Mapping)) or not isinstance(value, Iterable):
        raise ParamError(f"{name}: expected a list, found {value!r}. Set [...], also for one.")
    return list(value)


def one_of(*choices: str) -> Converter:
    """Return a converter that accepts some strings only."""

    def convert(name: str, value: Any) -> str:
        if value not in choices:
            raise ParamError(
                f"{name}: expected one of {', '.join(map(repr, choices))}, found {value!r}."
            )
        return str(value)

    return convert


def shapes(name: str, value: Any) -> list[list[int]]:
    """Accept a list of shapes, of a row each, or of a batch with -1 for its rows first.

    Returns them with the -1: ``[2]`` and ``[-1, 2]`` are the same, and so are ``[]`` (a number
    per row) and ``[-1]``.
    """
    try:
        if isinstance(value, (Set, Mapping)):
            raise TypeError("no order")
        given = [[operator.index(size) for size in shape] for shape in value]
    except TypeError:
        given = [[0]]
    converted = [shape if shape[:1] == [-1] else [-1, *shape] for shape in given]
    for _, *row in converted:
        if any(size < 1 and size != -1 for size in row) or row.count(-1) > 1:
            raise ParamError(
                f"{name}: expected a list of shapes, of one row each, such as [[8]], or with -1 "
                f"for the rows of a batch first, such as [[-1, 8]], found {value!r}."
            )
    return converted


def _guarded(convert: Converter, expected: str) -> Converter:
    def guarded(name: str, value: Any) -> Any:
        try:
            return convert(name, value)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, ParamError):
                raise
            raise ParamError(f"{name}: expected {expected}, found {value!r}.") from None

    return guarded
