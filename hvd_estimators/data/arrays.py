"""Conversion of Arrow columns to NumPy arrays, without a Python loop over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.partitions import partition_column
from hvd_estimators.data.types import is_bytes, is_level, is_list_view, without_decimals
from hvd_estimators.exceptions import DataError

__all__ = ["Array", "Columns", "num_rows", "table_to_columns", "take"]

Array = npt.NDArray[Any]
Columns = Mapping[str, Array]
"""Column name to array. The first axis of every array is the rows, with equal length."""


def table_to_columns(
    table: pa.Table, specs: Sequence[ColumnSpec], file: str = ""
) -> dict[str, Array]:
    """Convert a table to arrays of shape ``(rows, *spec.shape)``.

    Parameters
    ----------
    table : pyarrow.Table
        Contains each spec's stored columns.
    specs : sequence of ColumnSpec
        The requested columns, in the order of the result.
    file : str
        Path of the file that contains all rows. The values of partition columns come from this
        path.

    Raises
    ------
    DataError
        If a column contains nulls, or a row whose length differs from the spec.
    ColumnError
        If the path lacks the value of a partition column.
    """
    return {
        spec.name: partition_column(spec, file, table.num_rows)
        if spec.kind == "partition"
        else _convert(table, spec)
        for spec in specs
    }


def num_rows(columns: Columns) -> int:
    """Return the number of rows in the columns."""
    return len(next(iter(columns.values())))


def take(columns: Columns, indices: Array | slice) -> dict[str, Array]:
    """Select rows of every column."""
    return {name: array[indices] for name, array in columns.items()}


def _convert(table: pa.Table, spec: ColumnSpec) -> Array:
    if spec.kind == "sparse":
        return _densify(table, spec)
    column = _one_chunk(table, spec.name)
    if spec.kind == "text":
        return _text(column, spec.name)
    values = column
    for size in spec.shape:
        lengths, elements = _lists(values, spec.name)
        if len(lengths) and not (lengths == size).all():
            found = sorted({int(lengths.min()), int(lengths.max())} - {size})
            remedy = "Pad or cut the arrays to one length."
            if is_bytes(values.type):
                remedy = "Pad the bytes to one length, or store compressed images decoded."
            raise DataError(
                f"Column {spec.name!r} is ragged: expected {size} elements in every row, "
                f"found rows of {found[0]}. {remedy}"
            )
        values = elements
    return _scalars(values, spec.name).reshape((len(column), *spec.shape))


def _densify(table: pa.Table, spec: ColumnSpec) -> Array:
    indices_name, values_name = spec.stored_names
    lengths, indices = _lists(_one_chunk(table, indices_name), indices_name)
    _, elements = _lists(_one_chunk(table, values_name), values_name)
    values = _scalars(elements, values_name)
    dense = np.zeros((table.num_rows, spec.width), dtype=values.dtype)
    rows = np.repeat(np.arange(table.num_rows), lengths)
    dense[rows, _scalars(indices, indices_name)] = values
    return dense


def _one_chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    _refuse_nulls(name, column.null_count)
    if column.num_chunks == 0:
        return pa.array([], type=column.type)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _lists(column: pa.Array, name: str) -> tuple[Array, pa.Array]:
    """Return the row lengths of a list (or bytes) column and its concatenated elements.

    The column must not contain nulls, because a null in a fixed-size list column has arbitrary
    elements.
    """
    column = _decoded(column, name)
    if is_bytes(column.type):
        lengths, values = _bytes(column)
    elif pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        values = column.values.slice(column.offset * size, len(column) * size)
        lengths = np.full(len(column), size)
    elif is_list_view(column.type):
        # Rows of list views can overlap and can be in any order.
        lengths, values = column.sizes.to_numpy(), column.flatten()
    else:
        offsets = column.offsets.to_numpy()
        values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        lengths = np.diff(offsets)
    while not values.null_count and is_level(values.type):
        values = values.field(0)
    if values.null_count:
        raise DataError(
            f"Column {name!r} holds arrays with null elements ({values.null_count} of them); "
            "fill them before training."
        )
    return lengths, values


def _bytes(column: pa.Array) -> tuple[Array, pa.Array]:
    """Implement `_lists` for bytes, which Arrow cannot view as lists."""
    if pa.types.is_fixed_size_binary(column.type):
        size, data = column.type.byte_width, 1
        offsets = (column.offset + np.arange(len(column) + 1)) * size
    else:
        if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
            column = column.cast(pa.large_binary())
        dtype, data = np.int64 if pa.types.is_large_binary(column.type) else np.int32, 2
        # An empty column may have no offsets.
        offsets = np.frombuffer(column.buffers()[1] or b"", dtype)[column.offset :]
        offsets = offsets[: len(column) + 1] if len(column) else np.zeros(1, dtype)
    start, stop = int(offsets[0]), int(offsets[-1])
    if start == stop:
        return np.diff(offsets), pa.array([], pa.uint8())
    buffer = column.buffers()[data].slice(start, stop - start)
    return np.diff(offsets), pa.Array.from_buffers(pa.uint8(), stop - start, [None, buffer])


def _scalars(column: pa.Array, name: str) -> Array:
    return without_decimals(_decoded(column, name)).to_numpy(zero_copy_only=False)


def _text(column: pa.Array, name: str) -> Array:
    """Return text as objects; rows with the same dictionary value share one object."""
    if not pa.types.is_dictionary(column.type):
        return column.to_numpy(zero_copy_only=False)
    values = column.dictionary.to_numpy(zero_copy_only=False)
    rows = values[column.indices.to_numpy()] if len(column) else values[:0]
    _refuse_nulls(name, sum(row is None for row in rows) if column.dictionary.null_count else 0)
    return rows


def _decoded(column: pa.Array, name: str) -> pa.Array:
    if not pa.types.is_dictionary(column.type):
        return column
    decoded = column.dictionary_decode()
    _refuse_nulls(name, decoded.null_count)  # a dictionary value can be null
    return decoded


def _refuse_nulls(name: str, nulls: int) -> None:
    if nulls:
        raise DataError(f"Column {name!r} holds {nulls} nulls; fill or drop them before training.")
