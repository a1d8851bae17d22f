"""Arrow columns converted to arrays and back, without a Python object per row.

Imports no PySpark, because predictions without Spark use this module, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array
from hvd_estimators.data.types import without_decimals
from hvd_estimators.inference.arguments import DENSE, VECTOR, check_count, is_no_number
from hvd_estimators.inference.batch import BatchPredictor, has_nulls, is_ragged
from hvd_estimators.inference.output_columns import to_column

__all__ = ["arguments", "rows_of", "to_array", "to_arrays", "to_result", "to_vectors", "valid_rows"]


_ITEM = "element"
"""Spark's name for the elements of arrays; Spark would cast lists with another name."""


_ANY_SIZE = (-1,)
"""Shape of a row that is a vector of any size."""


def to_arrays(
    inference: BatchPredictor, columns: Sequence[pa.Array], is_row: Array | None = None
) -> tuple[dict[str, Array], Array | None]:
    """Return the columns of a batch as arrays, and a mask of the rows in these arrays.

    The mask is None if the arrays hold all rows of the batch.

    Parameters
    ----------
    inference : BatchPredictor
        Names the columns; its ``keeps_nulls`` leaves rows with nulls out of the arrays.
    columns : sequence of pa.Array
        The columns.
    is_row : array, optional
        Mask that is false for empty rows.

    Raises
    ------
    DataError
        If there are nulls without ``keeps_nulls``, or if lists differ in length.
    """
    masks = [] if is_row is None else [is_row]
    for name, column in zip(inference.columns, columns, strict=True):
        holds_none = valid_rows(column)
        if holds_none is None:
            continue
        if (
            not inference.keeps_nulls
            and not (holds_none if is_row is None else holds_none | ~is_row).all()
        ):
            raise has_nulls(name)
        masks.append(holds_none)
    valid = np.logical_and.reduce(masks) if masks else None
    if valid is None or valid.all():
        valid = None
    else:
        columns = [rows_of(column, valid) for column in columns]
    arrays = {
        name: to_array(column, name)
        for name, column in zip(inference.columns, columns, strict=True)
    }
    return arrays, valid


def to_result(columns: Mapping[str, pa.Array]) -> pa.Array:
    """Return a UDF's result for a batch: one column, or a struct of several."""
    names, arrays = list(columns), list(columns.values())
    return arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, names)


def arguments(
    given: Sequence[pa.Array], columns: Sequence[str], text: Sequence[str]
) -> list[pa.Array]:
    """Convert the arguments of a UDF in SQL to columns: numbers, arrays of numbers, or text.

    Parameters
    ----------
    given : sequence of pa.Array
        The arguments.
    columns : sequence of str
        Names of the arguments, by position.
    text : sequence of str
        Names of the arguments that may be text.

    Raises
    ------
    ParamError
        If the number of arguments is wrong.
    ColumnError
        If the model cannot take values of an argument's type.
    """
    check_count(given, columns)
    return [
        _argument(values, name, name in text) for values, name in zip(given, columns, strict=True)
    ]


def valid_rows(column: pa.Array) -> Array | None:
    """Return a mask of the rows without nulls, also within arrays; None if there are no nulls."""
    valid: Array | None = None
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    if not _is_list(column.type):
        return valid
    offsets, items = _parts(column)
    valid_items = valid_rows(items)
    if valid_items is None:
        return valid
    # A row holds nulls if the running count of nulls grows from its first entry to its last.
    num_nulls = np.concatenate([[0], np.cumsum(~valid_items)])[offsets]
    holds_none = num_nulls[1:] == num_nulls[:-1]
    return holds_none if valid is None else valid & holds_none


def rows_of(column: pa.Array, wanted: Array) -> pa.Array:
    """Return the wanted rows of a column.

    For lists, the result is a view if all other rows hold no entries. This avoids the copy that
    Arrow's filter makes. Large rows have many empty rows between them.
    """
    if pa.types.is_struct(column.type):
        parts = [rows_of(part, wanted) for part in column.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(column.type))
    if pa.types.is_list(column.type):
        offsets, items = _parts(column)
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        if not np.diff(offsets)[~wanted].any() and not is_null[wanted].any():
            ends = np.append(offsets[:-1][wanted], offsets[-1:])
            return pa.ListArray.from_arrays(pa.array(ends), items).cast(column.type)
    return column.filter(pa.array(wanted))


def to_array(column: pa.Array, name: str) -> Array:
    """Return a column without nulls as an array, rows first.

    The array may be a read-only view of Arrow's memory.

    Parameters
    ----------
    column : pa.Array
        Numbers, booleans, text, lists of one length in all rows (also nested or of a fixed size),
        or Spark's vectors, which become 32-bit floats.
    name : str
        Name of the column, for errors.

    Raises
    ------
    DataError
        If lists differ in length.
    """
    if pa.types.is_struct(column.type):
        return _vectors(column, name)
    if not _is_list(column.type):
        array: Array = column.to_numpy(zero_copy_only=False)
        return array
    offsets, items = _parts(column)
    size = _size_of_all(np.diff(offsets), name)
    array = to_array(items, name)
    return array.reshape(len(column), size, *array.shape[1:])


def to_vectors(array: Array, valid: Array | None = None) -> pa.Array:
    """Return an output of one dimension in the form in which Spark stores dense ML vectors.

    Parameters
    ----------
    array : array
        The output, of shape ``(rows, size)``.
    valid : array, optional
        Mask of the column's rows that the output has; the other rows are null.
    """
    values = to_column(array, _ANY_SIZE, valid)
    count = len(values)
    numbers = pa.list_(pa.field(_ITEM, pa.float64(), nullable=False))
    places = pa.list_(pa.field(_ITEM, pa.int32(), nullable=False))
    # The fields of Spark's VectorUDT, in Spark's order.
    parts = {
        pa.field("type", pa.int8(), nullable=False): pa.array(np.full(count, DENSE, np.int8)),
        pa.field("size", pa.int32()): pa.nulls(count, pa.int32()),
        pa.field("indices", places): pa.nulls(count, places),
        pa.field("values", numbers): values.cast(numbers),
    }
    mask = None if valid is None else pa.array(~valid)
    return pa.StructArray.from_arrays([*parts.values()], fields=[*parts], mask=mask)


def _argument(column: pa.Array, name: str, is_text: bool) -> pa.Array:
    kinds, found = pa.types, column.type
    if kinds.is_struct(found) and {field.name for field in found} == set(VECTOR):
        return column
    numbers, depth = found, 0
    while _is_list(numbers):
        numbers, depth = numbers.value_type, depth + 1
    if kinds.is_decimal(numbers):
        return without_decimals(column)
    if kinds.is_integer(numbers) or kinds.is_floating(numbers) or kinds.is_boolean(numbers):
        return column
    is_any_text = (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary)
    if depth == 0 and is_text and any(is_kind(found) for is_kind in is_any_text):
        return column
    raise is_no_number(name, f"holds {_described(found)}")


def _described(data_type: pa.DataType) -> str:
    kinds = pa.types
    if kinds.is_struct(data_type):
        return f"a struct of {', '.join(field.name for field in data_type)}"
    if kinds.is_temporal(data_type):
        return "dates or times"
    if kinds.is_string(data_type) or kinds.is_large_string(data_type):
        return "text"
    if kinds.is_binary(data_type) or kinds.is_large_binary(data_type):
        return "bytes"
    return f"values of type {data_type}"


def _is_list(data_type: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(data_type) for is_kind in kinds)


def _parts(column: pa.Array) -> tuple[Array, pa.Array]:
    """Return the offsets of lists among their entries, the end included, and the entries."""
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        entries = column.values.slice(column.offset * size, len(column) * size)
        return np.arange(len(column) + 1) * size, entries
    offsets = column.offsets.to_numpy()
    if not len(offsets):
        return np.zeros(1, np.int64), column.values.slice(0, 0)
    entries = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    return offsets - offsets[0], entries


def _size_of_all(sizes: Array, name: str) -> int:
    if not len(sizes):
        return 0
    if (sizes != sizes[0]).any():
        raise is_ragged(name)
    return int(sizes[0])


def _vectors(column: pa.StructArray, name: str) -> Array:
    """Return dense and sparse vectors as one array of 32-bit floats."""
    fields: dict[str, Any] = {
        column.type.field(index).name: field for index, field in enumerate(column.flatten())
    }
    is_dense = fields["type"].to_numpy(zero_copy_only=False) == DENSE
    starts, values = _parts(fields["values"])
    numbers = values.to_numpy(zero_copy_only=False)
    lengths = np.diff(starts)
    if is_dense.all():
        size = _size_of_all(lengths, name)
        return numbers.astype(np.float32).reshape(len(column), size)
    sizes = fields["size"].fill_null(0).to_numpy(zero_copy_only=False)
    size = _size_of_all(np.where(is_dense, lengths, sizes), name)
    array = np.zeros((len(column), size), np.float32)
    rows = np.repeat(np.arange(len(column)), lengths)
    of_dense = np.repeat(is_dense, lengths)
    array[is_dense] = numbers[of_dense].reshape(-1, size)
    _, indices = _parts(fields["indices"])
    # Dense vectors have no indices, so all indices belong to sparse vectors, in row order.
    array[rows[~of_dense], indices.to_numpy(zero_copy_only=False)] = numbers[~of_dense]
    return array
