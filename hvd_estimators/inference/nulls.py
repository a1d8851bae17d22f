"""Rows with nulls in what a model is given. Runs on the driver."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.prepare.column_names import quoted

__all__ = ["first_null", "flagged", "without_null", "without_nulls"]

_FLOATS = (T.FloatType, T.DoubleType, T.DecimalType)
_EXACT = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.BooleanType)


def flagged(dataset: DataFrame | None, names: Iterable[str], keeps: bool) -> tuple[str, ...]:
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
