"""Trials of the user's objects on the driver, before anything is written.

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
    """Make sure that an object can be pickled, without taking the time of what arrays it holds.

    Parameters
    ----------
    name : str
        The param whose value it is, for the message.
    value : object
        What is sent.
    pickler : type
        What it is sent with.

    Raises
    ------
    ParamError
        If it cannot.
    """

    class Trial(pickler):
        """Pickles, but for arrays and tensors, which always can be and may be large."""

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
    """Return the innermost part of a value that fails, and how to reach it from the value."""
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
    """Yield the plain functions in lists, tuples and dicts."""
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


# Not a width that models often have, lest rows and columns be taken for each other.
DRY_RUN_ROWS = 11


# A batch of more is not made for a trial.
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class Trial:
    """What a dry run found out; a framework's own may hold more.

    Attributes
    ----------
    output_shapes : sequence of tuple of int, or None
        Shape of one row of each output; None where that is left to the ranks.
    takes_one_row : bool or None
        Whether a batch of one row can train, which batch normalization may prevent; None if that
        is not known.
    """

    output_shapes: Sequence[tuple[int | None, ...]] | None = None
    takes_one_row: bool | None = None


def zeros(specs: Sequence[ColumnSpec]) -> Columns:
    """Return rows of zeros, and of empty text, for columns whose shapes are known."""
    return {spec.name: _zeros(spec) for spec in specs}


def try_batches(dry_run: Callable[[Columns], Trial], columns: Columns, batch_size: int) -> Trial:
    """Run a dry run on a few rows; if these fail, on as many as a batch has.

    Models and training steps may take batches of one size only, and batch normalization fails on
    one row.

    Parameters
    ----------
    dry_run : callable
        Runs some rows through copies of model and loss.
    columns : Columns
        Some rows. They are repeated if they are too few.
    batch_size : int
        Rows of a batch.

    Raises
    ------
    ShapeError
        If both fail: the error of the second.
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
    # It keeps its cause.
    failure.args = (f"{failure} dry_run=False leaves out this trial on the driver.",)
    raise failure


def repeated(columns: Columns, rows: int) -> Columns:
    """Return as many rows, beginning again at the first if there are fewer."""
    return {name: array[np.arange(rows) % len(array)] for name, array in columns.items()}


def rows_of_frame(dataset: DataFrame, specs: Sequence[ColumnSpec]) -> Columns | None:
    """Return the first rows of a DataFrame; None if they are too few, or some hold nulls."""
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
