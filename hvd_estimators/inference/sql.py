"""UDFs that predict where there is no DataFrame yet: what they give. Runs on the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.steps import is_scalar
from hvd_estimators.sessions import is_connect

__all__ = ["SqlForm", "active_session", "checked_name", "parsed_type", "sql_form"]

_DTYPES: dict[type[T.DataType], str] = {
    T.ByteType: "int8",
    T.ShortType: "int16",
    T.IntegerType: "int32",
    T.LongType: "int64",
    T.FloatType: "float32",
    T.DoubleType: "float64",
    T.BooleanType: "bool",
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
    dtypes : tuple of str
        NumPy's names of the types of their numbers.
    """

    text: tuple[str, ...]
    types: Mapping[str, T.DataType]
    dtypes: tuple[str, ...]

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


def sql_form(
    session: SparkSession,
    shapes: Sequence[tuple[int, ...]],
    names: Sequence[str],
    types: Sequence[str | None],
    text: Sequence[str],
) -> SqlForm:
    """Return how a UDF is called, and what it gives.

    Parameters
    ----------
    session : SparkSession
        Reads types.
    shapes : sequence of tuple of int
        Shape of a row of each field that it gives.
    names : sequence of str
        Their names.
    types : sequence of str or None
        Their types as DDL strings; None for doubles, and arrays of them.
    text : sequence of str
        The columns that may be text.

    Raises
    ------
    ParamError
        If a type is none of numbers, or has other dimensions than the output.
    """
    found, dtypes = {}, []
    for name, shape, ddl in zip(names, shapes, types, strict=True):
        depth = 0 if is_scalar(shape) else len(shape)
        parsed = _default_type(depth) if ddl is None else parsed_type(session, ddl)
        dtype = _dtype(parsed, depth)
        if dtype is None:
            raise ParamError(
                f"output_types: a UDF cannot give {ddl!r} for {name!r}, of shape {shape}. Set a "
                f"type like {_default_type(depth).simpleString()!r}, or cast the result in SQL."
            )
        found[name] = parsed
        dtypes.append(dtype)
    return SqlForm(tuple(text), found, tuple(dtypes))


def _default_type(depth: int) -> T.DataType:
    return T.DoubleType() if depth == 0 else T.ArrayType(_default_type(depth - 1))


def parsed_type(session: SparkSession, ddl: str) -> T.DataType:
    """Return the type that Spark knows by a name.

    Raises
    ------
    ParamError
        If it knows none.
    """
    try:
        return session.createDataFrame([], f"value {ddl}").schema["value"].dataType
    except PySparkException as error:
        raise ParamError(
            f"output_types: {ddl!r} is no type of Spark's. Set one as 'double' or 'array<float>'."
        ) from error


def _dtype(data_type: T.DataType, depth: int) -> str | None:
    for _ in range(depth):
        if not isinstance(data_type, T.ArrayType):
            return None
        data_type = data_type.elementType
    return _DTYPES.get(type(data_type))
