"""Columns past which Spark's optimizer takes nothing. Runs on the driver."""

from __future__ import annotations

import uuid

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

__all__ = ["as_rows", "computed_here", "with_opaque"]

# By name, since not every PySpark has all of these.
_COLUMNAR = {
    *("BooleanType", "ByteType", "ShortType", "IntegerType", "LongType", "FloatType", "DoubleType"),
    *("DecimalType", "BinaryType", "DateType", "TimestampType", "TimestampNTZType", "VariantType"),
    *("DayTimeIntervalType", "YearMonthIntervalType"),
}


def with_opaque(frame: DataFrame, column: Column, name: str) -> DataFrame:
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
    return with_opaque(frame, F.lit(0), name).drop(name)


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
