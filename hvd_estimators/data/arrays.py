"""Conversion of Arrow columns to NumPy arrays and back, without a Python loop over rows.

Training, `transform` and ``load_predictor`` all use it. Imports no PySpark and no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hvd_estimators.data.manifest import ColumnSpec, JoinedSpec
from hvd_estimators.data.rows import RowTable, column_values, one_array, split_lists
from hvd_estimators.data.types import (
    DENSE,
    is_bytes,
    is_level,
    is_list,
    is_vector,
    partition_column,
    without_decimals,
)
from hvd_estimators.exceptions import DataError

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
    return {spec.name: _convert(table, spec, file) for spec in specs}


def num_rows(columns: Columns) -> int:
    """Return the number of rows in the columns."""
    return len(next(iter(columns.values())))


def as_array(values: Any) -> Array:
    """Return values as an array, text as objects: NumPy's own types lose null bytes at the end."""
    array = np.asarray(values)
    is_text = array.dtype.kind in "SU" and not isinstance(values, np.ndarray)
    return np.asarray(values, object) if is_text else array


def take(columns: Columns, indices: Array | slice) -> dict[str, Array]:
    """Select rows of every column."""
    return {name: array[indices] for name, array in columns.items()}


def _convert(table: pa.Table, spec: ColumnSpec, file: str) -> Any:
    if isinstance(spec, JoinedSpec):
        if spec.kind == "rows":
            return RowTable(pa.table({m.name: _as_stored(table, m, file) for m in spec.members}))
        members = [_convert(table, member, file) for member in spec.members]
        return np.stack(members, axis=1, dtype=spec.dtype)
    if spec.kind == "partition":
        return partition_column(spec, file, table.num_rows)
    if spec.kind == "sparse":
        indices_name, values_name = spec.stored_names
        offsets, indices = _elements(_one_chunk(table, indices_name), indices_name)
        _, elements = _elements(_one_chunk(table, values_name), values_name)
        values = to_array(elements, values_name)
        return _scatter(offsets, to_array(indices, indices_name), values, spec.width)
    if spec.kind == "any":
        values = np.empty(table.num_rows, object)
        for row, value in enumerate(column_values(one_array(table.column(spec.name)))):
            values[row] = value
        return values
    column = _one_chunk(table, spec.name)
    if spec.kind == "text":
        return _text(column, spec.name)
    # Other files may have the column with a wider type.
    return to_array(column, spec.name, spec.shape).astype(spec.dtype, copy=False)


def _as_stored(table: pa.Table, spec: ColumnSpec, file: str) -> pa.Array | pa.ChunkedArray:
    """Return a column in Arrow's format: vectors as lists, numbers with the type of all files."""
    if spec.kind not in ("partition", "sparse"):
        column = table.column(spec.name)
        return column.cast(_wide(column.type, spec), safe=False)
    array = np.ascontiguousarray(_convert(table, spec, file))
    return to_lists(pa.array(array.reshape(-1)), array.shape)


def _wide(data_type: pa.DataType, spec: ColumnSpec) -> pa.DataType:
    """Return a file's type with numbers of the column's type, and without dictionaries."""
    if pa.types.is_dictionary(data_type):
        return data_type.value_type
    if is_list(data_type):
        element = data_type.value_field.with_type(_wide(data_type.value_type, spec))
        if element == data_type.value_field:
            return data_type
        if pa.types.is_fixed_size_list(data_type):
            return pa.list_(element, data_type.list_size)
        return (pa.large_list if pa.types.is_large_list(data_type) else pa.list_)(element)
    is_number = pa.types.is_integer(data_type) or pa.types.is_floating(data_type)
    is_number = is_number and spec.dtype != "object"
    return pa.from_numpy_dtype(np.dtype(spec.dtype)) if is_number else data_type


def _one_chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    _reject_nulls(name, column.null_count)
    return one_array(column)


def to_array(column: pa.Array, name: str, shape: Sequence[int] | None = None) -> Array:
    """Return a column without nulls as an array, rows first.

    The array may be a read-only view of Arrow's memory.

    Parameters
    ----------
    column : pa.Array
        Numbers, booleans, decimals (which become doubles), text, lists of one length in all rows
        (also nested), or Spark's vectors (which become 32-bit floats).
    name : str
        Name of the column, for errors.
    shape : sequence of int, optional
        Shape of a row; bytes with a shape become arrays of unsigned 8-bit integers. Default: the
        lengths of the first row's lists.

    Raises
    ------
    DataError
        If lists differ in length, or if a null is left in them.
    """
    if is_vector(column.type):
        return from_vectors(column, name)
    column = _decoded(column, name)
    if not (is_list(column.type) if shape is None else shape):
        array: Array = without_decimals(column).to_numpy(zero_copy_only=False)
        return array
    offsets, elements = _elements(column, name)
    size = _common_size(np.diff(offsets), name, column.type, None if shape is None else shape[0])
    array = to_array(elements, name, None if shape is None else shape[1:])
    return array.reshape(len(column), size, *array.shape[1:])


def first_row_shape(table: pa.Table, spec: ColumnSpec) -> tuple[int, ...]:
    """Return the shape of a column's first row.

    Inner lists have the length of the first one; later reads reject others.

    Raises
    ------
    DataError
        If the row contains a null or an empty list.
    """
    shape: list[int] = []
    values = _one_chunk(table.slice(0, 1), spec.name)
    for _ in spec.shape:
        _, values = _elements(values.slice(0, 1), spec.name)
        if not len(values):
            raise DataError(
                f"Column {spec.name!r} holds empty lists; expected lists of one length. Pad them, "
                "or drop these rows.",
                column=spec.name,
            )
        shape.append(len(values))
    return tuple(shape)


def _elements(column: pa.Array, name: str) -> tuple[Array, pa.Array]:
    """Return `split_lists` of a column without nulls; raise `DataError` for null elements."""
    offsets, elements = split_lists(_decoded(column, name))
    while not elements.null_count and is_level(elements.type):
        elements = elements.field(0)
    if elements.null_count:
        raise DataError(
            f"Column {name!r} holds arrays with null elements ({elements.null_count} of them); "
            "fill them before training.",
            column=name,
        )
    return offsets, elements


def _common_size(
    sizes: Array, name: str, data_type: pa.DataType | None = None, expected: int | None = None
) -> int:
    """Return the common length of all rows; raise `DataError` if a row has another length."""
    size = expected
    if size is None:
        size = int(sizes[0]) if len(sizes) else 0
    if len(sizes) and (sizes != size).any():
        other = min({int(sizes.min()), int(sizes.max())} - {size})
        remedy = (
            f"Pad or cut the arrays to one length, or set padding={{{name!r}: 0}} or "
            "collate_fn, which take rows of any length."
        )
        if data_type is not None and is_bytes(data_type):
            remedy = "Pad the bytes to one length, or store compressed images decoded."
        raise DataError(
            f"Column {name!r} is ragged: expected {size} elements in every row, found rows of "
            f"{other}.",
            column=name,
            remedy=remedy,
        )
    return size


def _scatter(offsets: Array, indices: Array, values: Array, width: int) -> Array:
    """Return a matrix with the given values at some indices of each row, and zeros elsewhere."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    matrix = np.zeros((len(offsets) - 1, width), values.dtype)
    matrix[rows, indices] = values
    return matrix


def from_vectors(column: pa.StructArray, name: str, dtype: npt.DTypeLike = np.float32) -> Array:
    """Return a column of dense and sparse vectors without nulls as one array.

    Parameters
    ----------
    column : pa.StructArray
        The vectors, all of one size, as Spark stores them.
    name : str
        Name of the column, for errors.
    dtype : dtype
        Type of the array; Spark's vectors hold 64-bit floats.

    Raises
    ------
    DataError
        If vectors differ in size.
    """
    names = (field.name for field in column.type)
    fields = dict(zip(names, column.flatten(), strict=True))
    is_dense = fields["type"].to_numpy(zero_copy_only=False) == DENSE
    offsets, elements = split_lists(fields["values"])
    values = elements.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    lengths = np.diff(offsets)
    if is_dense.all():
        return values.reshape(len(column), _common_size(lengths, name))
    sizes = fields["size"].fill_null(0).to_numpy(zero_copy_only=False)
    size = _common_size(np.where(is_dense, lengths, sizes), name)
    _, indices = split_lists(fields["indices"])
    # Dense vectors have no indices, so all indices belong to sparse vectors, in row order.
    positions = np.arange(len(values)) - np.repeat(offsets[:-1], lengths)
    positions[np.repeat(~is_dense, lengths)] = indices.to_numpy(zero_copy_only=False)
    return _scatter(offsets, positions, values, size)


def _text(column: pa.Array, name: str) -> Array:
    """Return text as objects; rows with the same dictionary value share one object."""
    if not pa.types.is_dictionary(column.type):
        return column.to_numpy(zero_copy_only=False)
    values = column.dictionary.to_numpy(zero_copy_only=False)
    rows = values[column.indices.to_numpy()] if len(column) else values[:0]
    _reject_nulls(name, sum(row is None for row in rows) if column.dictionary.null_count else 0)
    return rows


def _decoded(column: pa.Array, name: str) -> pa.Array:
    if not pa.types.is_dictionary(column.type):
        return column
    decoded = column.dictionary_decode()
    _reject_nulls(name, decoded.null_count)  # a dictionary value can be null
    return decoded


def _reject_nulls(name: str, nulls: int) -> None:
    if nulls:
        raise DataError(
            f"Column {name!r} holds {nulls} nulls; fill or drop them before training.", column=name
        )


def valid_rows(column: pa.Array) -> Array | None:
    """Return a mask of the rows without nulls, also within arrays; None if there are no nulls."""
    valid: Array | None = None
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    if not is_list(column.type):
        return valid
    offsets, elements = split_lists(column)
    valid_elements = valid_rows(elements)
    if valid_elements is None:
        return valid
    # A row holds nulls if the running count of nulls grows from its first entry to its last.
    num_nulls = np.append(0, np.cumsum(~valid_elements))[offsets]
    has_valid_elements = num_nulls[1:] == num_nulls[:-1]
    return has_valid_elements if valid is None else valid & has_valid_elements


def rows_of(column: pa.Array, selected: Array) -> pa.Array:
    """Return the selected rows of a column.

    For lists, the result is a view if all other rows hold no entries. This avoids the copy that
    Arrow's filter makes. Large rows have many empty rows between them.
    """
    if pa.types.is_struct(column.type):
        parts = [rows_of(part, selected) for part in column.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(column.type))
    if pa.types.is_list(column.type):
        offsets, elements = split_lists(column)
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        if not np.diff(offsets)[~selected].any() and not is_null[selected].any():
            list_offsets = np.append(offsets[:-1][selected], offsets[-1:])
            return pa.ListArray.from_arrays(pa.array(list_offsets), elements).cast(column.type)
    return column.filter(pa.array(selected))


_ELEMENT = "element"
"""Spark's name for the elements of arrays; Spark would cast lists with another name."""

_MOST_ELEMENTS = 2**31 - 1
"""Elements that the offsets of Arrow's usual lists can count."""


def to_lists(elements: pa.Array, shape: Sequence[int], valid: Array | None = None) -> pa.Array:
    """Return a column of lists, nested for more than two dimensions.

    Parameters
    ----------
    elements : pa.Array
        The elements of an array in C order.
    shape : sequence of int
        Shape of that array, rows first.
    valid : array, optional
        Mask of the column's rows that the array has; the other rows are null.
    """
    column = elements
    for axis in range(len(shape) - 1, 0, -1):
        rows, size = math.prod(shape[:axis]), shape[axis]
        is_large = rows * size > _MOST_ELEMENTS
        of_list, lists = (
            (pa.large_list, pa.LargeListArray) if is_large else (pa.list_, pa.ListArray)
        )
        # A null offset at the start of a list makes the list null.
        of_rows = valid if axis == 1 else None
        starts = np.arange(rows + 1) if of_rows is None else np.append(0, np.cumsum(of_rows))
        offsets = pa.array(
            (starts * size).astype(np.int64 if is_large else np.int32),
            mask=None if of_rows is None else np.append(~of_rows, False),
        )
        data_type = of_list(pa.field(_ELEMENT, column.type))
        column = lists.from_arrays(offsets, column).cast(data_type)
    return column


def to_vectors(array: Array, valid: Array | None = None) -> pa.Array:
    """Return an array of shape ``(rows, size)`` as Spark stores dense ML vectors.

    Parameters
    ----------
    array : array
        The vectors.
    valid : array, optional
        Mask of the column's rows that the array has; the other rows are null.
    """
    doubles = np.ascontiguousarray(array, np.float64)
    values = to_lists(pa.array(doubles.reshape(-1)), doubles.shape, valid)
    count = len(values)
    numbers = pa.list_(pa.field(_ELEMENT, pa.float64(), nullable=False))
    index_type = pa.list_(pa.field(_ELEMENT, pa.int32(), nullable=False))
    # The fields of Spark's VectorUDT, in Spark's order.
    fields = {
        pa.field("type", pa.int8(), nullable=False): pa.array(np.full(count, DENSE, np.int8)),
        pa.field("size", pa.int32()): pa.nulls(count, pa.int32()),
        pa.field("indices", index_type): pa.nulls(count, index_type),
        pa.field("values", numbers): values.cast(numbers),
    }
    mask = None if valid is None else pa.array(~valid)
    return pa.StructArray.from_arrays([*fields.values()], fields=[*fields], mask=mask)
