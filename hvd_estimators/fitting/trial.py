"""Trials of the user's objects before training: pickling, and dry runs of the model.

Runs on the driver.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
from pyspark.sql import DataFrame

from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.prepare.schema import quoted

__all__ = [
    "DRY_RUN_ROWS",
    "Trial",
    "check_sendable",
    "functions_in",
    "repeated",
    "rows_of_frame",
    "try_batches",
    "zeros",
]


def check_sendable(
    name: str, value: Any, pickler: type[cloudpickle.Pickler] = cloudpickle.Pickler
) -> None:
    """Check that an object can be pickled, without spending time on its arrays.

    Parameters
    ----------
    name : str
        Name of the param that holds the value, for the message.
    value : object
        The object to pickle.
    pickler : type
        Pickler class that is used to send the object.

    Raises
    ------
    ParamError
        If the object cannot be pickled.
    """

    class Trial(pickler):
        """Pickler that skips arrays and tensors, which are always picklable but may be large."""

        def persistent_id(self, obj: Any) -> str | None:
            is_array = isinstance(obj, np.ndarray) and not obj.dtype.hasobject
            return "array" if is_array or hasattr(type(obj), "untyped_storage") else None

    def fails(part: Any) -> bool:
        try:
            Trial(_Nowhere()).dump(part)
        except Exception:
            return True
        return False

    try:
        Trial(_Nowhere()).dump(value)
    except Exception as error:
        path, part = _find(value, fails)
        where = f" at {name}{path}, a {type(part).__name__}" if path else ""
        raise ParamError(
            f"{name}: it is sent to the ranks with cloudpickle, which fails{where}: "
            f"{type(error).__name__}: {error}. Make what cannot be sent, such as locks and open "
            "files, within the function that uses it (in a callback: in on_train_begin), and leave "
            "Spark's context, sessions and DataFrames out of functions and objects."
        ) from error


def _find(value: Any, fails: Callable[[Any], bool], depth: int = 6) -> tuple[str, Any]:
    """Return the access path of the innermost part of a value that fails, and that part."""
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        parts = ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((f"[{index}]", part) for index, part in enumerate(value))
    elif not isinstance(value, (type, FunctionType, ModuleType)):
        parts = ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())
    for step, part in parts if depth else ():
        if fails(part):
            path, found = _find(part, fails, depth - 1)
            return f"{step}{path}", found
    return "", value


def functions_in(value: Any) -> Iterator[Any]:
    """Yield the plain functions in nested lists, tuples and dicts."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from functions_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from functions_in(entry)


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


# An unusual width for models, so that rows and columns cannot be confused.
DRY_RUN_ROWS = 11


# Maximum size of a batch that is created for a trial.
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class Trial:
    """Result of a dry run; subclasses of the frameworks may add attributes.

    Attributes
    ----------
    output_shapes : sequence of tuple of int, or None
        Shape of one row of each output, or None if only the ranks find it out.
    takes_one_row : bool or None
        Whether the model can train on a batch of one row; batch normalization may prevent this.
        None if unknown.
    """

    output_shapes: Sequence[tuple[int | None, ...]] | None = None
    takes_one_row: bool | None = None


def zeros(specs: Sequence[ColumnSpec]) -> Columns:
    """Return rows of zeros, or of empty text, for columns with known shapes."""
    return {spec.name: _zeros(spec) for spec in specs}


def try_batches(dry_run: Callable[[Columns], Trial], columns: Columns, batch_size: int) -> Trial:
    """Try a few rows; if they fail, try the number of rows of a batch.

    Models and training steps may accept only one batch size, and batch normalization fails on one
    row.

    Parameters
    ----------
    dry_run : callable
        Runs some rows through copies of the model and the loss.
    columns : Columns
        Some rows, which are repeated if there are too few.
    batch_size : int
        Number of rows in a batch.

    Raises
    ------
    ShapeError
        If all attempts fail. It is the error of the last one.
    """
    few = repeated(columns, max(DRY_RUN_ROWS, len(next(iter(columns.values())))))
    row_bytes = sum(array[:1].nbytes for array in columns.values())
    try:
        return dry_run(few)
    except ShapeError as error:
        failure = error
    if len(next(iter(few.values()))) != batch_size and row_bytes * batch_size <= _MOST_BYTES:
        try:
            return dry_run(repeated(columns, batch_size))
        except ShapeError as error:
            failure = error
    # Changing the arguments preserves the exception's cause.
    failure.args = (f"{failure} dry_run=False leaves out this trial on the driver.",)
    raise failure


def repeated(columns: Columns, rows: int) -> Columns:
    """Return the given number of rows, starting over at the first row if there are too few."""
    return {name: array[np.arange(rows) % len(array)] for name, array in columns.items()}


def rows_of_frame(dataset: DataFrame, specs: Sequence[ColumnSpec]) -> Columns | None:
    """Return the first rows of a DataFrame, or None if there are too few or some hold nulls."""
    needed = dataset.select(*(quoted(spec.name) for spec in specs))
    rows: Any = needed.limit(DRY_RUN_ROWS).toPandas()
    if len(rows) < DRY_RUN_ROWS or rows.isna().any(axis=None):
        return None
    return {spec.name: _stack(rows[spec.name], spec) for spec in specs}


def _zeros(spec: ColumnSpec) -> Array:
    shape = (DRY_RUN_ROWS, *spec.shape)
    return np.full(shape, "", object) if spec.kind == "text" else np.zeros(shape, spec.dtype)


def _stack(series: Any, spec: ColumnSpec) -> Array:
    rows = [value.toArray() if hasattr(value, "toArray") else value for value in series]
    return np.stack([np.asarray(row, spec.dtype) for row in rows])
