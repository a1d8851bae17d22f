"""Weights in training: of batches in a step over all ranks, and of classes.

Imports no PySpark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array, num_rows
from hvd_estimators.exceptions import DataError, ShapeError
from hvd_estimators.loading.collate import CollatedBatch


class WeightedBatches:
    """Training batches, each with the factor by which its rank's gradient is weighted.

    The number of rows determines a batch's weight, even if there are sample weights: a loss is
    ``sum(weight * loss) / rows``. Take the mean over ranks of ``factor * gradient(loss of the
    batch)``, sum it over the batches of a step, and divide by their number. The result is the
    gradient of the loss over all rows of the step. The factor is 1 if all batches have the same
    number of rows.

    Parameters
    ----------
    batches : iterator of mapping or CollatedBatch
        The rank's batches, in the form of any framework: column name to rows.
    global_sizes : iterator of int, or None
        Rows of each batch over all ranks, see `DataModule.global_train_sizes`.
    size : int
        Number of ranks.
    passes_per_step : int
        Batches per optimizer step.
    sum_over_ranks : callable
        Sums one number per rank, exactly in 64 bits. All ranks call it in the same steps, and only
        if a user's data module does not provide ``global_sizes``.
    """

    def __init__(
        self,
        batches: Iterator[Mapping[str, Any] | CollatedBatch],
        global_sizes: Iterator[int] | None,
        size: int,
        passes_per_step: int,
        sum_over_ranks: Callable[[float], float],
    ) -> None:
        self._batches = batches
        self._sizes = global_sizes
        self._size = size
        self._passes = passes_per_step
        self._sum_over_ranks = sum_over_ranks

    def next_window(self, count: int) -> list[tuple[Any, float]]:
        """Return the batches of the next optimizer step, each with its factor."""
        window = list(itertools.islice(self._batches, count))
        rows = [
            batch.rows if isinstance(batch, CollatedBatch) else num_rows(batch) for batch in window
        ]
        if self._sizes is not None:
            total = float(sum(itertools.islice(self._sizes, count)))
        else:
            total = self._sum_over_ranks(float(sum(rows)))
        share = self._size * self._passes / total if total else 0.0
        return [(columns, n * share) for columns, n in zip(window, rows, strict=True)]


def reduction_of(
    whole: float, halves: tuple[float, float], rows: tuple[int, int], tolerance: float = 1e-3
) -> str | None:
    """Return how a loss reduces the rows of a batch, given the losses of both halves.

    Parameters
    ----------
    whole : float
        The batch's loss.
    halves : tuple of float
        The losses of both halves.
    rows : tuple of int
        The rows of both halves.
    tolerance : float
        Relative error of the losses, such as for a random loss.

    Returns
    -------
    str or None
        ``"mean"``, ``"sum"``, or None for neither. A loss that is not finite counts as a mean.
    """
    first, second = halves
    mean = (first * rows[0] + second * rows[1]) / sum(rows)
    if not math.isfinite(whole + first + second):
        return "mean"
    for reduction, value in (("mean", mean), ("sum", first + second)):
        if math.isclose(whole, value, rel_tol=tolerance, abs_tol=1e-6):
            return reduction
    return None


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
