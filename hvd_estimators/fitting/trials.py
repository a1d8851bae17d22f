"""What a model is tried on before training, and what is found out. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.sql import DataFrame

from hvd_estimators.parquet.columns import Array, Columns
from hvd_estimators.parquet.manifest import ColumnSpec
from hvd_estimators.prepare.column_names import quoted

__all__ = ["DRY_RUN_ROWS", "Trial", "rows_of_frame", "zeros"]

# Not a width that models often have, lest rows and columns be taken for each other.
DRY_RUN_ROWS = 11


@dataclass(frozen=True)
class Trial:
    """What a dry run found out; a framework's own may hold more.

    Attributes
    ----------
    output_shapes : sequence of tuple of int, or None
        Shape of one row of each output; None where that is left to the ranks.
    """

    output_shapes: Sequence[tuple[int, ...]] | None = None


def zeros(specs: Sequence[ColumnSpec]) -> Columns:
    """Return rows of zeros, and of empty text, for columns whose shapes are known."""
    return {spec.name: _zeros(spec) for spec in specs}


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
