"""Arrow columns to NumPy arrays, without a Python loop over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import DataError

__all__ = ["Array", "Columns", "concatenate", "num_rows", "table_to_columns", "take"]

Array = npt.NDArray[Any]
Columns = Mapping[str, Array]
"""Column name to array; the first axis counts rows and is equally long in all of them."""


def table_to_columns(table: pa.Table, specs: Sequence[ColumnSpec]) -> dict[str, Array]:
    """Convert a table to arrays of shape ``(rows, *spec.shape)``.

    Parameters
    ----------
    table : pyarrow.Table
        Holds each spec's stored columns.
    specs : sequence of ColumnSpec
        The columns that are wanted, in the order of the result.

    Raises
    ------
    DataError
        If a column holds nulls, or a row whose length is not the spec's.
    """
    return {spec.name: _convert(table, spec) for spec in specs}


def num_rows(columns: Columns) -> int:
    """Return the number of rows that the columns hold."""
    return len(next(iter(columns.values())))


def take(columns: Columns, indices: Array | slice) -> dict[str, Array]:
    """Select rows of every column."""
    return {name: array[indices] for name, array in columns.items()}


def concatenate(parts: Sequence[Columns]) -> dict[str, Array]:
    """Put the rows of several parts one after another."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _convert(table: pa.Table, spec: ColumnSpec) -> Array:
    if spec.kind == "sparse":
        return _densify(table, spec)
    column = _one_chunk(table, spec.name)
    values = column
    for size in spec.shape:
        lengths, values = _lists(values, spec.name)
        if len(lengths) and not (lengths == size).all():
            found = sorted({int(lengths.min()), int(lengths.max())} - {size})
            raise DataError(
                f"Column {spec.name!r} is ragged: expected {size} elements in every row, "
                f"found rows of {found[0]}. Pad or cut the arrays to one length."
            )
    return _scalars(values).reshape((len(column), *spec.shape))


def _densify(table: pa.Table, spec: ColumnSpec) -> Array:
    indices_name, values_name = spec.stored_names
    lengths, indices = _lists(_one_chunk(table, indices_name), indices_name)
    _, elements = _lists(_one_chunk(table, values_name), values_name)
    values = _scalars(elements)
    dense = np.zeros((table.num_rows, spec.width), dtype=values.dtype)
    rows = np.repeat(np.arange(table.num_rows), lengths)
    dense[rows, _scalars(indices)] = values
    return dense


def _one_chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    if column.null_count:
        raise DataError(
            f"Column {name!r} holds {column.null_count} nulls; fill or drop them before training."
        )
    if column.num_chunks == 0:
        return pa.array([], type=column.type)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _lists(column: pa.Array, name: str) -> tuple[Array, pa.Array]:
    """Return the lengths of a list column's rows, and their elements one after another."""
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        values = column.values.slice(column.offset * size, len(column) * size)
        lengths = np.full(len(column), size)
    else:
        offsets = column.offsets.to_numpy()
        values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        lengths = np.diff(offsets)
    if values.null_count:
        raise DataError(
            f"Column {name!r} holds arrays with null elements ({values.null_count} of them); "
            "fill them before training."
        )
    return lengths, values


def _scalars(column: pa.Array) -> Array:
    return column.to_numpy(zero_copy_only=False)
