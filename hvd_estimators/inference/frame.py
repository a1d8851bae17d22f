"""DataFrames around a UDF: nulls, barriers for the optimizer, and batches bounded by bytes.

Spark fills an Arrow batch with a number of rows (10,000 by default, see
``spark.sql.execution.arrow.maxRecordsPerBatch``), whatever their size, in the JVM's direct memory:
10,000 images are some GB. That number is the session's, read whenever a DataFrame is run, so no
DataFrame has one of its own. What it can have are more rows: after each row come as many empty ones
as make its share of a batch what its bytes are of `BATCH_BYTES`. The UDF skips the empty rows, and
they are dropped behind it. They must not be dropped before: a filter that goes below the UDF has to
find the same in them as in their row. Filters on what is emptied in them stay above.
"""

from __future__ import annotations

import functools
import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.data.arrays import Array
from hvd_estimators.loading.transform import EditedField
from hvd_estimators.prepare.schema import clashing, quoted, stored_column, vector_width

__all__ = [
    "BATCH_BYTES",
    "PaddedFrame",
    "as_rows",
    "computed_here",
    "first_null",
    "known_shapes",
    "null_tracked",
    "pad_large_rows",
    "rows_of_zeros",
    "with_barrier_column",
    "without_null",
    "without_nulls",
]

_ROWS = 2


"""As many as show which dimension counts the rows."""


def rows_of_zeros(
    columns: Sequence[str], shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str]
) -> dict[str, Array] | None:
    """Return two rows of zeros as a UDF would be given them.

    Parameters
    ----------
    columns : sequence of str
        The columns.
    shapes : mapping
        Column to the shape of a row, as far as that is known.
    dtypes : mapping
        Column to the name of its NumPy type; "object" for text, of which there are no zeros.

    Returns
    -------
    dict of str to array, or None
        None if the shape or type of a column is not known.
    """
    zeros = {}
    for name in columns:
        if name not in shapes or dtypes.get(name, "object") == "object":
            return None
        zeros[name] = np.zeros((_ROWS, *shapes[name]), dtypes[name])
    return zeros


def known_shapes(
    columns: Sequence[str],
    metadata: Mapping[str, Mapping[str, Any]],
    edited: Sequence[EditedField] = (),
    dataset: DataFrame | None = None,
    allow_text: bool = False,
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return what is known of columns without running anything: their shapes and their types.

    Parameters
    ----------
    columns : sequence of str
        The columns.
    metadata : mapping
        What is known from training, see `column_metadata`.
    edited : sequence of EditedField
        What a transformation makes of columns, where they come as it leaves them.
    dataset : DataFrame, optional
        What is predicted on.
    allow_text : bool
        Whether columns may be text.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name in columns:
        # Models of horovod.spark say less.
        entry = metadata.get(name, {})
        if isinstance(entry.get("shape"), (list, tuple)) and None not in entry["shape"]:
            shapes[name] = tuple(entry["shape"])
        if "dtype" in entry:
            dtypes[name] = entry["dtype"]
    for field in edited:
        if field.name in columns:
            shapes.pop(field.name, None)
            dtypes[field.name] = field.dtype
            if field.shape is not None and None not in field.shape:
                shapes[field.name] = tuple(size for size in field.shape if size is not None)
    for name in columns if dataset is not None else ():
        assert dataset is not None
        spec = stored_column(dataset, name, allow_text=allow_text).spec
        dtypes[name] = spec.dtype
        # Where the DataFrame's type says more than the training's, or something else.
        width = vector_width(dataset, name)
        if not spec.shape:
            shapes[name] = ()
        elif spec.kind == "vector" and width:
            shapes[name] = (width,)
        elif len(shapes.get(name, ())) != len(spec.shape):
            shapes.pop(name, None)
    return shapes, dtypes


_FLOATS = (T.FloatType, T.DoubleType, T.DecimalType)


_EXACT = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.BooleanType)


def null_tracked(dataset: DataFrame | None, names: Iterable[str], keeps: bool) -> tuple[str, ...]:
    """Return the columns whose nulls `first_null` has to tell, as pandas cannot.

    To pandas NaN and null are the same; and integers with nulls among them are floats to it.

    Parameters
    ----------
    dataset : DataFrame or None
        Has the columns; None where types are not known, and nothing is told.
    names : iterable of str
        What a model is given.
    keeps : bool
        Whether rows with nulls are kept: otherwise a null is an error, whatever the others become.
    """
    if dataset is None:
        return ()
    schema = dataset.schema
    return tuple(
        name
        for name in names
        if isinstance(schema[name].dataType, _FLOATS)
        or (keeps and schema[name].nullable and isinstance(schema[name].dataType, _EXACT))
    )


def first_null(names: Sequence[str]) -> Column:
    """Return the position of the first of these columns that is null in a row, or -1."""
    positions = [
        F.when(F.col(quoted(name)).isNull(), F.lit(position)) for position, name in enumerate(names)
    ]
    return F.coalesce(*positions, F.lit(-1))


def without_null(column: Column, data_type: T.DataType) -> Column:
    """Return a flagged column as its type is to pandas: nulls are zero where that has none."""
    return F.coalesce(column, F.lit(0).cast(data_type)) if isinstance(data_type, _EXACT) else column


def without_nulls(dataset: DataFrame, names: Iterable[str]) -> DataFrame:
    """Return the rows that have no null in some columns, nor within an array there.

    Columns that hold none by their schema are not looked at.
    """
    conditions = []
    for name in names:
        field, column = dataset.schema[name], F.col(quoted(name))
        if field.nullable:
            conditions.append(column.isNotNull())
        if _may_hold_null(field.dataType):
            conditions.append(~_holds_null(column, field.dataType))
    return dataset.where(functools.reduce(operator.and_, conditions)) if conditions else dataset


def _may_hold_null(data_type: T.DataType) -> bool:
    if not isinstance(data_type, T.ArrayType):
        return False
    return data_type.containsNull or _may_hold_null(data_type.elementType)


def _holds_null(array: Column, data_type: T.DataType) -> Column:
    """Return whether an array that is not null holds a null."""
    assert isinstance(data_type, T.ArrayType)
    element = data_type.elementType
    if not _may_hold_null(element):
        return F.exists(array, lambda value: value.isNull())
    return F.exists(array, lambda value: value.isNull() | _holds_null(value, element))


# By name, since not every PySpark has all of these.
_COLUMNAR = {
    *("BooleanType", "ByteType", "ShortType", "IntegerType", "LongType", "FloatType", "DoubleType"),
    *("DecimalType", "BinaryType", "DateType", "TimestampType", "TimestampNTZType", "VariantType"),
    *("DayTimeIntervalType", "YearMonthIntervalType"),
}


def with_barrier_column(frame: DataFrame, column: Column, name: str) -> DataFrame:
    """Return a DataFrame with a further column; filters on it stay above it.

    Spark pushes a filter below a projection with the column's expression in it: a UDF would run in
    the filter, and once more. Here filters on other columns do go below, and the column is computed
    only where it is needed.

    Parameters
    ----------
    frame : DataFrame
        The other columns.
    column : Column
        What the column holds.
    name : str
        Its name, which no other column has.
    """
    # An unpivot of one column leaves as many rows as there were. To the optimizer it is an Expand,
    # past which it takes conditions on the columns that an Expand is given, and not on those that
    # it makes; and it computes none of these that nothing asks for.
    variable = f"{name}_from"
    return frame.unpivot("*", column.alias("column"), variable, name).drop(variable)


def computed_here(frame: DataFrame) -> DataFrame:
    """Return the same DataFrame; what its columns are made of does not go further up.

    Spark puts what a column holds into the expression that uses it, where that is one, and a UDF's
    rows then wait for its results with what the column is made of.
    """
    name = f"__{uuid.uuid4().hex}"
    return with_barrier_column(frame, F.lit(0), name).drop(name)


def as_rows(frame: DataFrame) -> DataFrame:
    """Return the same DataFrame; an Arrow UDF is given its rows and not the columns of its files.

    Spark 4.3 hands columns of Parquet on as they are, and fails where one beside the UDF's has a
    type that it has forgotten there, such as an ML vector.
    """
    if all(_is_columnar(field.dataType) for field in frame.schema):
        return frame
    return computed_here(frame)


def _is_columnar(data_type: T.DataType) -> bool:
    if isinstance(data_type, T.StructType):
        return all(_is_columnar(field.dataType) for field in data_type)
    if isinstance(data_type, T.ArrayType):
        return _is_columnar(data_type.elementType)
    if isinstance(data_type, T.MapType):
        return _is_columnar(data_type.keyType) and _is_columnar(data_type.valueType)
    if isinstance(data_type, T.StringType):
        # Others have a collation.
        return data_type.simpleString() == "string"
    return type(data_type).__name__ in _COLUMNAR


BATCH_BYTES = 32 * 2**20


"""Bytes of values that a batch has at most, or a single row."""


_ITEM_BYTES = 8


# Rows of a known size are taken for small ones if they are much smaller than those that count for
# one: what is predicted on may be larger than what was trained on.
_MARGIN = 4


# Text of so many bytes is copied to the empty rows, so that filters on names and paths go below the
# UDF. On columns that hold longer text they may take empty rows away.
_SHORT_BYTES = 256


_TEXT = (T.StringType, T.BinaryType)


@dataclass(frozen=True)
class PaddedFrame:
    """A DataFrame with empty rows in it.

    Attributes
    ----------
    frame : DataFrame
        The rows, all columns included, and empty ones.
    marker : str
        A column of it that is 0 for the former and more for the latter.
    emptied : tuple of StructField
        The columns that hold nothing in empty rows. Text does if it is long.
    """

    frame: DataFrame
    marker: str
    emptied: tuple[T.StructField, ...] = ()

    @property
    def is_row(self) -> Column:
        """Whether a row is none of the empty ones."""
        return F.col(self.marker) == 0

    def without_empty_rows(self, column: Column, name: str) -> DataFrame:
        """Return the rows alone, with a further column that is computed of all, empty ones too.

        No filter on it sees what it holds for empty rows.
        """
        hidden, is_row = f"{name}_hidden", f"{name}_is_row"
        frame = self.frame.select("*", column.alias(hidden))
        frame = with_barrier_column(frame, self.is_row, is_row)
        frame = with_barrier_column(frame, F.col(hidden), name)
        shown = {}
        for index, field in enumerate(self.emptied):
            made = f"{name}_{index}"
            frame = with_barrier_column(frame, F.col(quoted(field.name)), made)
            shown[field.name] = F.col(made).alias(field.name, metadata=field.metadata)
        frame = frame.withColumns(shown) if shown else frame
        made_names = [f"{name}_{index}" for index in range(len(shown))]
        return frame.where(is_row).drop(self.marker, hidden, is_row, *made_names)


def pad_large_rows(
    dataset: DataFrame,
    columns: Sequence[str],
    known_sizes: Mapping[str, int | None],
    output_items: int,
) -> PaddedFrame | None:
    """Return a DataFrame with empty rows in it; None where rows are small.

    Parameters
    ----------
    dataset : DataFrame
        What is predicted on.
    columns : sequence of str
        What a UDF is given of it.
    known_sizes : mapping
        Column to the numbers in a row, where that is known.
    output_items : int
        Numbers that the UDF returns for a row.
    """
    max_rows = int(str(dataset.sparkSession.conf.get(_MAX_ROWS)))
    if max_rows <= 0:
        return None  # all rows of a partition, however many
    counted_as_one = BATCH_BYTES / max_rows
    types = {name: dataset.schema[name].dataType for name in columns}
    sizes = [_known_items(types[name], known_sizes.get(name)) for name in columns]
    if None not in sizes:
        known = sum(size for size in sizes if size is not None) + output_items
        if known * _ITEM_BYTES * _MARGIN <= counted_as_one:
            return None
    total = F.lit(output_items * _ITEM_BYTES)
    for name, data_type in types.items():
        total = total + _num_bytes(F.col(quoted(name)), data_type)
    count = F.least(F.ceil(total / F.lit(counted_as_one)), F.lit(max_rows))
    marker = f"__empty_{uuid.uuid4().hex}"
    numbers = F.sequence(F.lit(0), F.greatest(count, F.lit(1)).cast("int") - 1)
    frame = dataset.select("*", F.explode(numbers).alias(marker))
    is_row = PaddedFrame(frame, marker).is_row
    large = [
        field
        for field in dataset.schema
        if _may_be_large(field.dataType)
        and len(clashing(dataset, field.name, dataset.columns)) == 1
    ]
    emptied = {}
    for field in large:
        column, kept = F.col(quoted(field.name)), is_row
        if isinstance(field.dataType, _TEXT):
            kept = is_row | (F.octet_length(column) <= _SHORT_BYTES)
        value = F.when(kept, column).otherwise(_empty(field))
        emptied[field.name] = value.alias(field.name, metadata=field.metadata)
    nested = tuple(field for field in large if not isinstance(field.dataType, _TEXT))
    if emptied:
        frame = computed_here(frame.withColumns(emptied))
    return PaddedFrame(frame, marker, nested)


_MAX_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def _known_items(data_type: T.DataType, known: int | None) -> int | None:
    """Return how many numbers a value is; None if that is not known."""
    if isinstance(data_type, _TEXT):
        return None
    return known if _may_be_large(data_type) else 1


def _may_be_large(data_type: T.DataType) -> bool:
    large = (T.ArrayType, T.MapType, T.StructType, T.StringType, T.BinaryType, T.UserDefinedType)
    return isinstance(data_type, large)


def _num_bytes(column: Column, data_type: T.DataType) -> Column:
    """Return about how many bytes a value has in a batch."""
    if isinstance(data_type, VectorUDT):
        raw = F.unwrap_udt(column)
        length = F.coalesce(raw["size"], F.size(raw["values"]))
        return _or_none(length) * _ITEM_BYTES
    if isinstance(data_type, T.ArrayType):
        # Of nested arrays the first one tells: all have to have the same length.
        first = F.try_element_at(column, F.lit(1))
        return _or_none(F.size(column)) * _num_bytes(first, data_type.elementType)
    if isinstance(data_type, _TEXT):
        return _or_none(F.octet_length(column))
    return F.lit(_ITEM_BYTES).cast("long")


def _or_none(length: Column) -> Column:
    return F.greatest(F.coalesce(length, F.lit(0)), F.lit(0)).cast("long")


def _empty(field: T.StructField) -> Column:
    """Return what an empty row has, lest a column that has no nulls seem to have some."""
    data_type: Any = field.dataType
    if field.nullable or isinstance(data_type, T.UserDefinedType):
        return F.lit(None)
    if isinstance(data_type, T.ArrayType):
        return F.array().cast(data_type)
    if isinstance(data_type, _TEXT):
        return F.lit("").cast(data_type)
    return F.lit(None)
