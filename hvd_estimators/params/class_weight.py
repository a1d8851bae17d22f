"""Param for the weights of classes. Runs on the driver."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_estimators.exceptions import ParamError
from hvd_estimators.params import DeclaredParams, number, param


def _class_weights(name: str, value: Mapping[int, float]) -> dict[int, float]:
    """Accept a dict of class numbers to weights."""
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


class ClassWeightParams(DeclaredParams):
    """Param for weights of rows by their class."""

    class_weight = param(
        "Dict of class number to weight, for a single label of class numbers or one-hot rows. "
        "In training, a row's weight is its class's weight times that of sample_weight_col. "
        "Other classes have the weight 1.",
        convert=_class_weights,
    )

    def _check_class_weight(self, label_cols: Sequence[str]) -> None:
        """Check that there is one label if classes have weights."""
        if self.getOrDefault("class_weight") and len(label_cols) != 1:
            raise ParamError(
                f"class_weight: expected a single label, found {label_cols}. Set "
                "sample_weight_col, or weights in the losses."
            )
