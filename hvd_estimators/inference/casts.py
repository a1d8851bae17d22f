"""Outputs in the types that were asked for: the same with ANSI rules and without. On the driver."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.inference.bounds import Bounds

__all__ = ["bounds_of", "cast_output"]

_BYTES: dict[type[T.DataType], int] = {
    T.ByteType: 1,
    T.ShortType: 2,
    T.IntegerType: 4,
    T.LongType: 8,
}


def bounds_of(name: str, data_type: T.DataType | None) -> Bounds | None:
    """Return what the numbers of an output have to be within; None where all are.

    Parameters
    ----------
    name : str
        What the output is called.
    data_type : DataType or None
        The type that it gets, or whose arrays it gets; None for the default one.
    """
    while isinstance(data_type, T.ArrayType):
        data_type = data_type.elementType
    if data_type is not None and type(data_type) in _BYTES:
        return Bounds.of_whole_numbers(name, data_type.simpleString(), _BYTES[type(data_type)])
    if isinstance(data_type, T.DecimalType):
        kind = data_type.simpleString()
        return Bounds.of_decimals(name, kind, data_type.precision, data_type.scale)
    return None


def cast_output(column: Column, data_type: T.DataType) -> Column:
    """Return doubles, or arrays of them, in another type; NaN is null where that has none.

    Spark's own cast makes 0 or true of NaN, or fails with ANSI rules.
    """
    return _without_nan(column, data_type).cast(data_type)


def _without_nan(column: Column, data_type: T.DataType) -> Column:
    if isinstance(data_type, T.ArrayType):
        element = data_type.elementType
        if not isinstance(element, (T.ArrayType, T.BooleanType, T.DecimalType, *_BYTES)):
            return column
        return F.transform(column, lambda value: _without_nan(value, element))
    if isinstance(data_type, (T.BooleanType, T.DecimalType, *_BYTES)):
        return F.when(~F.isnan(column), column)
    return column
