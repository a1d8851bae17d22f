"""The base of all fitted models: ``transform`` with one forward pass per batch of rows."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from hvd_estimators.classification import ClassificationParams
from hvd_estimators.data.names import clashing, require_columns, unused_name
from hvd_estimators.data.schema import feature_array
from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.inference import Inference, Predictor, is_scalar, make_udf
from hvd_estimators.params import declare, integer, names
from hvd_estimators.persistence import FileReadable, FileWritable
from hvd_estimators.transforming import TransformationParams

__all__ = ["HorovodModel", "Predictor"]


class HorovodModel(Model, TransformationParams, ClassificationParams, FileWritable, FileReadable):
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
        class_columns = self._class_columns()
        added = [*outputs, *class_columns.values()]
        for index, name in enumerate(added):
            taken = clashing(dataset, name, [*dataset.columns, *added[:index]])
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
        inference = self._inference(dataset, features, shapes)
        arrays = [self._feature_column(dataset, name) for name in inference.columns]
        document, load = self._make_predictor()
        predicted = make_udf(document, load, inference)(*arrays)
        types = self.getOrDefault("output_types") or [None] * len(outputs)
        fields = inference.fields
        if len(fields) == 1:
            return dataset.withColumn(outputs[0], _as_type(predicted, shapes[0], types[0]))
        struct = unused_name("__predicted", [*dataset.columns, *added])
        with_struct = dataset.withColumn(struct, predicted)
        wanted = [*zip(outputs, types, strict=True), *((n, None) for n in class_columns.values())]
        columns = {
            name: _as_type(F.col(struct)[field], shape, data_type)
            for (field, shape), (name, data_type) in zip(fields.items(), wanted, strict=True)
        }
        return with_struct.withColumns(columns).drop(struct)

    def _inference(
        self, dataset: DataFrame, features: list[str], shapes: list[tuple[int, ...]]
    ) -> Inference:
        """Return what is to be done with a batch of rows."""
        inference = self._applied(dataset, features)
        return replace(
            inference,
            shapes=tuple(map(tuple, shapes)),
            batch_rows=self.getOrDefault("inference_batch_size"),
            scores=self._class_scores(shapes),
        )

    def _applied(self, dataset: DataFrame, features: list[str]) -> Inference:
        """Return what comes before the forward pass: the columns, and what is made of them."""
        transformation = None
        if self.getOrDefault("apply_transformation"):
            transformation = self._make_transformation(features, self._text_features())
        if transformation is None:
            return Inference(tuple(features), tuple(features))
        known = self._get_metadata() or {}
        others = [n for n in known if n not in features and n in dataset.columns]
        dtypes = {n: entry["dtype"] for n, entry in known.items() if entry["dtype"] != "object"}
        return Inference(
            (*features, *others), tuple(features), transformation=transformation, dtypes=dtypes
        )

    def _feature_column(self, dataset: DataFrame, name: str) -> Column:
        """Return a column as the UDF takes it: numbers, arrays of them, or text."""
        is_text = self.getOrDefault("apply_transformation") or name in self._text_features()
        return feature_array(dataset, name, allow_text=is_text)

    def _text_features(self) -> tuple[str, ...]:
        """Return the feature columns that the model takes as text; where models do."""
        return ()


def _as_type(column: Column, shape: tuple[int, ...], data_type: str | None) -> Column:
    if data_type is not None:
        return column.cast(data_type)
    return column if is_scalar(shape) or len(shape) > 1 else array_to_vector(column)
