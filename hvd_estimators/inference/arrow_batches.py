"""Batches of Arrow columns as arrays, and arrays as columns, without a Python object per row.

Before Spark 4.1 the columns of a batch come to a Python worker as Arrow's, too, and PySpark makes
pandas' of them: a Python object for each row of an array, and NaN of nulls. A public way to leave
them as they are does not exist, so the method that converts them is replaced while a UDF of ours
runs. Where PySpark has no such method the columns come as pandas'.

Imports no PySpark: what predicts without Spark uses it, too.
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


"""As Spark names what is in arrays. Under other names it would cast them."""


_ANY_SIZE = (-1,)


"""The shape of a row that is a vector, whatever its size."""


def to_arrays(
    inference: BatchPredictor, columns: Sequence[pa.Array], is_row: Array | None = None
) -> tuple[dict[str, Array], Array | None]:
    """Return the columns of a batch, and which of its rows these are; None for all of them.

    Parameters
    ----------
    inference : BatchPredictor
        Says which they are, and whether rows with nulls are left out.
    columns : sequence of pa.Array
        The columns.
    is_row : array, optional
        Which rows are none of the empty ones.

    Raises
    ------
    DataError
        If there are nulls that are an error, or lists that differ in length.
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
    """Return what a UDF yields: a column, or several as a struct."""
    names, arrays = list(columns), list(columns.values())
    return arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, names)


def arguments(
    given: Sequence[pa.Array], columns: Sequence[str], text: Sequence[str]
) -> list[pa.Array]:
    """Return what a UDF is called with in SQL as columns: numbers, arrays of them, or text.

    Parameters
    ----------
    given : sequence of pa.Array
        The arguments.
    columns : sequence of str
        What they are, by position.
    text : sequence of str
        Those that may be text.

    Raises
    ------
    ParamError
        If they are not as many.
    ColumnError
        If the model can take no values of such a type.
    """
    check_count(given, columns)
    return [
        _argument(values, name, name in text) for values, name in zip(given, columns, strict=True)
    ]


def valid_rows(column: pa.Array) -> Array | None:
    """Return which rows hold no null, neither themselves nor in an array; None where all do not."""
    valid: Array | None = None
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    if not _is_list(column.type):
        return valid
    offsets, items = _parts(column)
    valid_items = valid_rows(items)
    if valid_items is None:
        return valid
    # A row holds nulls if their number grows from its first entry to its last.
    num_nulls = np.concatenate([[0], np.cumsum(~valid_items)])[offsets]
    holds_none = num_nulls[1:] == num_nulls[:-1]
    return holds_none if valid is None else valid & holds_none


def rows_of(column: pa.Array, wanted: Array) -> pa.Array:
    """Return some rows of a column; of lists a view, where the other rows hold nothing.

    Between large rows there are many empty ones, and Arrow's filter copies.
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

    It may be a view of Arrow's memory, which cannot be written to.

    Parameters
    ----------
    column : pa.Array
        Numbers, booleans, text, lists of one length in all rows (also nested or of a fixed size),
        or Spark's vectors, which become 32-bit floats.
    name : str
        Its name, for errors.

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
    """Return an output of one dimension as what Spark stores dense ML vectors as.

    Parameters
    ----------
    array : array
        The output, of shape ``(rows, size)``.
    valid : array, optional
        Which of the column's rows the output's are; the others are null.
    """
    values = to_column(array, _ANY_SIZE, valid)
    count = len(values)
    numbers = pa.list_(pa.field(_ITEM, pa.float64(), nullable=False))
    places = pa.list_(pa.field(_ITEM, pa.int32(), nullable=False))
    # VectorUDT's, by Spark's names and in its order.
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
    """Return where lists begin among their entries, the end too, and the entries."""
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
    """Return dense and sparse vectors as 32-bit floats."""
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
    # Dense vectors have no indices, so these are the sparse ones' in their order.
    array[rows[~of_dense], indices.to_numpy(zero_copy_only=False)] = numbers[~of_dense]
    return array
