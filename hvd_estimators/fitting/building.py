"""Models and optimizers that the user gives as functions. Runs on the driver."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from hvd_estimators.exceptions import ParamError


def is_function(value: Any) -> bool:
    """Return whether a param's value is a function, method, partial or class."""
    return inspect.isroutine(value) or isinstance(value, (type, functools.partial))


def build(name: str, function: Any, kind: type, *args: Any, **kwargs: Any) -> Any:
    """Return the object that a function of the user builds.

    Parameters
    ----------
    name : str
        The param that holds the function.
    function : callable
        Function, or class.
    kind : type
        Class of the expected object.
    *args, **kwargs
        Arguments of the function.

    Raises
    ------
    ParamError
        If the function fails, or returns anything else.
    """
    try:
        built = function(*args, **kwargs)
    except Exception as error:
        given = f" with {_described(kwargs)}" if kwargs else ""
        raise ParamError(
            f"{name}: {_name(function)} failed{given} ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(built, kind):
        raise ParamError(
            f"{name}: expected a {kind.__module__.split('.')[0]} {kind.__name__}, or a function "
            f"that returns one. {_name(function)} returned {built!r}."
        )
    return built


def _name(function: Any) -> str:
    return f"{getattr(function, '__qualname__', repr(function))}()"


def _described(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
