"""The base of all fitted models: ``transform`` with one forward pass per batch of rows."""

from __future__ import annotations

import abc
import functools
import math
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.exceptions import ColumnError, ParamError
from hvd_estimators.history import history_rows
from hvd_estimators.inference.batch_bytes import spread
from hvd_estimators.inference.opaque import with_opaque
from hvd_estimators.inference.shared import SharedBytes
from hvd_estimators.inference.udf import Document, Inference, Predictor, is_scalar, make_udf
from hvd_estimators.params import declare, integer, names
from hvd_estimators.params.classification import ClassificationParams
from hvd_estimators.params.transformation import TransformationParams
from hvd_estimators.prepare.column_names import clashing, quoted, require_columns, require_frame
from hvd_estimators.prepare.schema import feature_array
from hvd_estimators.saving.persistence import FileReadable, FileWritable
from hvd_estimators.temporary import LocalFile

__all__ = ["HorovodModel", "Predictor"]


class HorovodModel(Model, TransformationParams, ClassificationParams, FileWritable, FileReadable):
    """Base of the fitted models."""

    model = declare("The trained model.")
    history = declare(
        "What was measured in each epoch: a list of dicts with epoch, train and validation. See "
        "history_frame() for rows."
    )
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
        "Rows of one forward pass. Default: a whole Arrow batch, of "
        "spark.sql.execution.arrow.maxRecordsPerBatch rows, or of 32 MiB if these are fewer.",
        convert=integer(1),
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._shared = SharedBytes()
        self.setParams(**kwargs)

    def _get_metadata(self) -> dict[str, Any] | None:
        """Return ``_metadata``; as the models of ``horovod.spark`` do."""
        metadata: dict[str, Any] | None = self.getOrDefault("_metadata")
        return metadata

    def history_frame(self) -> pd.DataFrame:
        """Return what was measured as rows: the same columns for all frameworks.

        ``getHistory()`` has a shape of its own for each of them:

        - Keras: that of Keras's ``History.history``, a dict of name to a list of values by epoch;
          names of validation begin with ``val_``, which is left out here. It does not tell epochs:
          of what a callback adds in some of them only, the first value is taken for epoch 0's.
        - torch: a list of dicts, one per epoch, with ``epoch``, ``train`` and (with validation)
          ``validation``; the latter two hold ``loss`` and ``all_metrics``, a list with a dict per
          group of metrics, such as ``{"group_0_label": 0.1}``.
        - Lightning: the same list; ``train`` and ``validation`` hold ``loss`` where steps return
          one, and what the module logs by the names that it logs it by.

        Returns
        -------
        pandas.DataFrame
            A row per number, with the columns ``epoch`` (of the whole run, from 0), ``stage``
            (``"train"`` or ``"validation"``), ``name`` (that of a metric; members of an array are
            numbered, ``name_0`` and so on) and ``value`` (a float). Empty if there is no history.
        """
        rows = history_rows(self.getOrDefault("history") or [])
        columns = {"epoch": "int64", "stage": "object", "name": "object", "value": "float64"}
        return pd.DataFrame(rows, columns=list(columns)).astype(columns)

    def _kept_elsewhere(self) -> str:
        run_id = self.getOrDefault("run_id")
        if run_id is None:
            return ""
        return (
            "This object is as it was. A store that keeps runs has what was trained as "
            f"run_id={run_id!r}: fit() with that run_id and otherwise the same params returns it."
        )

    def getOutputCols(self) -> list[str]:
        """Return the names of the columns that `transform` adds, default ones where none is set."""
        given = self.getOrDefault("outputCols")
        if given:
            return list(given)
        return [f"{label}__output" for label in self.getOrDefault("label_columns") or []]

    @abc.abstractmethod
    def _make_predictor(self) -> tuple[bytes | LocalFile, Callable[[Document], Predictor]]:
        """Return a document for the executors, and the function that makes a predictor of it."""

    @abc.abstractmethod
    def _output_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of one row of each output."""

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the output columns. Lazy: nothing runs before the result is used."""
        require_frame("dataset", dataset)
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
        document, load = self._make_predictor()
        items = sum(math.prod(shape) for shape in inference.fields.values())
        spread_out = spread(dataset, inference.columns, self._known_sizes(), items)
        if spread_out is not None:
            dataset = spread_out.frame
        given = self._given_columns(dataset, inference)
        if spread_out is not None:
            given.append(spread_out.is_row)
        predicted = make_udf(
            document,
            load,
            inference,
            functools.partial(self._shared.send, dataset),
            has_empty_rows=spread_out is not None,
        )(*given)
        made = f"__predicted_{uuid.uuid4().hex}"
        # Otherwise the model would run in a filter on a prediction, and once more.
        with_made = (
            with_opaque(dataset, predicted, made)
            if spread_out is None
            else spread_out.without_empty_rows(predicted, made)
        )
        types = self.getOrDefault("output_types") or [None] * len(outputs)
        wanted = [*zip(outputs, types, strict=True), *((n, None) for n in class_columns.values())]
        fields = inference.fields
        columns = {
            name: _as_type(F.col(made)[field] if len(fields) > 1 else F.col(made), shape, data_type)
            for (field, shape), (name, data_type) in zip(fields.items(), wanted, strict=True)
        }
        return with_made.withColumns(columns).drop(made)

    def _given_columns(self, dataset: DataFrame, inference: Inference) -> list[Column]:
        """Return what the UDF is called with: its columns, and where there are nulls in some."""
        given = [self._feature_column(dataset, name) for name in inference.columns]
        if not inference.may_be_nan:
            return given
        # To pandas NaN and null are the same.
        positions = [
            F.when(F.col(quoted(name)).isNull(), F.lit(position))
            for position, name in enumerate(inference.may_be_nan)
        ]
        return [*given, F.coalesce(*positions, F.lit(-1))]

    def _inference(
        self, dataset: DataFrame, features: list[str], shapes: list[tuple[int, ...]]
    ) -> Inference:
        """Return what is to be done with a batch of rows."""
        inference = self._applied(dataset, features)
        floats = (T.FloatType, T.DoubleType, T.DecimalType)
        may_be_nan = (
            n for n in inference.columns if isinstance(dataset.schema[n].dataType, floats)
        )
        return replace(
            inference,
            may_be_nan=tuple(may_be_nan),
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

    def _known_sizes(self) -> dict[str, int | None]:
        """Return how many numbers a row has in a column, at most, where that is known."""
        metadata = self._get_metadata() or {}
        return {name: entry["max_size"] for name, entry in metadata.items() if "max_size" in entry}

    def _text_features(self) -> tuple[str, ...]:
        """Return the feature columns that the model takes as text; where models do."""
        return ()


def _as_type(column: Column, shape: tuple[int, ...], data_type: str | None) -> Column:
    column = _with_nan(column, 0 if is_scalar(shape) else len(shape))
    if data_type is not None:
        return column.cast(data_type)
    return column if is_scalar(shape) or len(shape) > 1 else array_to_vector(column)


def _with_nan(column: Column, depth: int) -> Column:
    """Return predictions with NaN again, which has become null on the way from pandas."""
    nan = F.lit(float("nan"))
    if depth == 0:
        return F.coalesce(column, nan)
    mended = F.transform(column, lambda entry: _with_nan(entry, depth - 1))
    if depth > 1:
        return mended
    # Faster where there is none: null says that the array holds a null.
    return F.when(F.array_contains(column, nan).isNull(), mended).otherwise(column)
