"""Whether what a user gave can be sent to the ranks, found out before anything is written.

Runs on the driver.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from hvd_estimators.exceptions import ParamError

__all__ = ["check_sendable", "functions_in"]


def check_sendable(
    name: str, value: Any, pickler: type[cloudpickle.Pickler] = cloudpickle.Pickler
) -> None:
    """Make sure that an object can be pickled, without taking the time of what arrays it holds.

    Parameters
    ----------
    name : str
        The param whose value it is, for the message.
    value : object
        What is sent.
    pickler : type
        What it is sent with.

    Raises
    ------
    ParamError
        If it cannot.
    """

    class Trial(pickler):
        """Pickles, but for arrays and tensors, which always can be and may be large."""

        def persistent_id(self, obj: Any) -> str | None:
            is_array = isinstance(obj, np.ndarray) and not obj.dtype.hasobject
            return "array" if is_array or hasattr(type(obj), "untyped_storage") else None

    def fails(part: Any) -> bool:
        try:
            Trial(_Nowhere()).dump(part)
        except Exception:
            return True
        return False

    try:
        Trial(_Nowhere()).dump(value)
    except Exception as error:
        path, part = _find(value, fails)
        where = f" at {name}{path}, a {type(part).__name__}" if path else ""
        raise ParamError(
            f"{name}: it is sent to the ranks with cloudpickle, which fails{where}: "
            f"{type(error).__name__}: {error}. Make what cannot be sent, such as locks and open "
            "files, within the function that uses it (in a callback: in on_train_begin), and leave "
            "Spark's context, sessions and DataFrames out of functions and objects."
        ) from error


def _find(value: Any, fails: Callable[[Any], bool], depth: int = 6) -> tuple[str, Any]:
    """Return the innermost part of a value that fails, and how to reach it from the value."""
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        parts = ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((f"[{index}]", part) for index, part in enumerate(value))
    elif not isinstance(value, (type, FunctionType, ModuleType)):
        parts = ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())
    for step, part in parts if depth else ():
        if fails(part):
            path, found = _find(part, fails, depth - 1)
            return f"{step}{path}", found
    return "", value


def functions_in(value: Any) -> Iterator[Any]:
    """Yield the plain functions in lists, tuples and dicts."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from functions_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from functions_in(entry)


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)
