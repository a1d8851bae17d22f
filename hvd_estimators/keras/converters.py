"""Converters of params that only `KerasEstimator` has. Runs on the driver."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import number, numbers

__all__ = ["class_weights", "environment", "label_weights"]


def environment(name: str, value: Any) -> dict[str, str | None]:
    """Accept a dict of variable to value."""
    if not isinstance(value, Mapping):
        raise ParamError(f"{name}: expected a dict of variable to value, found {value!r}.")
    return {str(key): None if entry is None else str(entry) for key, entry in value.items()}


def label_weights(name: str, value: Any) -> list[float] | dict[str, float]:
    """Accept weights as a list, or as a dict by the names of labels or outputs."""
    if isinstance(value, Mapping):
        return {str(key): numbers(name, weight)[0] for key, weight in value.items()}
    return numbers(name, value)


def class_weights(name: str, value: Any) -> dict[int, float]:
    """Accept a dict of class number to weight."""
    expected = f"{name}: expected a dict of class number (0, 1, ...) to weight"
    if not isinstance(value, Mapping):
        raise ParamError(f"{expected}, found {value!r}.")
    weights = {}
    for key, weight in value.items():
        try:
            index = -1 if isinstance(key, (bool, np.bool_)) else operator.index(key)
        except TypeError:
            index = -1
        if index < 0:
            raise ParamError(f"{expected}, found the class {key!r}.")
        weights[index] = number(0)(f"{name}[{index}]", weight)
        if not np.isfinite(weights[index]):
            raise ParamError(f"{name}[{index}]: expected a finite number, found {weight!r}.")
    return weights
