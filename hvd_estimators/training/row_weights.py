"""How a loss reduces rows, and class weights.

Imports no PySpark.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import DataError, ShapeError

logger = logging.getLogger(__name__)

NO_MEAN = (
    "%s of a few rows is not the mean of the losses of both halves. Several ranks then do not "
    "train as one process. Return {'loss': ..., 'denominator': ...} if it is a mean over "
    "something else than rows, such as class weights. If it compares rows with each other, see "
    "'Contrastive losses over the rows of all ranks' in the page on torch."
)
"""Warning about a loss of torch or Lightning, which its name begins."""


def compare_halves(losses_of: Callable[[slice], Sequence[float | None]], rows: int) -> list[str]:
    """Compare each loss of some rows with its losses of both halves.

    Parameters
    ----------
    losses_of : callable
        Returns the losses of some of the rows; None for one that need not be a mean over rows.
    rows : int
        Number of rows.

    Returns
    -------
    list of str
        For each loss ``"mean"``, ``"sum"`` or ``"other"``. A loss that is not finite, or that
        differs between two calls with the same rows, counts as a mean. Empty if the losses fail on
        some rows: training passes whole batches only.
    """
    half = rows // 2
    if not half:
        return []
    try:
        parts = (slice(rows), slice(rows), slice(half), slice(half, rows))
        losses = list(zip(*map(losses_of, parts), strict=True))
    except Exception as error:
        logger.info("The loss of a few rows could not be compared with its halves: %s", error)
        return []
    known = [[value for value in each if value is not None] for each in losses]
    return [_reduction(each, half / rows) if len(each) == len(parts) else "mean" for each in known]


def _reduction(values: Sequence[float], share: float) -> str:
    """Return how a loss reduces rows, given its values for all rows twice, and for both parts."""
    whole, again, first, second = values
    # A loss may draw random numbers, or depend on the calls before. Then its values tell nothing.
    varies = not math.isclose(whole, again, rel_tol=1e-6, abs_tol=1e-9)
    if varies or not math.isfinite(whole + first + second):
        return "mean"
    mean = share * first + (1 - share) * second
    for reduction, value in (("mean", mean), ("sum", first + second)):
        if math.isclose(whole, value, rel_tol=1e-3, abs_tol=1e-6):
            return reduction
    return "other"


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
