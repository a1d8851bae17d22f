"""Batches of PySpark's pandas UDFs, converted to arrays and back. Runs on executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from hvd_estimators.data.arrays import Array
from hvd_estimators.inference.arguments import in_columns_form as arguments
from hvd_estimators.inference.batch import BatchPredictor, has_nulls, is_ragged

__all__ = ["arguments", "to_arrays", "to_result"]


def to_arrays(
    inference: BatchPredictor, series: Sequence[pd.Series], is_row: Array | None = None
) -> tuple[dict[str, Array], Array | None]:
    """Return the columns of a batch as arrays, and a mask of the rows in these arrays.

    The mask is None if the arrays hold all rows of the batch.

    Parameters
    ----------
    inference : BatchPredictor
        Names the columns; its ``keeps_nulls`` leaves rows with nulls out of the arrays.
    series : sequence of pd.Series
        The columns. If `BatchPredictor.flagged` names columns, one more series follows. It holds
        the position of the first flagged column that is null in each row, or -1.
    is_row : array, optional
        Mask that is false for empty rows.

    Raises
    ------
    DataError
        If there are nulls without ``keeps_nulls``, or if arrays differ in length.
    """
    valid = _valid_rows(inference, series, is_row)
    if valid is not None:
        series = [column[valid] for column in series]
    if inference.flagged:
        *series, positions = series
        nulls = positions[positions >= 0]
        if len(nulls):
            raise has_nulls(inference.flagged[int(nulls.iloc[0])])
    arrays = {}
    for name, column in zip(inference.columns, series, strict=True):
        if not inference.keeps_nulls and name not in inference.flagged and column.isna().any():
            raise has_nulls(name)
        arrays[name] = _to_array(column, name)
    return arrays, valid


class _Converted(pd.Series):
    """Arrow column that PySpark writes unchanged: NaN as a number, null as null.

    PySpark converts lists by applying a function to each list, which makes a Python object of each
    number. This column needs no conversion.
    """

    @property
    def _constructor(self) -> Any:
        return _Converted

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Return the column unchanged."""
        return self


class _ConvertedFields(pd.DataFrame):
    """Arrow columns as the fields of a struct."""

    @property
    def _constructor_sliced(self) -> Any:
        return _Converted


def to_result(columns: Mapping[str, pa.Array]) -> pd.Series | pd.DataFrame:
    """Return Arrow columns as a pandas UDF's result: one as a series, several as a frame.

    The columns must have the UDF's types.
    """
    series = {
        name: _Converted(pd.arrays.ArrowExtensionArray(column)) for name, column in columns.items()
    }
    return next(iter(series.values())) if len(series) == 1 else _ConvertedFields(series)


def _valid_rows(
    inference: BatchPredictor, series: Sequence[pd.Series], is_row: Array | None = None
) -> Array | None:
    """Return a mask of the rows of a batch to predict on; None for all rows.

    Parameters
    ----------
    inference : BatchPredictor
        Its ``keeps_nulls`` excludes rows with nulls.
    series : sequence of pd.Series
        Arguments of the UDF.
    is_row : array, optional
        Mask that is false for empty rows.
    """
    masks = [] if is_row is None else [is_row]
    if inference.keeps_nulls:
        if inference.flagged:
            *series, positions = series
            masks.append((positions < 0).to_numpy())
        others = (
            column
            for name, column in zip(inference.columns, series, strict=True)
            if name not in inference.flagged
        )
        masks += (column.notna().to_numpy() for column in others)
    valid = np.logical_and.reduce(masks) if masks else None
    return None if valid is None or valid.all() else valid


def _to_array(series: pd.Series, name: str) -> Array:
    if series.dtype != object or not len(series) or isinstance(series.iloc[0], (str, bytes)):
        return series.to_numpy()
    return _stacked(series.to_list(), name)


def _stacked(rows: list[Any], name: str) -> Array:
    """Return arrays, or arrays of arrays, as one array."""
    try:
        lengths = set(map(len, rows))
    except TypeError:  # None has no length
        raise has_nulls(name) from None
    if len(lengths) != 1:
        raise is_ragged(name)
    # Several times as fast as np.stack, which first makes a view of each row.
    items = np.concatenate(rows)
    if items.dtype == object:
        items = _stacked(items.tolist(), name)
    return items.reshape(len(rows), *lengths, *items.shape[1:])
