"""What each batch counts for in a step over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvd_estimators.data.columns import num_rows

__all__ = ["WeighedBatches"]


class WeighedBatches:
    """Training batches, each with the factor that weighs its rank's gradient.

    The mean over ranks of ``factor * gradient(mean loss of the batch)``, added up over the
    batches of a step and divided by their number, is the gradient of the mean loss over all rows
    of the step. The factor is 1 where all batches count for the same.

    Parameters
    ----------
    batches : iterator of mapping
        The rank's batches, in any framework's form: column name to rows.
    global_sizes : iterator of int, or None
        Rows of each batch over all ranks, see `DataModule.global_train_sizes`.
    size : int
        Number of ranks.
    passes_per_step : int
        Batches of one step of the optimizer.
    weight_col : str or None
        Column of sample weights; without it rows count for one.
    sum_over_ranks : callable
        Adds up a number of each rank, exactly in 64 bits. Called by all ranks in the same steps,
        and only where the plan does not tell what a step counts for.
    """

    def __init__(
        self,
        batches: Iterator[Mapping[str, Any]],
        global_sizes: Iterator[int] | None,
        size: int,
        passes_per_step: int,
        weight_col: str | None,
        sum_over_ranks: Callable[[float], float],
    ) -> None:
        self._batches = batches
        # With sample weights the sum of a step depends on the rows.
        self._sizes = None if weight_col else global_sizes
        self._size = size
        self._passes = passes_per_step
        self._weight_col = weight_col
        self._sum_over_ranks = sum_over_ranks

    def next_window(self, count: int) -> list[tuple[Mapping[str, Any], float]]:
        """Return the batches between two steps of the optimizer."""
        window = list(itertools.islice(self._batches, count))
        if self._sizes is not None:
            total = float(sum(itertools.islice(self._sizes, count)))
            weights = [float(num_rows(columns)) for columns in window]
        else:
            weights = [self._weight(columns) for columns in window]
            total = self._sum_over_ranks(sum(weights))
        share = self._size * self._passes / total if total else 0.0
        return [(columns, weight * share) for columns, weight in zip(window, weights, strict=True)]

    def _weight(self, columns: Mapping[str, Any]) -> float:
        if self._weight_col is None:
            return float(num_rows(columns))
        return float(columns[self._weight_col].sum())
