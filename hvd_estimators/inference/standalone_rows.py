"""Rows that a user passes to a standalone predictor, as arrays of columns, and its results.

Imports no PySpark and no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array, as_array
from hvd_estimators.data.rows import ROWS, GivenRows, one_array
from hvd_estimators.data.types import is_list, without_decimals
from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.inference.batch import (
    NULL_REMEDY,
    BatchPredictor,
    has_all,
    known_sizes,
    to_arrays,
)
from hvd_estimators.inference.output_columns import OutputType, to_column

Predicted = Mapping[str, tuple[Array, tuple[int, ...], OutputType]]
"""Column to its values, the shape of a row, and its type."""

ToResult = Callable[[pa.Table, "Array | None", Mapping[str, Sequence[int]]], Any]
"""Conversion of predictions to a user's form; see `InputTable`."""


@dataclass(frozen=True)
class InputTable:
    """Columns of the rows without nulls.

    Attributes
    ----------
    columns : mapping of str to array
        The columns, rows first.
    count : int
        Number of rows without nulls.
    valid : array or None
        Mask of the given rows that are in ``columns``; None for all rows.
    to_result : callable
        Converts a table of predictions to the form that the user gets. Also takes the mask of the
        given rows in the table (None: all), and the shapes of a row of its columns.
    """

    columns: dict[str, Array]
    count: int
    valid: Array | None
    to_result: ToResult

    def result(self, predicted: Predicted, keeps: bool) -> Any:
        """Return predictions in the form of the rows.

        Parameters
        ----------
        predicted : mapping
            Column to its values, the shape of a row, and its type.
        keeps : bool
            Whether rows with nulls get null predictions; otherwise they are left out.
        """
        valid, selected = (self.valid, None) if keeps else (None, self.valid)
        columns = {
            name: to_column(array, shape, valid, kind, name)
            for name, (array, shape, kind) in predicted.items()
        }
        shapes = {name: known_sizes(shape) for name, (_, shape, _) in predicted.items()}
        return self.to_result(pa.table(columns), selected, shapes)


def read_table(
    given: Any,
    features: Sequence[str],
    optional: Sequence[str],
    text: Collection[str] | None,
    *,
    labels: Collection[str] = (),
    keeps_nulls: bool = True,
) -> InputTable:
    """Return rows as arrays.

    Parameters
    ----------
    given : mapping, sequence of mapping, pandas.DataFrame, pyarrow.Table or RecordBatch
        See `SavedPredictor.predict`.
    features : sequence of str
        The columns that are required.
    optional : sequence of str
        Columns that are read if they exist.
    text : collection of str, or None
        Columns that may be text; None for all columns.
    labels : collection of str
        Optional columns that are left out if they hold nulls.
    keeps_nulls : bool
        Whether rows may hold nulls.

    Raises
    ------
    ColumnError
        If a column is missing, or if its type is not numeric.
    ParamError
        If the rows have another form.
    DataError
        If columns, or the arrays of a column, differ in length. Also for nulls without
        ``keeps_nulls``.
    """
    columns, to_result = read_columns(given, features, optional)
    columns = {n: column for n, column in columns.items() if n not in labels or has_all(column)}
    arrays, valid = to_arrays(list(columns), list(columns.values()), keeps_nulls=keeps_nulls)
    for name, array in arrays.items():
        _check_type(array, name, text is None or name in text)
    # Functions and models may edit their inputs. Of read-only arrays they get copies.
    arrays = {name: array.view() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return InputTable(arrays, len(arrays[features[0]]), valid, to_result)


def read_rows(
    given: Any, features: Sequence[str], dtypes: Mapping[str, str], inference: BatchPredictor
) -> InputTable:
    """Return rows for a collate function.

    Parameters
    ----------
    given, features
        See `read_table`.
    dtypes : mapping of str to str
        Column to the NumPy name of its numbers in training.
    inference : BatchPredictor
        Decides about nulls.

    Raises
    ------
    ColumnError, ParamError, DataError
        See `read_table`.
    """
    table, to_result = _columns(given, features)
    if isinstance(given, (pa.Table, pa.RecordBatch)):
        columns: list[Any] = [one_array(table[name]) for name in features]
        rows, valid = inference.read(columns)
        return InputTable(rows, len(rows[ROWS]), valid, to_result)
    columns = [_values(table[name]) for name in features]
    if len(set(map(len, columns))) > 1:
        raise DataError(f"Columns differ in length: {list(map(len, columns))}.")
    named = [dict(zip(features, row, strict=True)) for row in zip(*columns, strict=True)]
    complete = np.array([not any(map(_holds_none, row.values())) for row in named], bool)
    if not (complete.all() or inference.keeps_nulls):
        raise DataError(f"The rows hold nulls; {NULL_REMEDY}")
    if inference.takes_nulls or complete.all():
        valid = None
    else:
        named, valid = [row for row, keep in zip(named, complete, strict=True) if keep], complete
    kept: Any = GivenRows(named, dtypes)
    return InputTable({ROWS: kept}, len(kept), valid, to_result)


def _values(column: Any) -> list[Any]:
    """Return the values of a column, with None for the missing values of pandas and Arrow."""
    values = [value.as_py() if isinstance(value, pa.Scalar) else value for value in column]
    # Pandas marks missing text with NaN; elsewhere NaN is a number.
    is_text = any(isinstance(value, (str, bytes)) for value in values)
    return [None if _is_missing(value, is_text) else value for value in values]


def _is_missing(value: Any, is_text: bool) -> bool:
    return type(value).__name__ in ("NAType", "NaTType") or (is_text and isinstance(value, float))


def read_columns(
    given: Any, features: Sequence[str], optional: Sequence[str]
) -> tuple[dict[str, Array | pa.Array], ToResult]:
    """Return the columns of rows, and the conversion of results; see `read_table`.

    Returns
    -------
    columns : dict
        Arrays of numbers without nulls, and Arrow arrays.
    to_result : callable
        See `InputTable`.
    """
    table, to_result = _columns(given, features)
    names = [*features, *(name for name in optional if name in table)]
    columns = {name: _column(table[name], name) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"Columns differ in length: {lengths}.")
    return columns, to_result


def _columns(given: Any, features: Sequence[str]) -> tuple[Mapping[str, Any], ToResult]:
    table, to_result = _by_column(given, features)
    missing = [name for name in features if name not in table]
    if missing:
        raise ColumnError(
            f"There is no column {', '.join(map(repr, missing))}; the model takes "
            f"{', '.join(features)}, and there are {', '.join(map(str, table)) or 'none'}.",
            column=missing[0],
        )
    return table, to_result


def _by_column(given: Any, features: Sequence[str]) -> tuple[Mapping[str, Any], ToResult]:
    if isinstance(given, (pa.Table, pa.RecordBatch)):
        names = given.schema.names
        return {n: given.column(names.index(n)) for n in names}, lambda made, *_: made
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(given, pandas.DataFrame):

        def to_frame(made: pa.Table, selected: Array | None, shapes: Any) -> Any:
            index = given.index if selected is None else given.index[selected]
            columns = {name: made.column(name).to_pandas() for name in made.column_names}
            return pandas.DataFrame(columns).set_axis(index, axis=0)

        return {str(name): given[name] for name in given.columns}, to_frame
    row = _as_row(given)
    if row is not None and any(_is_value(row.get(name)) for name in features):
        return _columns_of([row], features), _alone
    if isinstance(given, Mapping):
        return given, _by_name
    if isinstance(given, (list, tuple)) and given:
        rows = [_as_row(row) for row in given]
        if None not in rows:
            return _columns_of(rows, features), _one_by_one
    raise ParamError(
        f"rows: expected the columns {', '.join(features)} by name: a dict of arrays, a list of "
        f"dicts (one for each row), a data frame or an Arrow table, found {type(given).__name__}."
    )


def _as_row(row: Any) -> Any:
    """Convert a dict or a Spark Row to a mapping; None for other types."""
    if isinstance(row, tuple) and hasattr(row, "asDict"):
        return row.asDict()
    return row if isinstance(row, Mapping) else None


def _is_value(value: Any) -> bool:
    """Return whether an object is a row's value: a number, text, bytes or a Spark vector."""
    is_sequence = hasattr(value, "__len__") and not isinstance(value, (str, bytes, bytearray))
    return value is not None and (not is_sequence or hasattr(value, "toArray"))


def _columns_of(
    records: Sequence[Mapping[str, Any]], features: Sequence[str]
) -> dict[str, list[Any]]:
    for number, record in enumerate(records):
        for name in features:
            if name not in record:
                raise ColumnError(
                    f"There is no {name!r} in row {number}; the model takes {', '.join(features)}, "
                    f"and there are {', '.join(map(str, record)) or 'none'}.",
                    column=name,
                )
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [_dense(record.get(name)) for record in records] for name in names}


def _dense(value: Any) -> Any:
    """Convert a Spark vector to an array and a bytearray to bytes; return other values unchanged.

    PySpark 3.5 returns binary columns as bytearrays, which NumPy takes for arrays of numbers.
    """
    if isinstance(value, bytearray):
        return bytes(value)
    return np.asarray(value.toArray()) if hasattr(value, "toArray") else value


def _by_name(
    made: pa.Table, selected: Array | None, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Array]:
    """Return the predictions as arrays."""
    names = made.column_names
    return {name: _as_numpy(one_array(made[name]), name, shapes.get(name, ())) for name in names}


def _one_by_one(
    made: pa.Table, selected: Array | None, shapes: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Return the predictions of each row as a dict."""
    arrays = _by_name(made, selected, shapes)
    return [dict(zip(arrays, values, strict=True)) for values in zip(*arrays.values(), strict=True)]


def _alone(
    made: pa.Table, selected: Array | None, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any] | None:
    """Return the predictions of the only row; None if it was skipped."""
    return next(iter(_one_by_one(made, selected, shapes)), None)


def _column(values: Any, name: str) -> Array | pa.Array:
    """Return a column as a NumPy array if it holds numbers, otherwise as an Arrow array."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return _decoded(values)
    is_extension = hasattr(getattr(values, "dtype", None), "na_value")  # of pandas
    if not is_extension:
        if isinstance(values, (list, tuple)):
            known = next((value for value in values if value is not None), None)
            values = [_dense(v) for v in values] if isinstance(known, bytearray) else values
        try:
            array = as_array(values)
        except ValueError as error:
            if not any(map(_holds_none, values)):
                raise DataError(
                    f"Column {name!r} is ragged: its arrays differ in length. Pad or cut them to "
                    "one length."
                ) from error
            array = np.empty(len(values), object)  # arrays and nulls
            for row, value in enumerate(values):
                array[row] = value
        if array.ndim == 0:
            raise ParamError(
                f"rows: column {name!r} is {values!r}; expected an array, rows first. For single "
                "rows give a list of dicts."
            )
        if array.dtype.kind in "biufmMcV":
            return array
        # Arrow accepts only arrays of one dimension, and does not know Spark's vectors.
        objects = array.astype(object)
        is_text = any(isinstance(value, (str, bytes)) for value in objects)
        values = [_for_arrow(value, is_text) for value in objects]
    try:
        column = pa.array(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ColumnError(
            f"Column {name!r} holds values that cannot be inputs of a model ({error}).", column=name
        ) from error
    return _decoded(column)


def _holds_none(value: Any) -> bool:
    """Return whether a value is None, or a list that holds one at any depth."""
    if isinstance(value, np.ndarray):
        return value.dtype.hasobject and any(map(_holds_none, value))
    return value is None or (isinstance(value, (list, tuple)) and any(map(_holds_none, value)))


def _for_arrow(value: Any, is_text: bool) -> Any:
    """Convert an object to a type that Arrow accepts; missing values become None."""
    value = _dense(value)
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return value.tolist()
    return None if _is_missing(value, is_text) else value


def _decoded(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    column = one_array(column)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _check_type(array: Array, name: str, is_text: bool) -> None:
    kind = array.dtype.kind
    if kind in "biuf" or not array.size:
        return
    if kind == "O" and is_text and all(isinstance(v, (str, bytes)) for v in array.flat):
        return
    kind_name = (
        "text" if kind == "O" and isinstance(array.flat[0], (str, bytes)) else array.dtype.name
    )
    raise ColumnError(
        f"Column {name!r} holds {kind_name}; the model takes numbers, booleans and arrays of them.",
        column=name,
        remedy="Convert it.",
    )


def _as_numpy(column: pa.Array, name: str, shape: Sequence[int]) -> Array:
    """Return a column as an array, rows first: NaN for nulls, and None for nulls in text.

    If all lists of a column are null, ``shape`` is the shape of a row.
    """
    column = without_decimals(column)
    if not is_list(column.type):
        if column.null_count and pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        # A copy, because Arrow's memory is read-only.
        return np.array(column.to_numpy(zero_copy_only=False))
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    elements = _as_numpy(column.flatten(), name, shape[1:])
    count = int(valid.sum())
    width = len(elements) // count if count else next(iter(shape), 0)
    rows = elements.reshape(count, width, *elements.shape[1:])
    if count == len(column):
        return rows
    dtype = rows.dtype if rows.dtype.kind == "f" else np.dtype(np.float64)
    filled = np.full((len(column), *rows.shape[1:]), np.nan, dtype)
    filled[valid] = rows
    return filled
