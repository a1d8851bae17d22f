"""Checks of the labels that class weights apply to. Imports no PySpark."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import DataError, ShapeError


def check_classes(name: str, labels: Array) -> None:
    """Check that labels are class numbers or one-hot rows. Runs on the driver.

    Raises
    ------
    ShapeError
        If a row has more than one dimension.
    DataError
        If the labels contain other numbers.
    """
    check_rank(labels)
    if labels.ndim == 2 and labels.shape[1] > 1:
        # Compares with the row's largest value, because labels may be smoothed.
        odd = (labels == labels.max(axis=1, keepdims=True)).sum(axis=1) > 1
    else:
        labels = labels.reshape(-1)
        odd = labels != np.round(labels)
    if odd.any():
        raise DataError(
            f"class_weight: expected class numbers or one-hot rows in column {name!r}, found "
            f"{labels[odd][0].tolist()}. Leave class_weight out, and set sample_weight_col "
            "to a column with the weight of each row."
        )


def check_rank(labels: Any) -> None:
    """Check that labels are numbers, or rows of one dimension."""
    if len(labels.shape) > 2:
        raise ShapeError(
            "class_weight: expected class numbers or one-hot rows as labels, found rows of shape "
            f"{tuple(labels.shape[1:])}. Leave class_weight out, and weigh elements in the loss."
        )
