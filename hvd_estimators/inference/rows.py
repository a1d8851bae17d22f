"""Rows as a user has them, as arrays, and predictions in the same form. Imports no PySpark."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.inference.arrow_batches import to_array, to_column, valid_rows
from hvd_estimators.inference.bounds import Bounds
from hvd_estimators.inference.steps import is_ragged, is_scalar
from hvd_estimators.parquet.columns import Array

__all__ = ["Rows", "numpy_dtype", "read_rows"]

Predicted = Mapping[str, tuple[Array, tuple[int, ...], "str | None"]]
"""Column to its values, the shape of a row, and the type that is wanted."""

_DTYPES = {
    **dict.fromkeys(("tinyint", "byte"), "int8"),
    **dict.fromkeys(("smallint", "short"), "int16"),
    **dict.fromkeys(("int", "integer"), "int32"),
    **dict.fromkeys(("bigint", "long"), "int64"),
    **dict.fromkeys(("float", "real"), "float32"),
    "boolean": "bool",
}
_WHOLE = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint"}
"""NumPy's names of whole numbers to Spark's."""

_ARRAY = re.compile(r"array\s*<(.*)>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Rows:
    """Columns of rows that hold no null.

    Attributes
    ----------
    columns : mapping of str to array
        The columns, rows first.
    count : int
        How many rows these are.
    valid : array or None
        Which of the given rows they are; None for all.
    null_column : str or None
        A column with a null, if there is one.
    give : callable
        Makes what a user gets of a table, or of a dict of arrays.
    as_arrow : bool
        Whether it is given a table.
    """

    columns: dict[str, Array]
    count: int
    valid: Array | None
    null_column: str | None
    give: Callable[[Any, Array | None], Any]
    as_arrow: bool

    def result(self, predicted: Predicted, keeps: bool) -> Any:
        """Return predictions in the form of the rows.

        Parameters
        ----------
        predicted : mapping
            Column to its values, the shape of a row, and the type that is wanted.
        keeps : bool
            Whether rows with nulls have nulls; else they are left out.
        """
        valid = self.valid if keeps else None
        left = None if keeps else self.valid
        if not self.as_arrow:
            return self.give(
                {n: _as_array(n, *column, valid) for n, column in predicted.items()}, left
            )
        columns = {n: _as_column(n, *column, valid) for n, column in predicted.items()}
        return self.give(pa.table(columns), left)


def numpy_dtype(ddl: str | None) -> str | None:
    """Return NumPy's name of the numbers in one of Spark's types; None for doubles."""
    while ddl is not None and (found := _ARRAY.fullmatch(ddl.strip())):
        ddl = found[1]
    return None if ddl is None else _DTYPES.get(ddl.strip().lower())


def read_rows(
    given: Any, features: Sequence[str], others: Sequence[str], text: Collection[str] | None
) -> Rows:
    """Return rows as arrays.

    Parameters
    ----------
    given : array, sequence of array, mapping, pandas.DataFrame, pyarrow.Table or RecordBatch
        See `SavedPredictor.predict`.
    features : sequence of str
        Columns that have to be there.
    others : sequence of str
        Columns that are taken, too, where they are there.
    text : collection of str, or None
        Those that may be text; None for all.

    Raises
    ------
    ColumnError
        If a column is missing, or is of a type that is none of numbers.
    ParamError
        If there are not as many arrays as features.
    DataError
        If columns differ in length, or their arrays do.
    """
    found, give, as_arrow = _columns(given, features)
    missing = [name for name in features if name not in found]
    if missing:
        raise ColumnError(
            f"There is no column {', '.join(map(repr, missing))}; the model takes "
            f"{', '.join(features)}, and there are {', '.join(map(str, found)) or 'none'}."
        )
    names = [*features, *(name for name in others if name in found)]
    columns = {name: _column(found[name], name) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"Columns differ in length: {lengths}.")
    valid, null_column = _valid(columns)
    arrays = {}
    for name, column in columns.items():
        if valid is not None:
            column = (
                column.filter(pa.array(valid)) if isinstance(column, pa.Array) else column[valid]
            )
        array = to_array(_readable(column), name) if isinstance(column, pa.Array) else column
        _check_type(array, name, text is None or name in text)
        arrays[name] = array
    return Rows(arrays, len(next(iter(arrays.values()))), valid, null_column, give, as_arrow)


def _columns(
    given: Any, features: Sequence[str]
) -> tuple[Mapping[str, Any], Callable[[Any, Array | None], Any], bool]:
    if isinstance(given, (pa.Table, pa.RecordBatch)):
        names = given.schema.names
        return {n: given.column(names.index(n)) for n in names}, lambda made, left: made, True
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(given, pandas.DataFrame):

        def give(made: pa.Table, left: Array | None) -> Any:
            index = given.index if left is None else given.index[left]
            columns = {name: made.column(name).to_pandas() for name in made.column_names}
            return pandas.DataFrame(columns).set_axis(index, axis=0)

        return {str(name): given[name] for name in given.columns}, give, True
    if isinstance(given, Mapping):
        return given, lambda made, left: made, False
    arrays = _in_order(given, features)
    return dict(zip(features, arrays, strict=True)), lambda made, left: made, False


def _in_order(given: Any, features: Sequence[str]) -> list[Any]:
    """Return the features that were given without names."""
    if len(features) == 1:
        is_one = isinstance(given, (list, tuple)) and len(given) == 1 and np.ndim(given[0])
        return [given[0] if is_one and isinstance(given[0], np.ndarray) else given]
    if isinstance(given, np.ndarray):
        if given.ndim == 2 and given.shape[1] == len(features):
            return list(given.T)
        found = f"an array of shape {given.shape}"
    elif isinstance(given, (list, tuple)):
        if len(given) == len(features):
            return list(given)
        found = f"{len(given)} arrays"
    else:
        found = type(given).__name__
    raise ParamError(
        f"rows: expected the {len(features)} features {', '.join(features)}: a dict, a data frame, "
        f"a table, or one array for each, found {found}."
    )


def _column(values: Any, name: str) -> Array | pa.Array:
    """Return a column as an array where it is of numbers, and as Arrow's elsewhere."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([])
    if isinstance(values, pa.Array):
        return values
    numpy_type = getattr(values, "dtype", None)
    is_extension = numpy_type is not None and not isinstance(numpy_type, np.dtype)
    if not is_extension:
        try:
            array = values if isinstance(values, np.ndarray) else np.asarray(values)
        except ValueError as error:
            raise is_ragged(name) from error
        if array.ndim == 0:
            raise ParamError(f"rows: column {name!r} is {values!r}; expected an array, rows first.")
        if array.dtype.kind in "biufmMcV":
            return array
        if array.dtype.kind in "US":
            array = array.astype(object)
        values = array
    try:
        column = pa.array(_listed(values))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ColumnError(
            f"Column {name!r} holds values of which the model can take none ({error})."
        ) from error
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _listed(values: Any) -> Any:
    """Return objects as Arrow takes them, with None for what is missing.

    Arrow knows arrays of one dimension alone, and no vectors of Spark's.
    """
    if not isinstance(getattr(values, "dtype", None), np.dtype):
        return values
    is_text = any(isinstance(value, (str, bytes)) for value in values)
    return [_object(value, is_text) for value in values]


def _object(value: Any, is_text: bool) -> Any:
    if hasattr(value, "toArray"):
        return np.asarray(value.toArray(), np.float32)
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return value.tolist()
    # In text pandas has NaN, which is a number elsewhere.
    is_missing = type(value).__name__ == "NAType" or (is_text and isinstance(value, float))
    return None if is_missing else value


def _valid(columns: Mapping[str, Array | pa.Array]) -> tuple[Array | None, str | None]:
    """Return which rows hold no null in any column, and a column with one."""
    valid: Array | None = None
    null_column = None
    for name, column in columns.items():
        found = valid_rows(column) if isinstance(column, pa.Array) else None
        if found is not None:
            null_column = null_column or name
            valid = found if valid is None else valid & found
    return valid, null_column


def _readable(column: pa.Array) -> pa.Array:
    """Return a column in a type that becomes an array of NumPy's."""
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    return column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column


def _check_type(array: Array, name: str, is_text: bool) -> None:
    kind = array.dtype.kind
    if kind in "biuf" or not array.size:
        return
    if kind == "O" and is_text and all(isinstance(v, (str, bytes)) for v in array.flat):
        return
    what = "text" if kind == "O" and isinstance(array.flat[0], (str, bytes)) else array.dtype.name
    raise ColumnError(
        f"Column {name!r} holds {what}; the model takes numbers, booleans and arrays of them. "
        "Convert it."
    )


def _checked(array: Array, shape: tuple[int, ...], dtype: str | None, name: str) -> Array:
    """Return an output as doubles that the wanted type can hold."""
    values = array.astype(np.float64, copy=False)
    if is_scalar(shape):
        values = values.reshape(-1)
    if dtype in _WHOLE:
        size = np.dtype(dtype).itemsize
        Bounds.of_whole_numbers(name, _WHOLE[dtype], size).check(values)
    return values


def _as_array(
    name: str, array: Array, shape: tuple[int, ...], dtype: str | None, valid: Array | None
) -> Array:
    values = _checked(array, shape, dtype, name)
    wanted = np.dtype(dtype or "float64")
    if wanted.kind == "f":
        values = values.astype(wanted, copy=False)
    elif valid is None and not np.isnan(values).any():
        return values.astype(wanted)
    else:  # NaN stands for a null, which no array of whole numbers has.
        is_nan = np.isnan(values)
        values = np.where(is_nan, np.nan, np.where(is_nan, 0, values).astype(wanted))
    if valid is None:
        return values
    filled = np.full((len(valid), *values.shape[1:]), np.nan, values.dtype)
    filled[valid] = values
    return filled


def _as_column(
    name: str, array: Array, shape: tuple[int, ...], dtype: str | None, valid: Array | None
) -> pa.Array:
    values = _checked(array, shape, dtype, name)
    if dtype is None:
        return to_column(values, shape, valid)
    data_type = pa.from_numpy_dtype(np.dtype(dtype))
    for _ in () if is_scalar(shape) else shape:
        data_type = pa.list_(pa.field("element", data_type))
    return to_column(values, shape, valid, dtype).cast(data_type)
