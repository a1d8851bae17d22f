"""What a model is tried on before training, and what is found out. Runs on the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.sql import DataFrame

from hvd_estimators.exceptions import ShapeError
from hvd_estimators.parquet.columns import Array, Columns
from hvd_estimators.parquet.manifest import ColumnSpec
from hvd_estimators.prepare.column_names import quoted

__all__ = ["DRY_RUN_ROWS", "Trial", "repeated", "rows_of_frame", "try_batches", "zeros"]

# Not a width that models often have, lest rows and columns be taken for each other.
DRY_RUN_ROWS = 11

# A batch of more is not made for a trial.
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class Trial:
    """What a dry run found out; a framework's own may hold more.

    Attributes
    ----------
    output_shapes : sequence of tuple of int, or None
        Shape of one row of each output; None where that is left to the ranks.
    takes_one_row : bool or None
        Whether a batch of one row can train, which batch normalization may prevent; None if that
        is not known.
    """

    output_shapes: Sequence[tuple[int | None, ...]] | None = None
    takes_one_row: bool | None = None


def zeros(specs: Sequence[ColumnSpec]) -> Columns:
    """Return rows of zeros, and of empty text, for columns whose shapes are known."""
    return {spec.name: _zeros(spec) for spec in specs}


def try_batches(dry_run: Callable[[Columns], Trial], columns: Columns, batch_size: int) -> Trial:
    """Run a dry run on a few rows; if these fail, on as many as a batch has.

    Models and training steps may take batches of one size only, and batch normalization fails on
    one row.

    Parameters
    ----------
    dry_run : callable
        Runs some rows through copies of model and loss.
    columns : Columns
        Some rows. They are repeated if they are too few.
    batch_size : int
        Rows of a batch.

    Raises
    ------
    ShapeError
        If both fail: the error of the second.
    """
    few = repeated(columns, max(DRY_RUN_ROWS, len(next(iter(columns.values())))))
    row_bytes = sum(array[:1].nbytes for array in columns.values())
    try:
        return dry_run(few)
    except ShapeError as error:
        failure = error
    if len(next(iter(few.values()))) != batch_size and row_bytes * batch_size <= _MOST_BYTES:
        try:
            return dry_run(repeated(columns, batch_size))
        except ShapeError as error:
            failure = error
    # It keeps its cause.
    failure.args = (f"{failure} dry_run=False leaves out this trial on the driver.",)
    raise failure


def repeated(columns: Columns, rows: int) -> Columns:
    """Return as many rows, beginning again at the first if there are fewer."""
    return {name: array[np.arange(rows) % len(array)] for name, array in columns.items()}


def rows_of_frame(dataset: DataFrame, specs: Sequence[ColumnSpec]) -> Columns | None:
    """Return the first rows of a DataFrame; None if they are too few, or some hold nulls."""
    needed = dataset.select(*(quoted(spec.name) for spec in specs))
    rows: Any = needed.limit(DRY_RUN_ROWS).toPandas()
    if len(rows) < DRY_RUN_ROWS or rows.isna().any(axis=None):
        return None
    return {spec.name: _stack(rows[spec.name], spec) for spec in specs}


def _zeros(spec: ColumnSpec) -> Array:
    shape = (DRY_RUN_ROWS, *spec.shape)
    return np.full(shape, "", object) if spec.kind == "text" else np.zeros(shape, spec.dtype)


def _stack(series: Any, spec: ColumnSpec) -> Array:
    rows = [value.toArray() if hasattr(value, "toArray") else value for value in series]
    return np.stack([np.asarray(row, spec.dtype) for row in rows])
