"""UDFs for SQL: names, the session and result types on the driver, arguments on executors.

`transform` converts columns in the JVM, where their types are known. The argument types of a
SQL UDF are known only when a batch arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators.data.types import is_list, is_vector
from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.inference.batch import is_scalar
from hvd_estimators.inference.output_columns import OutputType

_TYPES: dict[str, type[T.DataType]] = {
    made().simpleString(): made
    for made in (
        *(T.ByteType, T.ShortType, T.IntegerType, T.LongType),
        *(T.FloatType, T.DoubleType, T.BooleanType, T.StringType),
    )
}
"""Spark's name of each type of `OutputType.element`, to its class."""


def active_session() -> SparkSession:
    """Return the active session, in which UDFs are created.

    Raises
    ------
    ParamError
        If there is no active session.
    DependencyError
        If the session uses Spark Connect, and this PySpark is too old for Spark Connect.
    """
    session = SparkSession.getActiveSession()
    if session is None:
        raise ParamError(
            "as_udf: there is no active Spark session. Start one with "
            "SparkSession.builder.getOrCreate()."
        )
    is_connect(session)
    return session


def checked_name(session: SparkSession, name: Any) -> str:
    """Check and return the name of a SQL function.

    Raises
    ------
    ParamError
        If the name is not text or is blank, or if it would hide one of Spark's own functions.
    """
    if not isinstance(name, str) or not name.strip():
        raise ParamError(f"name: expected a name of a function, found {name!r}.")
    own = session.sql("show system functions").collect() if name.isidentifier() else ()
    if name.lower() in {row[0].lower() for row in own}:
        raise ParamError(
            f"name: {name!r} is one of Spark's own functions, which would be hidden. Set another "
            "name."
        )
    return name


def spark_type(kind: OutputType | None, shape: tuple[int, ...]) -> T.DataType:
    """Return Spark's type of an output column; doubles, or arrays of them, if no type is set."""
    kind = kind or OutputType(depth=0 if is_scalar(shape) else len(shape))
    data_type: T.DataType
    if kind.element == "decimal":
        data_type = T.DecimalType(kind.precision, kind.scale)
    else:
        data_type = _TYPES[kind.element]()
    for _ in range(kind.depth):
        data_type = T.ArrayType(data_type)
    return data_type


def sql_arguments(
    given: Sequence[pa.Array], columns: Sequence[str], text: Sequence[str]
) -> list[pa.Array]:
    """Check that the arguments of a UDF in SQL are numbers, arrays of numbers, vectors or text.

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
    if len(given) != len(columns):
        raise ParamError(
            f"The UDF takes {len(columns)} columns, {', '.join(columns)}, found {len(given)}. Call "
            "it with the model's feature columns, in their order."
        )
    return [
        _argument(values, name, name in text) for values, name in zip(given, columns, strict=True)
    ]


def _argument(column: pa.Array, name: str, is_text: bool) -> pa.Array:
    kinds, data_type = pa.types, column.type
    if is_vector(data_type):
        return column
    leaf = data_type
    while is_list(leaf):
        leaf = leaf.value_type
    is_number = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_decimal)
    if any(is_kind(leaf) for is_kind in is_number):
        return column
    is_any_text = (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary)
    if is_text and any(is_kind(data_type) for is_kind in is_any_text):
        return column
    raise ColumnError(
        f"Argument {name!r} {_described(data_type)}; the UDF takes numbers, booleans, vectors and "
        "arrays of numbers. Convert it in the query, or select other columns."
    )


def _described(data_type: pa.DataType) -> str:
    kinds = pa.types
    if kinds.is_struct(data_type):
        return f"is a struct of {', '.join(field.name for field in data_type)}"
    if kinds.is_temporal(data_type):
        return "holds dates or times"
    if kinds.is_string(data_type) or kinds.is_large_string(data_type):
        return "holds text"
    if kinds.is_binary(data_type) or kinds.is_large_binary(data_type):
        return "holds bytes"
    return f"holds values of type {data_type}"
