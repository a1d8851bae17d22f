"""Calls of the user's functions with only the arguments that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["call_with_known", "call_with_leading"]


def call_with_known(function: Callable[..., Any], offered: dict[str, Any]) -> Any:
    """Call a function with only those offered arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**offered)
    return function(**{p.name: offered[p.name] for p in parameters if p.name in offered})


def call_with_leading(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with the first arguments, as many as it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*arguments)
    taken = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return function(*arguments[:taken])
