"""The UDF that predicts: one forward pass per batch of rows. Runs on the executors.

What makes it and the columns that it takes and gives are in `hvd_estimators.model`.
"""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import cloudpickle
import numpy as np
import pandas as pd
from pyspark.sql import Column
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import pandas_udf

from hvd_estimators.exceptions import DataError
from hvd_estimators.inference.classification import ClassScores
from hvd_estimators.inference.received import received
from hvd_estimators.inference.shared import Sent, as_bytes, chunks
from hvd_estimators.loading.transformation import Transformation
from hvd_estimators.parquet.columns import Array
from hvd_estimators.temporary import LocalFile

__all__ = ["Document", "Inference", "Predictor", "is_scalar", "make_udf", "predictor_key"]

Predictor = Callable[[list[Array]], list[Array]]
"""Feature arrays, rows first, to output arrays, rows first. Runs on executors."""


@dataclass(frozen=True)
class Inference:
    """What the UDF does with a batch of rows.

    Attributes
    ----------
    columns : tuple of str
        The columns that it is given.
    may_be_nan : tuple of str
        Those in which NaN is a number: where nulls are, another column says that follows them.
    features : tuple of str
        Those, after the transformation, that the predictor is given.
    shapes : tuple of tuple of int
        Shape of a row of each output.
    batch_rows : int or None
        Rows of one forward pass; None for a whole Arrow batch.
    scores : ClassScores or None
        Makes a classifier's columns of the only output.
    transformation : Transformation or None
        Applied before the forward pass.
    dtypes : mapping
        Column to the NumPy type in which the transformation saw it in training.
    """

    columns: tuple[str, ...]
    features: tuple[str, ...]
    may_be_nan: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    batch_rows: int | None = None
    scores: ClassScores | None = None
    transformation: Transformation | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a row of all that the UDF gives."""
        outputs = {f"o{index}": shape for index, shape in enumerate(self.shapes)}
        return {**outputs, **(self.scores.fields(self.shapes[0]) if self.scores else {})}

    def __call__(self, predictor: Predictor, columns: dict[str, Array]) -> list[pd.Series]:
        """Return what `fields` says, for some rows."""
        rows = len(next(iter(columns.values())))
        step = self.batch_rows or max(rows, 1)
        parts = [
            self.predict(predictor, {name: a[start : start + step] for name, a in columns.items()})
            for start in range(0, rows, step)
        ]
        outputs = [np.concatenate(output) for output in zip(*parts, strict=True)]
        series = [_to_series(o, shape) for o, shape in zip(outputs, self.shapes, strict=True)]
        if self.scores is not None:
            made = self.scores(outputs[0])
            wanted = self.scores.fields(self.shapes[0])
            series += [_to_series(made[name], shape) for name, shape in wanted.items()]
        return series

    def arrays(self, series: Sequence[pd.Series]) -> dict[str, Array]:
        """Return the columns of a batch.

        Parameters
        ----------
        series : sequence of pd.Series
            The columns, and where some may hold NaN the position of the first of these that is
            null in each row, or -1.

        Raises
        ------
        DataError
            If there are nulls, or arrays that differ in length.
        """
        if self.may_be_nan:
            *series, positions = series
            nulls = positions[positions >= 0]
            if len(nulls):
                raise _has_nulls(self.may_be_nan[int(nulls.iloc[0])])
        arrays = {}
        for name, column in zip(self.columns, series, strict=True):
            if name not in self.may_be_nan and column.isna().any():
                raise _has_nulls(name)
            arrays[name] = _to_array(column, name)
        return arrays

    def predict(self, predictor: Predictor, columns: dict[str, Array]) -> list[Array]:
        """Return the outputs for some rows, after the transformation if there is one."""
        if self.transformation is None:
            return predictor([columns[name] for name in self.features])
        typed = {
            name: array.astype(self.dtypes.get(name, array.dtype), copy=False)
            for name, array in columns.items()
        }
        try:
            transformed = self.transformation(typed)
        except KeyError as error:
            raise DataError(
                f"The transformation asks for a column {error}, which the DataFrame does not have; "
                f"it was given {', '.join(typed)}. Add it, or set apply_transformation=False."
            ) from error
        return predictor([transformed[name] for name in self.features])


Document = Union[bytes, "os.PathLike[str]"]
"""What a predictor is made of: bytes, or a file that holds them."""

_HASHED_BYTES = 2**24

Send = Callable[[str, bytes | LocalFile], Sent]
"""The role of a document and this to what takes its place in a UDF; see `SharedBytes`."""


def make_udf(
    document: bytes | LocalFile,
    load: Callable[[Document], Predictor],
    inference: Inference,
    send: Send,
    has_empty_rows: bool = False,
) -> Callable[..., Column]:
    """Return a UDF from columns to the output, or to a struct where there are several fields.

    Parameters
    ----------
    document : bytes or LocalFile
        What the predictor is made of.
    load : callable
        Makes it.
    inference : Inference
        What to do with a batch.
    send : callable
        Sends what may be large to the executors.
    has_empty_rows : bool
        Whether a further, last column is true for rows and false for empty ones, which are skipped:
        the output is null there.
    """
    model = send("model", document)
    steps = send("steps", cloudpickle.dumps((load, inference)))
    key = predictor_key(document, load)
    fields = inference.fields
    single = len(fields) == 1
    if single:
        return_type = _spark_type(inference.shapes[0])
    else:
        return_type = T.StructType(
            [T.StructField(name, _spark_type(shape)) for name, shape in fields.items()]
        )

    def predict(batches: Any) -> Any:
        with received(steps) as pickled:
            load, inference = pickle.loads(as_bytes(pickled))
        predictor = _cached_predictor(key, model, load)
        for batch in batches:
            # PySpark gives one column as it is, and several as a tuple.
            series = list(batch) if isinstance(batch, tuple) else [batch]
            is_row = None
            if has_empty_rows:
                *series, marks = series
                is_row = marks.to_numpy(bool)
                series = [column[is_row] for column in series]
            columns = inference.arrays(series)
            found = inference(predictor, columns) if len(series[0]) else _empty(inference)
            if is_row is not None:
                found = [_among_empty(column, is_row) for column in found]
            if single:
                yield found[0]
            else:
                yield pd.DataFrame(dict(zip(fields, found, strict=True)))

    result: Any = pd.Series if single else pd.DataFrame
    # PySpark reads the kind of UDF from the hints.
    given = len(inference.columns) + bool(inference.may_be_nan) + has_empty_rows
    taken: Any = pd.Series if given == 1 else tuple[pd.Series, ...]
    predict.__annotations__ = {"batches": Iterator[taken], "return": Iterator[result]}
    return pandas_udf(predict, return_type)  # type: ignore[call-overload]


def is_scalar(shape: tuple[int, ...]) -> bool:
    """Return whether a row of this shape becomes a plain number."""
    return shape in ((), (1,))


def _empty(inference: Inference) -> list[pd.Series]:
    kinds = [np.float64 if is_scalar(shape) else object for shape in inference.fields.values()]
    return [pd.Series([], dtype=kind) for kind in kinds]


def _among_empty(series: pd.Series, is_row: Array) -> pd.Series:
    """Return a column with nulls where empty rows are."""
    values = np.full(len(is_row), np.nan if series.dtype == np.float64 else None, series.dtype)
    values[is_row] = series.to_numpy()
    return pd.Series(values)


def _spark_type(shape: tuple[int, ...]) -> T.DataType:
    data_type: T.DataType = T.DoubleType()
    for _ in () if is_scalar(shape) else shape:
        # Pandas' NaN is a null to Spark, wherever it is.
        data_type = T.ArrayType(data_type)
    return data_type


def predictor_key(document: bytes | LocalFile, load: Callable[[Document], Predictor]) -> str:
    """Return what tells a predictor from others: a digest of all that it is made of.

    Of one document, models with other settings make other predictors: ``load`` is pickled with all
    that it refers to.
    """
    digest = hashlib.sha256()
    for piece in chunks(document, _HASHED_BYTES):
        digest.update(piece)
    digest.update(cloudpickle.dumps(load))
    return digest.hexdigest()


# Python workers serve many tasks: a model is unpickled once in each of them.
_predictors: dict[str, Predictor] = {}


def _cached_predictor(key: str, model: Sent, load: Callable[[Document], Predictor]) -> Predictor:
    if key not in _predictors:
        gc.unfreeze()
        _predictors.clear()
        with received(model) as document:
            _predictors[key] = load(document)
        # PySpark collects garbage after each task, and looks at all objects of an imported
        # framework each time, for 100 ms and more. What lives as long as the predictor is set aside
        # until another one comes.
        gc.collect()
        gc.freeze()
    return _predictors[key]


def _has_nulls(name: str) -> DataError:
    return DataError(f"Column {name!r} holds nulls; fill or drop them before transform().")


def _to_array(series: pd.Series, name: str) -> Array:
    if series.dtype != object or not len(series) or isinstance(series.iloc[0], (str, bytes)):
        return series.to_numpy()
    return _stacked(series.to_list(), name)


def _stacked(rows: list[Any], name: str) -> Array:
    """Return arrays, or arrays of arrays, as one."""
    try:
        lengths = set(map(len, rows))
    except TypeError:  # None has no length
        raise _has_nulls(name) from None
    if len(lengths) != 1:
        raise DataError(f"Column {name!r} is ragged: its arrays differ in length.")
    # Several times as fast as np.stack, which makes a view of each row first.
    items = np.concatenate(rows)
    if items.dtype == object:
        items = _stacked(items.tolist(), name)
    return items.reshape(len(rows), *lengths, *items.shape[1:])


def _to_series(array: Array, shape: tuple[int, ...]) -> pd.Series:
    array = array.astype(np.float64, copy=False)
    if is_scalar(shape):
        return pd.Series(array.reshape(-1))
    return pd.Series(list(array) if len(shape) == 1 else array.tolist())
