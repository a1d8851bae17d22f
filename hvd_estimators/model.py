"""Base class of all fitted models; ``transform`` runs one forward pass per batch of rows."""

from __future__ import annotations

import abc
import functools
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.exceptions import ColumnError, DataError, ParamError, ResultsError
from hvd_estimators.inference.batch import (
    BatchPredictor,
    Predictor,
    is_scalar,
    known_sizes,
    labels_of,
)
from hvd_estimators.inference.broadcast import Payload, SharedBytes
from hvd_estimators.inference.classification import (
    ClassScores,
    class_columns,
    class_scores,
    is_multilabel,
    resolve_kind,
)
from hvd_estimators.inference.errors import naming_transformation
from hvd_estimators.inference.evaluation import Evaluator, evaluate_partitions
from hvd_estimators.inference.frame import (
    PaddedFrame,
    as_rows,
    pad_large_rows,
    with_barrier_column,
    without_nulls,
)
from hvd_estimators.inference.output_columns import output_columns, output_types
from hvd_estimators.inference.udf import (
    Output,
    active_session,
    checked_name,
    has_arrow_udfs,
    make_udf,
    packed,
    spark_type,
    vector_parts,
)
from hvd_estimators.launch.cluster.jobs import describing, jobs_on
from hvd_estimators.loading.collate import Collate
from hvd_estimators.loading.collate_fn import make_collate
from hvd_estimators.loading.transform import make_transformation
from hvd_estimators.params import column_names, input_columns, param, string, type_names
from hvd_estimators.params.model import SharedParams
from hvd_estimators.prepare.schema import (
    clashing,
    feature_array,
    fields_by_name,
    quoted,
    require_columns,
    require_frame,
    stored_column,
)
from hvd_estimators.saving.save import Saved
from hvd_estimators.summary import EvaluationSummary, TrainingSummary, history_rows

PREDICTION = "prediction"
"""Name of the prediction column that Spark ML's evaluators read by default."""

logger = logging.getLogger(__name__)


if TYPE_CHECKING:
    from pyspark.sql._typing import UserDefinedFunctionLike

    from hvd_estimators.params.signatures import ModelSignatures
else:
    ModelSignatures = SharedParams


class HorovodModel(Model, ModelSignatures, Saved):
    """Base class of the fitted models."""

    model = param("The trained model.", fitted=True)
    history = param(
        "Results of each epoch: a list of dicts with epoch, train and validation. "
        "history_frame() returns them as rows.",
        type="list[dict[str, Any]]",
        fitted=True,
    )
    run_id = param("Name of the run that trained the model.", type="str", fitted=True)
    feature_columns = param(
        "Input columns, in the order of the model's inputs, as in feature_cols.",
        convert=input_columns,
        fitted=True,
    )
    label_columns = param(
        "Label columns, in the order of the model's outputs.",
        convert=column_names,
        aliases=["LabelColoumns"],
        fitted=True,
    )
    outputCols = param(
        "Names of the columns that transform() adds, in the order of the model's outputs. "
        "Default: <label>__output; without labels, output, or output_<position> for several "
        "outputs.",
        convert=column_names,
        accessor="OutputCols",
    )
    output_shapes = param(
        "Shape of one row of each output: () for a number, None for a size that varies by batch.",
        type="Sequence[Sequence[int | None]]",
    )
    sample_weight_col = param("Column with the weight of each row, for evaluate().", convert=string)
    output_types = param(
        "Spark type of each output column, as DDL strings. Default: a double (a number), an ML "
        "vector (one dimension) or nested arrays of doubles.",
        convert=type_names,
    )
    _metadata = param(
        "Metadata of the training columns, see `column_metadata`: dict of name to a dict."
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._shared = SharedBytes()
        self._summary: TrainingSummary | None = None
        self.setParams(**kwargs)

    @property
    def hasSummary(self) -> bool:
        """True for a model that `fit` returned, which has a `summary`; False for a loaded one."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """Summary of the fit, as in Spark ML: metrics, duration, rows and restarts.

        Raises
        ------
        ResultsError
            If there is none, because the model was loaded or created without training.
        """
        if self._summary is None:
            raise ResultsError(
                f"summary: this {type(self).__name__} has none, because fit() did not return it. "
                "history_frame() returns the metrics of a loaded model."
            )
        return self._summary

    def history_frame(self) -> pd.DataFrame:
        """Return the training history as a DataFrame with the same columns for all frameworks.

        ``getHistory()`` returns a different structure for each framework:

        - Keras: the dict of Keras's ``History.history``: name to a list of values by epoch.
          Validation names begin with ``val_``; this method removes the prefix. The dict contains no
          epoch numbers. If a callback adds a value in some epochs only, its first value is assigned
          to epoch 0.
        - torch: a list of dicts, one per epoch, with ``epoch``, ``train`` and (with validation)
          ``validation``. ``train`` and ``validation`` hold ``loss`` and ``all_metrics``, a list
          with one dict per group of metrics, such as ``{"my_metric": 0.1}``.
        - Lightning: the same list. ``train`` and ``validation`` hold ``loss`` if the steps return a
          loss, and the module's logged values by name.

        Returns
        -------
        pandas.DataFrame
            One row per number, with the columns ``epoch`` (of the whole run, from 0), ``stage``
            (``"train"`` or ``"validation"``), ``name`` (of the metric; elements of an array are
            numbered ``name_0`` and so on) and ``value`` (a float). Empty if there is no history.
        """
        rows = history_rows(self.getOrDefault("history") or [])
        columns = {"epoch": "int64", "stage": "object", "name": "object", "value": "float64"}
        return pd.DataFrame(rows, columns=list(columns)).astype(columns)

    @property
    def numClasses(self) -> int | None:
        """Number of classes; None if ``outputs_are`` or the output's shape does not show it.

        Also None for independent labels, of which a row may have several.
        """
        shapes = self.getOrDefault("output_shapes") or []
        kind = self._outputs_are()
        if kind in (None, "values") or is_multilabel(kind):
            return None
        if len(shapes) != 1 or len(shapes[0]) > 1:
            return None
        (size,) = shapes[0] or (1,)
        return None if size is None or size < 1 else max(int(size), 2)

    def transform(self, dataset: DataFrame, params: Any = None) -> DataFrame:
        """Return the rows with the output columns.

        Parameters
        ----------
        dataset : DataFrame
            The rows.
        params : dict, optional
            Params for this call. The name ``"model"`` and the class's param are ignored, because
            grids hold them for the estimator: set another model with ``setModel``.
        """
        if isinstance(params, Mapping):
            params = {key: value for key, value in params.items() if key != "model"}
        return super().transform(dataset, params)

    def evaluate(self, dataset: DataFrame) -> EvaluationSummary:
        """Compute the losses and metrics of training on a DataFrame.

        Returns the same values as validation during training, up to rounding. Spark tasks evaluate
        the rows of their partitions, and the driver combines their sums. A metric that is a plain
        function is averaged over batches, weighted by rows. The DataFrame needs the columns of the
        features and labels, and of ``sample_weight_col`` if set. Nulls are an error, unless
        ``handleInvalid`` is ``"skip"``. Runs on the driver.

        Parameters
        ----------
        dataset : DataFrame
            The rows. With ``apply_transformation``, the columns before the transformation.

        Returns
        -------
        EvaluationSummary
            Loss and metrics by name, and the number of rows.

        Raises
        ------
        ParamError
            If the DataFrame is a stream, or if the model's losses are not known.
        ColumnError
            If a column is missing, or has an unsuitable type.
        DataError
            If there are no rows, or if rows have nulls.
        PredictionError
            If the model or a loss fails on some rows.
        """
        require_frame("dataset", dataset)
        with naming_transformation(self.getOrDefault):
            return self._evaluated(dataset)

    def _evaluated(self, dataset: DataFrame) -> EvaluationSummary:
        document, load, combine = self._make_evaluator()
        weight = self.getOrDefault("sample_weight_col")
        groups = {
            "feature_columns": list(self._input_columns().columns),
            "label_columns": list(self.getOrDefault("label_columns") or []),
            "sample_weight_col": [weight] if weight else [],
        }
        for name, columns in groups.items():
            if columns:
                require_columns(dataset, name, columns)
        is_final = not self.getOrDefault("apply_transformation")
        if weight and is_final and stored_column(dataset.schema[weight]).spec.kind != "scalar":
            raise ColumnError(
                f"expected a column of numbers, found {weight!r} of type "
                f"{dataset.schema[weight].dataType.simpleString()}. Set a column with a number in "
                "each row.",
                param="sample_weight_col",
            )
        inputs = self._plain_batch_predictor(
            dataset, [*groups["label_columns"], *groups["sample_weight_col"]]
        )
        takes_nulls = inputs.collate is not None and inputs.collate.takes_nulls
        inputs = replace(
            inputs,
            batch_rows=self.getOrDefault("inference_batch_size"),
            keeps_nulls=takes_nulls and self.getOrDefault("handleInvalid") == "keep",
        )
        rows = dataset.select(*(quoted(name) for name in inputs.columns))
        frame, padded, given = self._with_arguments(rows, inputs.columns, inputs.columns, 1)
        run_id = self.getOrDefault("run_id")
        with (
            describing("Evaluate a model" + (f" of run {run_id}" if run_id else "")),
            jobs_on(dataset),
        ):
            states = evaluate_partitions(
                frame.select(*given).toDF(*(f"c{n}" for n in range(len(given)))),
                document,
                load,
                inputs,
                functools.partial(self._shared.send, dataset),
                has_empty_rows=padded is not None,
            )
        count, metrics = combine(states)
        if not count:
            raise DataError(
                "dataset: expected at least one row to evaluate, found none. If handleInvalid is "
                "'skip', all rows may have nulls."
            )
        return EvaluationSummary(count, metrics)

    def _make_evaluator(
        self,
    ) -> tuple[
        bytes | LocalFile,
        Callable[..., Evaluator],
        Callable[[list[Any]], tuple[int, dict[str, Any]]],
    ]:
        """Return a document, a function that loads an evaluator from it, and one that combines.

        The last function maps the states of all partitions to the number of rows and the values by
        name. Models that can be evaluated override this hook.
        """
        raise ParamError(
            f"evaluate: {type(self).__name__} does not support it. Call transform(), and an "
            "evaluator of pyspark.ml.evaluation on its result."
        )

    def _get_metadata(self) -> dict[str, Any] | None:
        """Return ``_metadata``, as the models of ``horovod.spark`` do."""
        metadata: dict[str, Any] | None = self.getOrDefault("_metadata")
        return metadata

    def _kept_elsewhere(self) -> str:
        run_id = self.getOrDefault("run_id")
        if run_id is None:
            return ""
        return (
            "This object is unchanged. If the store saves runs, fit() with "
            f"run_id={run_id!r} and otherwise the same params returns the trained model again."
        )

    def getOutputCols(self) -> list[str]:
        """Return the names of the columns that `transform` adds; defaults if no names are set."""
        return output_columns(lambda name: self.getOrDefault(name) if self.hasParam(name) else None)

    @abc.abstractmethod
    def _make_predictor(self) -> tuple[bytes | LocalFile, Callable[[Payload], Predictor]]:
        """Return a document for the executors and a function that creates a predictor from it."""

    @abc.abstractmethod
    def _output_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of one row of each output."""

    def as_udf(self, name: str | None = None) -> UserDefinedFunctionLike:
        """Return a UDF that predicts, for column expressions and, if it has a name, for SQL.

        >>> model.as_udf("my_model")
        >>> spark.sql("select id, my_model(features) as prediction from rows")

        The UDF takes the feature columns, in the order of ``feature_columns``, with the columns of
        lists one after another: numbers, booleans, vectors, arrays of numbers, and text if the
        model takes text. With ``apply_transformation``,
        it takes the columns before the transformation.

        By default, an output with one number per row becomes a double. Every other output becomes
        an array of doubles, because SQL has no vectors; `pyspark.ml.functions.array_to_vector`
        converts arrays to vectors. ``output_types`` overrides these types. Several outputs and the
        class columns become the fields of a struct, with the column names of `transform`. Without
        ``predictionCol``, the UDF does not add a class as the only one of these columns.

        This method runs on the driver and starts no Spark job. Unlike `transform`, the UDF has no
        access to the DataFrame:

        - Spark may run the UDF twice for a row: in a filter on its result, and again after the
          filter. `transform` prevents this. To prevent it here, register
          ``as_udf().asNondeterministic()`` with ``spark.udf.register``. Queries must then not
          aggregate the UDF or join on it.
        - Batches have ``spark.sql.execution.arrow.maxRecordsPerBatch`` rows, and since Spark 4 at
          most ``maxBytesPerBatch`` bytes.
        - The UDF cannot drop rows: ``handleInvalid="skip"`` acts like ``"keep"``.

        Parameters
        ----------
        name : str, optional
            Name of the UDF in the active session's SQL. Replaces a UDF with the same name.

        Returns
        -------
        callable
            Takes columns, or their names, and returns a column.

        Raises
        ------
        ParamError
            If no session is active, the name belongs to a built-in Spark function, the output
            shapes are unknown, or ``output_types`` does not fit the shapes.
        """
        session = active_session()
        if name is not None:
            checked_name(session, name)
        if self._default_prediction and self._class_columns().keys() == {"prediction"}:
            return self._without_prediction().as_udf(name)
        inference = self._inference(None)
        is_text = self._takes_text()
        udf = make_udf(
            *self._make_predictor(),
            inference,
            functools.partial(self._shared.send, session.range(0)),
            self._udf_outputs(inference, in_sql=True),
            sql_text=[n for n in inference.columns if is_text or n in self._text_features()],
        )
        return udf if name is None else session.udf.register(name, udf)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the output columns lazily: prediction runs when the result is used."""
        require_frame("dataset", dataset, allow_stream=True)
        model, name = self, self._default_prediction
        if name in self.getOutputCols():
            model = self._without_prediction()
        elif name and clashing(dataset, name, dataset.columns):
            logger.warning(
                "predictionCol: the DataFrame has a column %r already, so transform() adds none. "
                "Set predictionCol to another name to add this model's, or to '' to leave it out.",
                name,
            )
            model = self._without_prediction()
        with naming_transformation(self.getOrDefault):
            return model._transformed(dataset)

    @property
    def _default_prediction(self) -> str | None:
        """Name of the prediction column if it is a default; None if it was set, or is none."""
        name: str | None = self.getOrDefault("predictionCol")
        return None if self.isSet("predictionCol") else name

    def _without_prediction(self) -> Self:
        return self.copy({"predictionCol": ""})

    def _transformed(self, dataset: DataFrame) -> DataFrame:
        require_columns(dataset, "feature_columns", self._input_columns().columns)
        added = [*self.getOutputCols(), *self._class_columns().values()]
        for index, name in enumerate(added):
            clashes = clashing(dataset, name, [*dataset.columns, *added[:index]])
            if clashes:
                raise ColumnError(
                    f"outputCols: the column {name!r} cannot be added, there is {clashes[0]!r} "
                    "already. Drop that, or set other names with setOutputCols."
                )
        inference = self._inference(dataset)
        outputs = self._udf_outputs(inference)
        items = sum(math.prod(known_sizes(output.shape)) for output in outputs)
        dataset, padded, given = self._with_arguments(
            dataset, inference.columns, inference.needed, items
        )
        if padded is None and has_arrow_udfs():
            dataset = as_rows(dataset)
        arguments = packed(given)
        predicted = make_udf(
            *self._make_predictor(),
            inference,
            functools.partial(self._shared.send, dataset),
            outputs,
            has_empty_rows=padded is not None,
            is_packed=len(arguments) < len(given),
        )(*arguments)
        made = f"__predicted_{uuid.uuid4().hex}"
        # Otherwise the model would run twice: in a filter on a prediction, and after it.
        with_made = (
            with_barrier_column(dataset, predicted, made)
            if padded is None
            else padded.without_empty_rows(predicted, made)
        )
        columns = {}
        for output in outputs:
            column = F.col(made)[output.field] if len(outputs) > 1 else F.col(made)
            if output.is_vector and not has_arrow_udfs():
                # array_to_vector accepts no nulls.
                column = F.when(column.isNotNull(), array_to_vector(column))
            columns[output.column] = column
        if self._copies_output(inference.shapes):
            columns[self.getOrDefault("predictionCol")] = columns[outputs[0].column]
        return with_made.withColumns(columns).drop(made)

    def _with_arguments(
        self, rows: DataFrame, names: Sequence[str], needed: Sequence[str], output_items: int
    ) -> tuple[DataFrame, PaddedFrame | None, list[Column | str]]:
        """Return the rows to predict on, their padding, and the columns that executors receive.

        With ``handleInvalid="skip"``, rows with nulls in needed columns are left out. With
        padding, a further, last column is false for empty rows. See `pad_large_rows` for
        ``output_items``.
        """
        if self.getOrDefault("handleInvalid") == "skip":
            rows = without_nulls(rows, needed)
        padded = pad_large_rows(rows, names, self._known_sizes(), output_items)
        if padded is None:
            return rows, None, self._udf_arguments(rows, names)
        return padded.frame, padded, [*self._udf_arguments(padded.frame, names), padded.is_row]

    def _copies_output(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Return whether the only column for classes equals the output, a double per row."""
        is_double = len(shapes) == 1 and is_scalar(tuple(shapes[0]))
        return (
            is_double
            and self._outputs_are() == "values"
            and self._class_columns().keys() == {"prediction"}
            and self.getOrDefault("output_types") is None
        )

    def _udf_outputs(self, inference: BatchPredictor, *, in_sql: bool = False) -> list[Output]:
        """Return the fields of the UDF's result: the outputs, and a classifier's columns.

        In SQL, the fields have the names of the output columns, and there are no vectors.
        """
        names = self.getOutputCols()
        kinds = output_types(self.getOrDefault("output_types"), names, inference.shapes)
        types = [
            *zip(names, kinds, strict=True),
            *((n, None) for n in self._class_columns().values() if inference.scores is not None),
        ]
        outputs = []
        for (field, shape), (name, kind) in zip(inference.fields.items(), types, strict=True):
            is_vector = not in_sql and kind is None and len(shape) == 1 and not is_scalar(shape)
            made: T.DataType = spark_type(kind, shape)
            if is_vector and has_arrow_udfs():
                made = VectorUDT()
            outputs.append(Output(name if in_sql else field, name, shape, kind, made, is_vector))
        return outputs

    def _inference(self, dataset: DataFrame | None) -> BatchPredictor:
        """Return the predictor for batches of a DataFrame, or of any input if it is None."""
        shapes, outputs = self._output_shapes(), self.getOutputCols()
        if len(shapes) != len(outputs):
            raise ParamError(
                f"outputCols: the model has {len(shapes)} outputs, found {len(outputs)} names: "
                f"{outputs}. Set outputs to the positions or names of those that are wanted, such "
                "as [0], or a name for each output in outputCols."
            )
        copies_output = dataset is not None and self._copies_output(shapes)
        inference = self._plain_batch_predictor(dataset)
        handles = self.getOrDefault("handleInvalid")
        return replace(
            inference,
            # A UDF cannot drop rows.
            keeps_nulls=handles == "keep" or (dataset is None and handles == "skip"),
            shapes=tuple(map(tuple, shapes)),
            batch_rows=self.getOrDefault("inference_batch_size"),
            scores=None if copies_output else self._class_scores(shapes),
        )

    def setOutputs(self, value: Any) -> Self:
        """Set ``outputs``, and forget the shapes and the kind of the outputs before."""
        self.clear(self.output_shapes)
        self._setDefault(outputs_are=None, predictionCol=None)
        return self._set(outputs=value)

    def _class_columns(self) -> dict[str, str]:
        """Return the requested columns: content to column name."""
        return class_columns(self.getOrDefault)

    def _outputs_are(self) -> str | None:
        """Return the kind of the outputs, or None if it is unknown."""
        return resolve_kind(self.getOrDefault("outputs_are"), self._defaults()["outputs_are"])

    def _class_scores(self, shapes: Sequence[tuple[int | None, ...]]) -> ClassScores | None:
        """Return the object that computes the columns; None if no columns are requested."""
        return class_scores(self._class_columns(), self._outputs_are(), shapes)

    def _input_columns(self, further: Sequence[str] = ()) -> InputColumns:
        """Return the model's inputs and further columns, and the columns that they are made of."""
        features = self.getOrDefault("feature_columns") or []
        added = [name for name in dict.fromkeys(further) if name not in features]
        return InputColumns.of([*features, *added], kept=further)

    def _plain_batch_predictor(
        self, dataset: DataFrame | None, further: Sequence[str] = ()
    ) -> BatchPredictor:
        """Return a `BatchPredictor` with the inputs, further columns and the transformation.

        If the DataFrame is None, the input columns are the features alone.
        """
        inputs, transformation = self._input_columns(further), None
        if self.getOrDefault("apply_transformation"):
            transformation = make_transformation(
                self.getOrDefault, inputs.columns, self._text_features()
            )
        available = [] if dataset is None else dataset.columns
        metadata = self._get_metadata() or {}
        made = BatchPredictor.of(
            inputs, transformation, metadata, available, labels_of(self.getOrDefault)
        )
        return replace(made, collate=self._collate())

    def _collate(self) -> Collate | None:
        """Return the maker of batches of rows of any length; None for arrays by column."""
        get = self.getOrDefault
        if get("apply_transformation") and (get("collate_fn") or get("padding")):
            raise ParamError(
                "apply_transformation: the model makes its batches of rows by collate_fn or "
                "padding. Transform the rows in a collate_fn."
            )
        return make_collate(get, self._input_columns(), get("sample_weight_col"))

    def _udf_arguments(self, dataset: DataFrame, names: Sequence[str]) -> list[Column | str]:
        """Return the arguments of the UDF: columns, or their quoted names."""
        fields = fields_by_name(dataset)
        # Sparse vectors stay sparse in transit, and dense ones need no JVM conversion.
        return [
            vector_parts(F.col(quoted(name)))
            if isinstance(fields[name].dataType, VectorUDT) and self._collate() is None
            else self._feature_column(fields[name])
            for name in names
        ]

    def _feature_column(self, field: T.StructField) -> Column | str:
        """Convert a column to numbers, arrays of numbers, or text; or keep it for a function."""
        function, padded = map(self.getOrDefault, ("collate_fn", "padding"))
        if function is not None or field.name in (padded or ()):
            return feature_array(field, allow_any=True)
        is_text = self._takes_text() or field.name in self._text_features()
        return feature_array(field, allow_text=is_text)

    def _takes_text(self) -> bool:
        """Return whether all columns may be text; a hook for subclasses."""
        return bool(self.getOrDefault("apply_transformation"))

    def _known_sizes(self) -> dict[str, int | None]:
        """Return the maximum number of values per row of each column with a known maximum."""
        metadata = self._get_metadata() or {}
        return {name: entry["max_size"] for name, entry in metadata.items() if "max_size" in entry}

    def _text_features(self) -> tuple[str, ...]:
        """Return the feature columns that the model takes as text; none by default."""
        return ()
