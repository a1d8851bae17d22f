"""Arguments of SQL UDFs, converted to the form of the columns that `transform` passes.

`transform` converts columns in the JVM, where their types are known. The argument types of a
SQL UDF are known only when a batch arrives. Runs on executors.
"""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.inference.batch import is_ragged

__all__ = ["DENSE", "VECTOR", "check_count", "in_columns_form", "is_no_number"]

VECTOR = ("type", "size", "indices", "values")
"""Fields of the struct in which Spark stores ML vectors."""


DENSE = 1
"""Value of ``type`` for dense vectors; sparse vectors have 0."""


def in_columns_form(
    given: Sequence[pd.Series | pd.DataFrame], columns: Sequence[str], text: Sequence[str]
) -> list[pd.Series]:
    """Convert the arguments of a call to columns: numbers, arrays of numbers, or text.

    Parameters
    ----------
    given : sequence of pd.Series or pd.DataFrame
        The arguments. A struct is a data frame of its fields; ML vectors are structs.
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
    check_count(given, columns)
    return [
        _column(values, name, name in text) for values, name in zip(given, columns, strict=True)
    ]


def check_count(given: Sequence[Any], columns: Sequence[str]) -> None:
    """Check the number of arguments of a UDF call.

    Raises
    ------
    ParamError
        If the number of arguments differs from the number of columns.
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
    """Return ML vectors as arrays of floats; null vectors become None."""
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
    """Convert decimals in arrays, nested arrays included, to floats."""
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
    """Return the error for an argument that does not hold numbers."""
    return ColumnError(
        f"Argument {name!r} {what}; the UDF takes numbers, booleans, vectors and arrays of "
        "numbers. Convert it in the query, or select other columns."
    )
