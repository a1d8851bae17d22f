"""Validation of backend arguments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.rank.environment import IDENTITY_VARIABLES

_OF_HOROVOD = (
    *("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK", "HOROVOD_HOSTNAME"),
    *("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE"),
)
"""Variables by which Horovod's launcher makes a process a rank."""


def call_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Validate and return a function and its arguments.

    Raises
    ------
    ParamError
        If the function is not callable, or its arguments are not a sequence and a mapping.
    """
    if not callable(fn):
        raise ParamError(f"fn: expected a function, found {fn!r}.")
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Sequence):
        raise ParamError(f"args: expected a tuple or list of arguments, found {args!r}.")
    if not isinstance(kwargs or {}, Mapping):
        raise ParamError(f"kwargs: expected a dict of arguments by their names, found {kwargs!r}.")
    return fn, tuple(args), dict(kwargs or {})


def seconds_given(seconds: float | None, variable: str, name: str = "start_timeout") -> float:
    """Return a number of seconds from an argument, an environment variable, or 600.

    Raises
    ------
    ParamError
        If the argument called ``name``, or the variable, is not a number of seconds.
    """
    given: Any = seconds
    if seconds is None:
        name, given = variable, os.environ.get(variable) or 600
        with contextlib.suppress(ValueError):
            given = float(given)
    if isinstance(given, bool) or not isinstance(given, Real) or not float(given) >= 0:
        raise ParamError(f"{name}: expected seconds, 0 or more, found {given!r}.")
    return float(given)


def whole_number(name: str, value: Any, minimum: int = 0) -> int:
    """Validate and return an argument that must be a whole number of at least ``minimum``.

    Raises
    ------
    ParamError
        If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParamError(f"{name}: expected a whole number, found {value!r}.")
    if value < minimum:
        raise ParamError(f"{name}: expected {minimum} or more, found {value}.")
    return int(value)


def environment_given(env: Any) -> dict[str, str | None]:
    """Validate and return an argument ``env``.

    Raises
    ------
    ParamError
        If it is not a mapping with names of variables as keys, or gives all ranks the same rank.
    """
    if not isinstance(env, Mapping) or not all(isinstance(name, str) for name in env):
        raise ParamError(
            "env: expected a dict of environment variables by their names, such as "
            f"{{'OMP_NUM_THREADS': '1'}}, found {env!r}."
        )
    for name in (*IDENTITY_VARIABLES, *_OF_HOROVOD):
        if env.get(name) is not None:
            raise ParamError(
                f"env: {name} differs between ranks and is set for each of them; found "
                f"{name}={env[name]!r} for all ranks. Leave it out, or set it to None to delete it."
            )
    return dict(env)


def interface_names(nics: Any) -> tuple[str, ...]:
    """Return the names in an argument ``nics``: a comma-separated string or a collection.

    Raises
    ------
    ParamError
        If it is neither.
    """
    if nics is None:
        return ()
    names: list[Any] = [None]
    if isinstance(nics, Iterable):
        names = nics.split(",") if isinstance(nics, str) else list(nics)
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise ParamError(
            "nics: expected the name of a network interface, such as 'eth1', or a collection of "
            f"names; found {nics!r}."
        )
    unique = dict.fromkeys(name.strip() for name in names)
    # A set has another order in each run.
    return tuple(sorted(unique) if isinstance(nics, (set, frozenset)) else unique)
