"""UDFs for SQL: arguments, result types and names.

There the JVM makes this form of columns whose types are known. Of a UDF's arguments they are not,
before a batch comes. Runs on executors.
"""

from __future__ import annotations

import decimal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.inference.batch import is_ragged, is_scalar
from hvd_estimators.inference.output_columns import OutputType

__all__ = [
    "DENSE",
    "VECTOR",
    "SqlForm",
    "active_session",
    "check_count",
    "checked_name",
    "in_columns_form",
    "is_no_number",
    "spark_type",
]

VECTOR = ("type", "size", "indices", "values")


"""Fields of the struct that Spark's vectors are stored as."""


DENSE = 1


"""What ``type`` is for dense vectors; 0 for sparse ones."""


def in_columns_form(
    given: Sequence[pd.Series | pd.DataFrame], columns: Sequence[str], text: Sequence[str]
) -> list[pd.Series]:
    """Return the arguments of a call as columns: numbers, arrays of them, or text.

    Parameters
    ----------
    given : sequence of pd.Series or pd.DataFrame
        The arguments; a data frame of its fields for a struct, as which vectors come.
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
        _column(values, name, name in text) for values, name in zip(given, columns, strict=True)
    ]


def check_count(given: Sequence[Any], columns: Sequence[str]) -> None:
    """Make sure that a UDF is called with as many arguments as it takes.

    Raises
    ------
    ParamError
        If it is not.
    """
    if len(given) != len(columns):
        raise ParamError(
            f"The UDF takes {len(columns)} columns, {', '.join(columns)}, found {len(given)}. Call "
            "it with the model's feature columns, in their order."
        )


def _column(values: pd.Series | pd.DataFrame, name: str, is_text: bool) -> pd.Series:
    if isinstance(values, pd.DataFrame):
        if set(values.columns) != set(VECTOR):
            fields = ", ".join(map(str, values.columns))
            raise is_no_number(name, f"is a struct of {fields}")
        return _vectors(values, name)
    if values.dtype.kind in "mM":
        raise is_no_number(name, "holds dates or times")
    if values.dtype != object:
        return values
    first = next((value for value in values if value is not None), None)
    if isinstance(first, (str, bytes, bytearray)):
        if not is_text:
            raise is_no_number(name, f"holds {'text' if isinstance(first, str) else 'bytes'}")
    elif isinstance(first, decimal.Decimal):
        return values.astype(np.float64)
    elif isinstance(first, np.ndarray):
        return _without_decimals(values)
    elif first is not None and not isinstance(first, (bool, int, float, np.generic)):
        raise is_no_number(name, f"holds values of type {type(first).__name__}")
    return values


def _vectors(fields: pd.DataFrame, name: str) -> pd.Series:
    """Return ML vectors as arrays of floats; None where there is none."""
    kinds = fields["type"].to_numpy(np.float64, na_value=np.nan)
    columns = (fields[part].tolist() for part in ("size", "indices", "values"))
    vectors = [
        None if np.isnan(kind) else _vector(kind == DENSE, *parts)
        for kind, *parts in zip(kinds, *columns, strict=True)
    ]
    if len({len(vector) for vector in vectors if vector is not None}) > 1:
        raise is_ragged(name)
    made = np.empty(len(vectors), dtype=object)
    made[:] = vectors
    return pd.Series(made)


def _vector(is_dense: bool, size: Any, indices: Any, values: Any) -> Array:
    if is_dense:
        dense: Array = np.asarray(values, np.float32)
        return dense
    vector = np.zeros(int(size), np.float32)
    vector[np.asarray(indices, np.int64)] = values
    return vector


def _without_decimals(values: pd.Series) -> pd.Series:
    """Return arrays, of arrays too, with floats for decimals."""
    return values.map(_floats, na_action="ignore") if _holds_decimals(values.tolist()) else values


def _holds_decimals(values: Any) -> bool:
    first = next((value for value in values if value is not None), None)
    if isinstance(first, np.ndarray):
        return first.dtype == object and _holds_decimals(first)
    return isinstance(first, decimal.Decimal)


def _floats(array: Any) -> Any:
    if not len(array) or not isinstance(array[0], np.ndarray):
        return array.astype(np.float64)
    made = np.empty(len(array), dtype=object)
    made[:] = [_floats(inner) for inner in array]
    return made


def is_no_number(name: str, what: str) -> ColumnError:
    """Return what is raised of an argument that is none of numbers."""
    return ColumnError(
        f"Argument {name!r} {what}; the UDF takes numbers, booleans, vectors and arrays of "
        "numbers. Convert it in the query, or select other columns."
    )


_TYPES: dict[str, type[T.DataType]] = {
    "tinyint": T.ByteType,
    "smallint": T.ShortType,
    "int": T.IntegerType,
    "bigint": T.LongType,
    "float": T.FloatType,
    "double": T.DoubleType,
    "boolean": T.BooleanType,
    "string": T.StringType,
}


@dataclass(frozen=True)
class SqlForm:
    """How a UDF is called from SQL, and what it gives.

    Attributes
    ----------
    text : tuple of str
        The columns that may be text.
    types : mapping
        The names of what it gives, in order, to their types: a value if it is one, or else the
        fields of a struct.
    """

    text: tuple[str, ...]
    types: Mapping[str, T.DataType]

    @property
    def returned(self) -> T.DataType:
        """The type of a result."""
        if len(self.types) == 1:
            return next(iter(self.types.values()))
        return T.StructType([T.StructField(name, found) for name, found in self.types.items()])


def active_session() -> SparkSession:
    """Return the session that UDFs are made in.

    Raises
    ------
    ParamError
        If there is none.
    DependencyError
        If it is one of Spark Connect, and this PySpark is too old for that.
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
    """Return the name of a function in SQL.

    Raises
    ------
    ParamError
        If it is no text, or the name of one of Spark's own functions, which it would hide.
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
    """Return Spark's type of an output column; arrays of doubles if no type is set."""
    kind = kind or OutputType(depth=0 if is_scalar(shape) else len(shape))
    found: T.DataType
    if kind.element == "decimal":
        found = T.DecimalType(kind.precision, kind.scale)
    else:
        found = _TYPES[kind.element]()
    for _ in range(kind.depth):
        found = T.ArrayType(found)
    return found
