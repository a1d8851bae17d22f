"""Rows as a user has them, as arrays, and predictions in the same form. Imports no PySpark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.inference.arrow_batches import to_array, valid_rows
from hvd_estimators.inference.output_types import OutputType, to_column
from hvd_estimators.inference.steps import is_ragged, is_scalar
from hvd_estimators.parquet.columns import Array
from hvd_estimators.parquet.decimals import without_decimals

__all__ = ["Rows", "read_rows"]

Predicted = Mapping[str, tuple[Array, tuple[int, ...], OutputType]]
"""Column to its values, the shape of a row, and its type."""


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

    @property
    def are_all_scalars(self) -> bool:
        """Whether each row is a number in every column."""
        return all(column.ndim == 1 for column in self.columns.values())

    def result(self, predicted: Predicted, keeps: bool) -> Any:
        """Return predictions in the form of the rows.

        Parameters
        ----------
        predicted : mapping
            Column to its values, the shape of a row, and its type.
        keeps : bool
            Whether rows with nulls have nulls; else they are left out.
        """
        valid = self.valid if keeps else None
        left = None if keeps else self.valid
        if not self.as_arrow:
            return self.give(
                {n: _as_array(n, *column, valid) for n, column in predicted.items()}, left
            )
        columns = {
            name: to_column(array, shape, valid, kind, name)
            for name, (array, shape, kind) in predicted.items()
        }
        return self.give(pa.table(columns), left)


def read_rows(
    given: Any,
    features: Sequence[str],
    others: Sequence[str],
    text: Collection[str] | None,
    dimensions: Mapping[str, int] | None = None,
) -> Rows:
    """Return rows as arrays.

    Parameters
    ----------
    given : array, sequence, mapping, pandas.DataFrame, pyarrow.Table or RecordBatch
        See `SavedPredictor.predict`.
    features : sequence of str
        Columns that have to be there.
    others : sequence of str
        Columns that are taken, too, where they are there.
    text : collection of str, or None
        Those that may be text; None for all.
    dimensions : mapping of str to int, optional
        How many dimensions a row of a column has, as far as that is known.

    Raises
    ------
    ColumnError
        If a column is missing, or is of a type that is none of numbers.
    ParamError
        If there are not as many arrays as features.
    DataError
        If columns differ in length, or their arrays do.
    """
    found, give, as_arrow = _columns(given, features, dimensions or {})
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
    given: Any, features: Sequence[str], dimensions: Mapping[str, int]
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
    records, give_records = _records(given, features, dimensions)
    if records is not None:
        return _columns_of(records, features), give_records, False
    if isinstance(given, Mapping):
        return given, lambda made, left: made, False
    arrays = _in_order(given, features)
    return dict(zip(features, arrays, strict=True)), lambda made, left: made, False


def _records(
    given: Any, features: Sequence[str], dimensions: Mapping[str, int]
) -> tuple[list[Mapping[str, Any]] | None, Callable[[Any, Array | None], Any]]:
    """Return rows that are given one by one, and what makes the predictions' form of arrays.

    None if columns are given.
    """
    if isinstance(given, (list, tuple)) and given and all(_as_record(row) for row in given):
        return [_as_record(row) or {} for row in given], _one_by_one
    record = _as_record(given)
    if record is None or not _is_one_row(record, features, dimensions):
        return None, _one_by_one
    return [record], lambda made, left: next(iter(_one_by_one(made, left)), None)


def _as_record(row: Any) -> Mapping[str, Any] | None:
    """Return a dict, Spark's Row or a row of a data frame as a mapping; None for anything else."""
    if isinstance(row, Mapping):
        return row
    if isinstance(row, tuple) and hasattr(row, "asDict"):
        found: Mapping[str, Any] = row.asDict()
        return found
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(row, pandas.Series) and row.index.is_unique:
        names = list(row.index)
        return dict(zip(names, row, strict=True)) if _are_names(names) else None
    return None


def _are_names(names: Sequence[Any]) -> bool:
    return bool(names) and all(isinstance(name, str) for name in names)


def _is_one_row(
    record: Mapping[str, Any], features: Sequence[str], dimensions: Mapping[str, int]
) -> bool:
    """Return whether a mapping holds values of a row, and not columns of several."""
    for name in features:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, (str, bytes)) or hasattr(value, "toArray"):
            return True
        if isinstance(value, (pa.Array, pa.ChunkedArray)):
            return False
        try:
            found = np.ndim(value)
        except ValueError:  # lists of several lengths
            return False
        if found == 0 or found == dimensions.get(name):
            return True
    return False


def _columns_of(
    records: Sequence[Mapping[str, Any]], features: Sequence[str]
) -> dict[str, list[Any]]:
    for number, record in enumerate(records):
        for name in features:
            if name not in record:
                raise ColumnError(
                    f"There is no {name!r} in row {number}; the model takes "
                    f"{', '.join(features)}, and there are {', '.join(map(str, record)) or 'none'}."
                )
    names = dict.fromkeys(name for record in records for name in record)
    columns: dict[str, list[Any]] = {
        name: [record.get(name) for record in records] for name in names
    }
    return {
        name: [
            np.asarray(value.toArray(), np.float32) if hasattr(value, "toArray") else value
            for value in column
        ]
        for name, column in columns.items()
    }


def _one_by_one(made: Mapping[str, Array], left: Array | None) -> list[dict[str, Any]]:
    """Return the predictions of each row as a dict."""
    return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


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
        f"rows: expected the {len(features)} features {', '.join(features)}: a dict or data frame "
        f"of columns, a list of dicts (one for each row), or one array for each, found {found}."
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
            raise ParamError(
                f"rows: column {name!r} is {values!r}; expected an array, rows first. For single "
                "rows give a list of dicts."
            )
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
    column = without_decimals(column)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


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


def _as_array(
    name: str, array: Array, shape: tuple[int, ...], kind: OutputType, valid: Array | None
) -> Array:
    values = kind.array(array.reshape(-1) if is_scalar(shape) else array, name)
    if valid is None:
        return values
    missing: Any = None if values.dtype.hasobject else np.nan
    dtype = values.dtype if values.dtype.kind in "fO" else np.dtype(np.float64)
    filled = np.full((len(valid), *values.shape[1:]), missing, dtype)
    filled[valid] = values
    return filled
