"""UDFs for SQL: result types, names and the session. Runs on the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.batch import is_scalar
from hvd_estimators.inference.output_columns import OutputType

__all__ = ["SqlForm", "active_session", "checked_name", "spark_type"]


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
    """Signature of a UDF in SQL.

    Attributes
    ----------
    text : tuple of str
        Columns that may be text.
    types : mapping
        Names of the results, in order, to their types. The UDF returns a single result as a plain
        value, and several results as a struct.
    """

    text: tuple[str, ...]
    types: Mapping[str, T.DataType]

    @property
    def returned(self) -> T.DataType:
        """Return type of the UDF."""
        if len(self.types) == 1:
            return next(iter(self.types.values()))
        return T.StructType([T.StructField(name, found) for name, found in self.types.items()])


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
    found: T.DataType
    if kind.element == "decimal":
        found = T.DecimalType(kind.precision, kind.scale)
    else:
        found = _TYPES[kind.element]()
    for _ in range(kind.depth):
        found = T.ArrayType(found)
    return found
