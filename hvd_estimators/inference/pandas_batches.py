"""Batches as PySpark's pandas UDFs take and give them, to arrays and back. Runs on executors."""

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
    """Return the columns of a batch, and which of its rows these are; None for all of them.

    Parameters
    ----------
    inference : BatchPredictor
        Says which they are, and whether rows with nulls are left out.
    series : sequence of pd.Series
        The columns, and where `BatchPredictor.flagged` names some the position of the first of
        these that is null in each row, or -1.
    is_row : array, optional
        Which rows are none of the empty ones.

    Raises
    ------
    DataError
        If there are nulls that are an error, or arrays that differ in length.
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
    """A column of Arrow's: it is written as it is, NaN as a number and null as null.

    PySpark converts lists by applying a function to each, which makes Python objects of all numbers
    in them. There is nothing to convert here.
    """

    @property
    def _constructor(self) -> Any:
        return _Converted

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Return the column."""
        return self


class _ConvertedFields(pd.DataFrame):
    """Columns of Arrow's, as the fields of a struct."""

    @property
    def _constructor_sliced(self) -> Any:
        return _Converted


def to_result(columns: Mapping[str, pa.Array]) -> pd.Series | pd.DataFrame:
    """Return columns of Arrow's as what a pandas UDF yields: one as a series, several as a frame.

    They have the UDF's types.
    """
    series = {
        name: _Converted(pd.arrays.ArrowExtensionArray(column)) for name, column in columns.items()
    }
    return next(iter(series.values())) if len(series) == 1 else _ConvertedFields(series)


def _valid_rows(
    inference: BatchPredictor, series: Sequence[pd.Series], is_row: Array | None = None
) -> Array | None:
    """Return which rows of a batch are predicted on; None for all of them.

    Parameters
    ----------
    inference : BatchPredictor
        Says whether there may be rows with nulls, which are not.
    series : sequence of pd.Series
        What the UDF was given.
    is_row : array, optional
        Which rows are none of the empty ones.
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
    """Return arrays, or arrays of arrays, as one."""
    try:
        lengths = set(map(len, rows))
    except TypeError:  # None has no length
        raise has_nulls(name) from None
    if len(lengths) != 1:
        raise is_ragged(name)
    # Several times as fast as np.stack, which makes a view of each row first.
    items = np.concatenate(rows)
    if items.dtype == object:
        items = _stacked(items.tolist(), name)
    return items.reshape(len(rows), *lengths, *items.shape[1:])
