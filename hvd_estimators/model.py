"""The base of all fitted models: ``transform`` with one forward pass per batch of rows."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import pandas_udf

from hvd_estimators.data.columns import Array
from hvd_estimators.data.names import clashing, require_columns, unused_name
from hvd_estimators.data.schema import feature_array
from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.params import (
    DeclaredParams,
    declare,
    integer,
    names,
)
from hvd_estimators.persistence import FileReadable, FileWritable

__all__ = ["HorovodModel", "Predictor"]

Predictor = Callable[[list[Array]], list[Array]]
"""Feature arrays, rows first, to output arrays, rows first. Runs on executors."""


class HorovodModel(Model, DeclaredParams, FileWritable, FileReadable):
    """Base of the fitted models."""

    model = declare("The trained model.")
    history = declare("What was measured in each epoch: a list of dicts.")
    run_id = declare("Name of the run that trained it.")
    feature_columns = declare("Input columns, in the order of the model's inputs.", convert=names)
    label_columns = declare(
        "Label columns, in the order of the model's outputs.",
        convert=names,
        aliases=["LabelColoumns"],
    )
    outputCols = declare(
        "Names of the columns that transform() adds, in the order of the model's outputs. Default: "
        "<label>__output.",
        convert=names,
        accessor="OutputCols",
    )
    output_shapes = declare("Shape of one row of each output; () for a number.")
    output_types = declare(
        "Spark type of each output column, as DDL strings, where it is not to be a double (a "
        "number), an ML vector (one dimension) or nested arrays of doubles."
    )
    _metadata = declare("The columns that were trained on, see `column_metadata`: name to a dict.")
    inference_batch_size = declare(
        "Rows of one forward pass. Default: a whole Arrow batch "
        "(spark.sql.execution.arrow.maxRecordsPerBatch).",
        convert=integer(1),
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.setParams(**kwargs)

    def _get_metadata(self) -> dict[str, Any] | None:
        """Return ``_metadata``; as the models of ``horovod.spark`` do."""
        metadata: dict[str, Any] | None = self.getOrDefault("_metadata")
        return metadata

    def getOutputCols(self) -> list[str]:
        """Return the names of the columns that `transform` adds, default ones where none is set."""
        given = self.getOrDefault("outputCols")
        if given:
            return list(given)
        return [f"{label}__output" for label in self.getOrDefault("label_columns") or []]

    @abc.abstractmethod
    def _make_predictor(self) -> tuple[bytes, Callable[[bytes], Predictor]]:
        """Return a document for the executors, and the function that makes a predictor of it."""

    @abc.abstractmethod
    def _output_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of one row of each output."""

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the output columns. Lazy: nothing runs before the result is used."""
        features = self.getOrDefault("feature_columns")
        require_columns(dataset, "feature_columns", features or [])
        outputs = self.getOutputCols()
        for index, name in enumerate(outputs):
            taken = clashing(dataset, name, [*dataset.columns, *outputs[:index]])
            if taken:
                raise ColumnError(
                    f"outputCols: the column {name!r} cannot be added, there is {taken[0]!r} "
                    "already. Drop that, or set other names with setOutputCols."
                )
        shapes = self._output_shapes()
        if len(shapes) != len(outputs):
            raise ParamError(
                f"outputCols: the model has {len(shapes)} outputs, found {len(outputs)} names: "
                f"{outputs}."
            )
        arrays = [self._feature_column(dataset, name) for name in features]
        document, load = self._make_predictor()
        udf = _make_udf(document, load, features, shapes, self.getOrDefault("inference_batch_size"))
        predicted = udf(*arrays)
        types = self.getOrDefault("output_types") or [None] * len(outputs)
        if len(shapes) == 1:
            return dataset.withColumn(outputs[0], _as_type(predicted, shapes[0], types[0]))
        struct = unused_name("__predicted", [*dataset.columns, *outputs])
        with_struct = dataset.withColumn(struct, predicted)
        columns = {
            name: _as_type(F.col(struct)[f"o{index}"], shape, data_type)
            for index, (name, shape, data_type) in enumerate(
                zip(outputs, shapes, types, strict=True)
            )
        }
        return with_struct.withColumns(columns).drop(struct)

    def _feature_column(self, dataset: DataFrame, name: str) -> Column:
        """Return a feature as the predictor takes it: numbers, or arrays of them."""
        return feature_array(dataset, name)


def _as_type(column: Column, shape: tuple[int, ...], data_type: str | None) -> Column:
    if data_type is not None:
        return column.cast(data_type)
    return column if _is_scalar(shape) or len(shape) > 1 else array_to_vector(column)


def _is_scalar(shape: tuple[int, ...]) -> bool:
    return shape in ((), (1,))


def _spark_type(shape: tuple[int, ...]) -> T.DataType:
    data_type: T.DataType = T.DoubleType()
    for _ in () if _is_scalar(shape) else shape:
        data_type = T.ArrayType(data_type, containsNull=False)
    return data_type


def _make_udf(
    document: bytes,
    load: Callable[[bytes], Predictor],
    features: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    batch_rows: int | None,
) -> Callable[..., Column]:
    """Return a UDF from feature arrays to the output, or to a struct of several outputs."""
    key = hashlib.sha256(document).hexdigest()
    single = len(shapes) == 1
    if single:
        return_type = _spark_type(shapes[0])
    else:
        return_type = T.StructType(
            [T.StructField(f"o{i}", _spark_type(shape)) for i, shape in enumerate(shapes)]
        )

    def predict(batches: Any) -> Any:
        predictor = _cached_predictor(key, document, load)
        for batch in batches:
            # PySpark gives one column as it is, and several as a tuple.
            series = batch if isinstance(batch, tuple) else (batch,)
            inputs = [
                _to_array(column, name) for column, name in zip(series, features, strict=True)
            ]
            rows = len(series[0])
            step = batch_rows or max(rows, 1)
            parts = [
                predictor([array[start : start + step] for array in inputs])
                for start in range(0, rows, step)
            ]
            outputs = [
                _to_series([part[index] for part in parts], shape)
                for index, shape in enumerate(shapes)
            ]
            if single:
                yield outputs[0]
            else:
                yield pd.DataFrame({f"o{i}": output for i, output in enumerate(outputs)})

    result: Any = pd.Series if single else pd.DataFrame
    # PySpark reads the kind of UDF from the hints.
    taken: Any = pd.Series if len(features) == 1 else tuple[pd.Series, ...]
    predict.__annotations__ = {"batches": Iterator[taken], "return": Iterator[result]}
    return pandas_udf(predict, return_type)  # type: ignore[call-overload]


# Python workers serve many tasks: a model is unpickled once in each of them.
_predictors: dict[str, Predictor] = {}


def _cached_predictor(key: str, document: bytes, load: Callable[[bytes], Predictor]) -> Predictor:
    if key not in _predictors:
        _predictors.clear()
        _predictors[key] = load(document)
    return _predictors[key]


def _to_array(series: pd.Series, name: str) -> Array:
    if series.isna().any():
        raise DataError(f"Column {name!r} holds nulls; fill or drop them before transform().")
    if series.dtype != object or not len(series) or isinstance(series.iloc[0], (str, bytes)):
        return series.to_numpy()
    try:
        return np.stack([_nested(value) for value in series])
    except ValueError as error:
        raise DataError(f"Column {name!r} is ragged: its arrays differ in length.") from error


def _nested(value: Any) -> Array:
    array = np.asarray(value)
    return np.stack([_nested(entry) for entry in array]) if array.dtype == object else array


def _to_series(parts: list[Array], shape: tuple[int, ...]) -> pd.Series:
    array = np.concatenate(parts).astype(np.float64, copy=False)
    if _is_scalar(shape):
        return pd.Series(array.reshape(-1))
    return pd.Series(list(array) if len(shape) == 1 else array.tolist())
