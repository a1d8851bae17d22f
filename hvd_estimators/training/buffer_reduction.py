"""Reduction over the ranks of buffers that training computes from batches.

In torch and Lightning, a buffer is a tensor of the module that is not a parameter. In Keras, it is
a variable that is not trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvd_estimators.exceptions import ParamError, did_you_mean

__all__ = ["BUFFER_REDUCTIONS", "find_buffers", "parse_buffer_reduction"]

BUFFER_REDUCTIONS = ("mean", "max", "min", "sum", "rank0")


def parse_buffer_reduction(name: str, value: Any) -> dict[str, str]:
    """Validate a dict of buffer name to reduction."""
    if not isinstance(value, Mapping):
        raise ParamError(
            f"{name}: expected a dict of buffer name to reduction, such as "
            f"{{'running_max': 'max'}}, found {value!r}."
        )
    for buffer, reduction in value.items():
        if not isinstance(buffer, str):
            raise ParamError(f"{name}: expected names of buffers, found {buffer!r}.")
        if reduction not in BUFFER_REDUCTIONS:
            raise ParamError(
                f"{name}: expected one of {', '.join(map(repr, BUFFER_REDUCTIONS))} for "
                f"{buffer!r}, found {reduction!r}."
            )
    return dict(value)


def find_buffers(
    reductions: Mapping[str, str], buffers: Mapping[str, str], separator: str
) -> dict[str, str]:
    """Return the reduction of each buffer that the param names.

    A name is that of a buffer, or its last parts. For example, ``running_max`` matches all buffers
    of this name, in any layer. If two names match a buffer, the longer one applies.

    Parameters
    ----------
    reductions : mapping
        The value of the param.
    buffers : mapping
        The model's buffers: name to kind (``"float"``, ``"int"``, ``"bool"`` or ``"complex"``).
    separator : str
        Separates the parts of names.

    Raises
    ------
    ParamError
        If a name does not match a buffer, or the reduction does not apply to the buffer's kind.
    """
    found: dict[str, str] = {}
    for name in sorted(reductions, key=len):
        named = _named(name, buffers, separator)
        if not named:
            listed = ", ".join(map(repr, buffers)) or "none"
            raise ParamError(
                f"buffer_reduction: the model has no buffer {name!r}. Its buffers: {listed}."
                f"{did_you_mean(name, buffers)}"
            )
        for buffer in named:
            _check_kind(buffer, buffers[buffer], reductions[name])
            found[buffer] = reductions[name]
    return found


def _named(name: str, buffers: Iterable[str], separator: str) -> list[str]:
    return [b for b in buffers if b == name or b.endswith(f"{separator}{name}")]


def _check_kind(buffer: str, kind: str, reduction: str) -> None:
    unusable = {"bool": ("mean", "sum"), "complex": ("max", "min")}.get(kind, ())
    if reduction in unusable:
        usable = [r for r in BUFFER_REDUCTIONS if r not in unusable]
        raise ParamError(
            f"buffer_reduction: {buffer!r} is {kind}, which has no {reduction!r}. Set one of "
            f"{', '.join(map(repr, usable))}."
        )
