"""DataFrames around a UDF: nulls, barriers for the optimizer, and batches bounded by bytes.

Spark fills an Arrow batch with a fixed number of rows, whatever their size, in the JVM's direct
memory. The default is 10,000 (``spark.sql.execution.arrow.maxRecordsPerBatch``), and 10,000 images
take some GB. The setting belongs to the session and is read at each run of a DataFrame, so a
DataFrame cannot have a separate value.

Instead, `pad_large_rows` inserts empty rows after each large row. A row of B bytes and its empty
rows together take up B / `BATCH_BYTES` of a batch's maximum rows. The UDF skips the empty rows, and
they are dropped after the UDF. They must not be dropped before: a filter that Spark pushes
below the UDF must find the same values in the empty rows as in their row. Filters on emptied
columns stay above the UDF.

Columns of plain numbers do not count. Arrow keeps a slot for each of them in each row of a batch,
also in an empty one.
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.prepare.schema import columns_alike, fields_by_name, quoted


def without_nulls(dataset: DataFrame, names: Iterable[str]) -> DataFrame:
    """Return the rows that have no null in some columns, also within arrays.

    Columns that cannot hold nulls by their schema are not checked.
    """
    conditions = []
    fields = fields_by_name(dataset)
    for name in names:
        field, column = fields[name], F.col(quoted(name))
        if field.nullable:
            conditions.append(column.isNotNull())
        if _may_hold_null(field.dataType):
            conditions.append(~_holds_null(column, field.dataType))
    # A chain of "and" over a thousand columns is too deep for Spark's recursion.
    return dataset.where(~F.array_contains(F.array(*conditions), False)) if conditions else dataset


def _may_hold_null(data_type: T.DataType) -> bool:
    if not isinstance(data_type, T.ArrayType):
        return False
    return data_type.containsNull or _may_hold_null(data_type.elementType)


def _holds_null(array: Column, data_type: T.DataType) -> Column:
    """Return whether an array holds a null; the array itself must not be null."""
    assert isinstance(data_type, T.ArrayType)
    element = data_type.elementType
    if not _may_hold_null(element):
        return F.exists(array, lambda value: value.isNull())
    return F.exists(array, lambda value: value.isNull() | _holds_null(value, element))


# Names instead of classes, because not every PySpark has all of these types.
_COLUMNAR = {
    *("BooleanType", "ByteType", "ShortType", "IntegerType", "LongType", "FloatType", "DoubleType"),
    *("DecimalType", "BinaryType", "DateType", "TimestampType", "TimestampNTZType", "VariantType"),
    *("DayTimeIntervalType", "YearMonthIntervalType"),
}


def with_barrier_column(frame: DataFrame, column: Column, name: str) -> DataFrame:
    """Return a DataFrame with a further column; filters on that column stay above it.

    Spark pushes a filter below a projection and puts the column's expression into the filter. A UDF
    would run in the filter, and again in the projection. Here, filters on other columns still go
    below, and the column is computed only if it is needed.

    Parameters
    ----------
    frame : DataFrame
        The other columns.
    column : Column
        Expression of the column.
    name : str
        Name of the column; no other column may have this name.
    """
    # Unpivoting one column keeps the number of rows. The optimizer sees an Expand: it pushes
    # conditions on the Expand's inputs below it, but not conditions on the columns it adds. Added
    # columns that are not used are not computed.
    variable = f"{name}_from"
    return frame.unpivot("*", column.alias("column"), variable, name).drop(variable)


def computed_here(frame: DataFrame) -> DataFrame:
    """Return the same DataFrame; Spark computes its columns at this point of the plan.

    Otherwise, Spark inlines a column into the expression that uses it, if only one does. Rows that
    wait for a UDF's results then hold the inputs of the column's expression.
    """
    name = f"__{uuid.uuid4().hex}"
    return with_barrier_column(frame, F.lit(0), name).drop(name)


def as_rows(frame: DataFrame) -> DataFrame:
    """Return the same DataFrame; an Arrow UDF reads its rows instead of its files' columns.

    Spark 4.3 passes columns of Parquet files on without conversion. It fails if a column beside
    the UDF's columns has a type that is not supported there, such as an ML vector.
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
        # Other string types have a collation.
        return data_type.simpleString() == "string"
    return type(data_type).__name__ in _COLUMNAR


BATCH_BYTES = 32 * 2**20
"""Maximum bytes of values in a batch, unless a single row is larger."""

NUMBERS_BYTES = 128 * 2**20
"""Maximum bytes of the outputs in a batch, if all columns are plain numbers."""

_ITEM_BYTES = 8


# Rows of a known size count as small only if this many of them fit into one row's share of a batch.
# The rows to predict on may be larger than the rows of the training.
_MARGIN = 4


# Text up to this many bytes is copied to the empty rows, so filters on names and paths can go below
# the UDF. Filters on columns with longer text may remove empty rows.
_SHORT_BYTES = 256

_TEXT = (T.StringType, T.BinaryType)


@dataclass(frozen=True)
class PaddedFrame:
    """DataFrame with empty rows between its rows.

    Attributes
    ----------
    frame : DataFrame
        The rows with all columns, and the empty rows.
    marker : str
        Name of a column that is 0 for rows and greater than 0 for empty rows.
    emptied : tuple of StructField
        Columns without values in empty rows. Text columns are not included, although long text is
        emptied, too.
    """

    frame: DataFrame
    marker: str
    emptied: tuple[T.StructField, ...] = ()

    @property
    def is_row(self) -> Column:
        """Condition that is false for empty rows."""
        return F.col(self.marker) == 0

    def without_empty_rows(self, column: Column, name: str) -> DataFrame:
        """Return the rows without the empty rows, with a further column.

        The column is computed for all rows, empty rows included. Filters on the column do not see
        its values for empty rows.
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
    """Insert empty rows after large rows; return None if all rows are small.

    Parameters
    ----------
    dataset : DataFrame
        The DataFrame to predict on.
    columns : sequence of str
        Columns that the UDF takes.
    known_sizes : mapping
        Column to the count of numbers in a row, if known.
    output_items : int
        Count of numbers that the UDF returns for a row.
    """
    max_rows = int(str(dataset.sparkSession.conf.get(_MAX_ROWS)))
    if max_rows <= 0:
        return None  # a batch holds all rows of a partition
    fields = fields_by_name(dataset)
    large_types = {
        name: fields[name].dataType for name in columns if _may_be_large(fields[name].dataType)
    }
    counted_as_one = (BATCH_BYTES if large_types else NUMBERS_BYTES) / max_rows
    sizes = [None if isinstance(t, _TEXT) else known_sizes.get(n) for n, t in large_types.items()]
    if None not in sizes:
        num_items = output_items + sum(size for size in sizes if size)
        if num_items * _MARGIN * _ITEM_BYTES <= counted_as_one:
            return None
    num_bytes = [_num_bytes(F.col(quoted(name)), kind) for name, kind in large_types.items()]
    # A chain of "+" over a thousand columns is too deep for Spark's recursion.
    output_bytes = F.lit(output_items * _ITEM_BYTES).cast("long")
    total = F.aggregate(F.array(*num_bytes, output_bytes), F.lit(0).cast("long"), operator.add)
    count = F.least(F.ceil(total / F.lit(counted_as_one)), F.lit(max_rows))
    marker = f"__empty_{uuid.uuid4().hex}"
    numbers = F.sequence(F.lit(0), F.greatest(count, F.lit(1)).cast("int") - 1)
    frame = dataset.select("*", F.explode(numbers).alias(marker))
    is_row = PaddedFrame(frame, marker).is_row
    alike = columns_alike(dataset)
    large = [
        field
        for field in dataset.schema
        if _may_be_large(field.dataType) and len(alike[field.name]) == 1
    ]
    emptied = {}
    for field in large:
        column, is_kept = F.col(quoted(field.name)), is_row
        if isinstance(field.dataType, _TEXT):
            is_kept = is_row | (F.octet_length(column) <= _SHORT_BYTES)
        value = F.when(is_kept, column).otherwise(_empty(field))
        emptied[field.name] = value.alias(field.name, metadata=field.metadata)
    nested = tuple(field for field in large if not isinstance(field.dataType, _TEXT))
    if emptied:
        frame = computed_here(frame.withColumns(emptied))
    return PaddedFrame(frame, marker, nested)


_MAX_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def _may_be_large(data_type: T.DataType) -> bool:
    large = (T.ArrayType, T.MapType, T.StructType, T.StringType, T.BinaryType, T.UserDefinedType)
    return isinstance(data_type, large)


def _num_bytes(column: Column, data_type: T.DataType) -> Column:
    """Return the approximate bytes of a value in a batch."""
    if isinstance(data_type, VectorUDT):
        raw = F.unwrap_udt(column)
        length = F.coalesce(raw["size"], F.size(raw["values"]))
        return _or_none(length) * _ITEM_BYTES
    if isinstance(data_type, T.ArrayType):
        # The first nested array represents the others: all must have the same length.
        first = F.try_element_at(column, F.lit(1))
        return _or_none(F.size(column)) * _num_bytes(first, data_type.elementType)
    if isinstance(data_type, _TEXT):
        return _or_none(F.octet_length(column))
    return F.lit(_ITEM_BYTES).cast("long")


def _or_none(length: Column) -> Column:
    return F.greatest(F.coalesce(length, F.lit(0)), F.lit(0)).cast("long")


def _empty(field: T.StructField) -> Column:
    """Return a column's value in empty rows: no null in arrays and text that are not nullable."""
    data_type: Any = field.dataType
    if field.nullable or isinstance(data_type, T.UserDefinedType):
        return F.lit(None)
    if isinstance(data_type, T.ArrayType):
        return F.array().cast(data_type)
    if isinstance(data_type, _TEXT):
        return F.lit("").cast(data_type)
    return F.lit(None)
