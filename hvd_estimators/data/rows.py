"""Rows of an Arrow table as dicts of Python and NumPy values, for functions of the user.

Training, `transform` and ``load_predictor`` all use it, so a row has the same values in each of
them. Imports no PySpark and no framework.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hvd_estimators.data.types import (
    is_bytes,
    is_list,
    is_list_view,
    is_number,
    is_vector,
    without_decimals,
)

Array = npt.NDArray[Any]

Row = dict[str, Any]

ROWS = "rows"
"""Name of the only column that readers deliver if they deliver a `RowTable`."""


class RowTable:
    """Rows of an Arrow table, selected like the rows of an array. Pickles only its own rows.

    Parameters
    ----------
    table : pyarrow.Table
        The columns.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, rows: slice | Array) -> RowTable:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            return RowTable(self.table.slice(start, max(stop - start, 0)))
        return RowTable(self.table.take(pa.array(rows)))

    def __reduce__(self) -> tuple[Callable[..., RowTable], tuple[Any]]:
        # Arrow's own pickle of a slice contains the whole table.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as writer:
            writer.write_table(self.table)
        return _received, (np.frombuffer(sink.getvalue(), np.uint8),)

    @property
    def nbytes(self) -> int:
        """Size of the rows in bytes."""
        return int(self.table.nbytes)

    def to_rows(self) -> list[Row]:
        """Return a dict for each row; see `column_values` for the values."""
        columns = [column_values(one_array(column)) for column in self.table.columns]
        names = self.table.column_names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _received(content: npt.NDArray[np.uint8]) -> RowTable:
    with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
        return RowTable(reader.read_all())


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array; a single chunk is not copied."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def column_values(column: pa.Array) -> list[Any]:
    """Return a column's values, with None for nulls.

    - An array of numbers or booleans is a NumPy array, which may be edited; with nulls, it is a
      list. Other arrays are lists. ML vectors are arrays of 32-bit floats.
    - A struct is a dict by field, and a map is a dict by key.
    - Decimals are floats, or integers if they have no fraction and 18 digits at most.
    - Timestamps are ``datetime.datetime`` in UTC, without a time zone.
    - Other values are Python's, such as ``int``, ``float``, ``str``, ``bytes``, ``datetime.date``.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if is_list(kind):
        return _lists(column)
    if pa.types.is_map(kind):
        return _maps(column)
    if is_vector(kind):
        return _each(column, map(_vector, column.to_pylist()))
    if pa.types.is_struct(kind):
        fields = map(column_values, column.flatten())
        names = [field.name for field in kind]
        rows = zip(*fields, strict=True) if names else iter([()] * len(column))
        return _each(column, (dict(zip(names, row, strict=True)) for row in rows))
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us"), safe=False)
    column = without_decimals(column)
    if is_number(kind) and not column.null_count:
        return list(column.to_numpy(zero_copy_only=False).tolist())
    return list(column.to_pylist())


def _each(column: pa.Array, values: Any) -> list[Any]:
    """Return values with None in place of the column's nulls."""
    if not column.null_count:
        return list(values)
    valid = column.is_valid().to_pylist()
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]


def _lists(column: pa.Array) -> list[Any]:
    offsets, elements = split_lists(column)
    elements = without_decimals(elements)
    ends = list(itertools.pairwise(offsets.tolist()))
    if not is_number(elements.type):
        values = column_values(elements)
        return _each(column, [values[start:stop] for start, stop in ends])
    if not elements.null_count:
        # A copy, because Arrow's memory is read-only.
        numbers = np.array(elements.to_numpy(zero_copy_only=False))
        return _each(column, [numbers[start:stop] for start, stop in ends])
    numbers = np.array(elements.fill_null(False if _is_boolean(elements) else 0).to_numpy(False))
    nulls = np.append(0, np.cumsum(elements.is_null().to_numpy(False)))[offsets]
    has_null = (np.diff(nulls) > 0).tolist()
    return _each(
        column,
        [
            elements.slice(start, stop - start).to_pylist() if is_mixed else numbers[start:stop]
            for (start, stop), is_mixed in zip(ends, has_null, strict=True)
        ],
    )


def _is_boolean(column: pa.Array) -> bool:
    return bool(pa.types.is_boolean(column.type))


def _maps(column: pa.MapArray) -> list[Any]:
    offsets, entries = split_lists(column)
    keys, items = (column_values(entries.field(part)) for part in range(2))
    ends = itertools.pairwise(offsets.tolist())
    return _each(column, [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in ends])


def _vector(parts: Row | None) -> npt.NDArray[np.float32] | None:
    """Return a vector, given the fields of the struct in which Spark stores it."""
    if parts is None:
        return None
    if parts["indices"] is None:
        return np.array(parts["values"], np.float32)
    vector = np.zeros(parts["size"], np.float32)
    vector[parts["indices"]] = parts["values"]
    return vector


def split_lists(column: pa.Array) -> tuple[Array, pa.Array]:
    """Split a column of lists or bytes into its elements and the offsets of the rows in them.

    The first offset is 0, and the last one is the number of elements. The elements of a null row
    are arbitrary.
    """
    if is_bytes(column.type):
        return _split_bytes(column)
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        elements = column.values.slice(column.offset * size, len(column) * size)
        return np.arange(len(column) + 1) * size, elements
    if is_list_view(column.type):
        # Rows of list views can overlap and can be in any order.
        sizes = column.sizes.to_numpy()
        if column.null_count:
            sizes = np.where(column.is_valid().to_numpy(zero_copy_only=False), sizes, 0)
        return np.append(0, np.cumsum(sizes)), column.flatten()
    offsets = column.offsets.to_numpy()
    if not len(offsets):  # an empty column
        return np.zeros(1, np.int64), column.values.slice(0, 0)
    elements = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return offsets - offsets[0], elements


def _split_bytes(column: pa.Array) -> tuple[Array, pa.Array]:
    """Implement `split_lists` for bytes, which Arrow cannot view as lists."""
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
        return offsets - start, pa.array([], pa.uint8())
    buffer = column.buffers()[data].slice(start, stop - start)
    elements = pa.Array.from_buffers(pa.uint8(), stop - start, [None, buffer])
    return offsets - start, elements


class GivenRows:
    """Rows that a user passes to a predictor, with the values of `column_values`.

    Parameters
    ----------
    rows : sequence of dict
        The rows. Nested sequences of numbers become arrays.
    dtypes : mapping of str to str
        Column to the NumPy name of its numbers in training; "object" for other values.
    """

    def __init__(self, rows: Sequence[Row], dtypes: Mapping[str, str]) -> None:
        self._rows = rows
        self._dtypes = dtypes

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> GivenRows:
        return GivenRows(self._rows[rows], self._dtypes)

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes; other values count as 8 bytes."""
        return sum(getattr(v, "nbytes", 8) for row in self.to_rows() for v in row.values())

    @property
    def table(self) -> pa.Table:
        """The rows as an Arrow table."""
        rows = self.to_rows()
        return pa.table({name: pa.array([row[name] for row in rows]) for name in rows[0]})

    def to_rows(self) -> list[Row]:
        """Return a dict for each row."""
        return [
            {name: _given(value, self._dtypes.get(name, "object")) for name, value in row.items()}
            for row in self._rows
        ]


def _given(value: Any, dtype: str) -> Any:
    if hasattr(value, "toArray"):  # a vector of Spark
        return np.array(value.toArray(), np.float32)
    if isinstance(value, bytearray):
        return bytes(value)
    if hasattr(value, "asDict"):  # a struct of Spark
        value = value.asDict()
    if isinstance(value, Mapping):
        return {key: _given(item, "object") for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, decimal.Decimal):
        return int(value) if dtype.startswith("int") else float(value)
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC).replace(tzinfo=None)
    if isinstance(value, np.ndarray):
        if value.ndim < 2 and value.dtype.kind in "biuf":
            return value.copy() if dtype == "object" else value.astype(dtype)
        value = list(value)
    if not isinstance(value, (list, tuple)):
        return value
    if value and all(isinstance(each, (bool, np.bool_, int, float, np.number)) for each in value):
        return np.array(value, None if dtype == "object" else dtype)
    if not value and dtype != "object":
        return np.array([], dtype)
    return [_given(each, dtype) for each in value]
