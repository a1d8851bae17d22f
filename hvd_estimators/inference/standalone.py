"""Predictions of a saved model without Spark. Imports no PySpark and no framework."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_estimators._util.lazy_imports import lazy_names
from hvd_estimators.data.arrays import Array
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.exceptions import GpuError, ParamError
from hvd_estimators.inference.batch import BatchPredictor, Predictor, Resources, labels_of
from hvd_estimators.inference.classification import class_columns, class_scores, resolve_kind
from hvd_estimators.inference.errors import naming_transformation
from hvd_estimators.inference.output_columns import DOUBLE, output_columns, output_types
from hvd_estimators.inference.pipeline import Pipeline, as_lists, read_pipeline
from hvd_estimators.inference.standalone_rows import InputTable, read_columns, read_rows, read_table
from hvd_estimators.loading.collate_fn import make_collate
from hvd_estimators.loading.transform import make_transformation
from hvd_estimators.saving.saved import Saved, read_saved

Load = Callable[[Saved, Resources], tuple[Predictor, Sequence[str]]]
"""Function that loads a forward pass, and names the features that may be text."""

_DEVICE = re.compile(r"(?:cpu|(?:cuda|gpu)(?::([0-9]+))?)", re.IGNORECASE)

_MOST_ROWS = 10_000

_MOST_BYTES = 2**25


class SavedPredictor:
    """Saved model that predicts without Spark, with the results of ``transform()``.

    `load_predictor` returns a predictor. Several threads may call the predictor at the same time.

    Attributes
    ----------
    feature_columns : tuple of str
        Columns that the predictor takes, in the order of the model's inputs; columns of a matrix
        one after another. With ``apply_transformation``, these are the columns before the
        transformation.
    output_columns : tuple of str
        Columns that the predictor returns: the columns that ``transform()`` adds, in order.
    optional_columns : tuple of str
        Columns that the transformation may use if the rows have them.
    vector_columns : frozenset of str
        Outputs that are vectors in Spark if a row has one dimension.
    default_columns : frozenset of str
        Columns that ``transform()`` adds only to DataFrames without them.
    """

    def __init__(
        self,
        saved: Saved,
        predictor: Predictor,
        output_shapes: Sequence[tuple[int, ...]] | None,
        text: Sequence[str] = (),
        batch_size: int | None = None,
    ) -> None:
        """Create a predictor from a saved model.

        Parameters
        ----------
        saved : Saved
            Params of the model.
        predictor : callable
            Forward pass of the model.
        output_shapes : sequence of tuple of int, or None
            Shape of a row of each output; None to use the shapes of the first predictions.
        text : sequence of str
            Features that may be text.
        batch_size : int, optional
            Rows per forward pass.
        """
        get = saved.get
        inputs = InputColumns.of(get("feature_columns"))
        self.feature_columns = inputs.columns
        outputs = tuple(output_columns(get))
        self.output_columns = (*outputs, *class_columns(get).values())
        self._get = get
        self._outputs_are = resolve_kind(get("outputs_are"), saved.default("outputs_are"))
        self._num_outputs = len(outputs)
        self._ddls = get("output_types")
        self._predictor = predictor
        self._batch_rows = batch_size or get("inference_batch_size")
        self._on_nulls = get("handleInvalid") or "keep"
        transformation = None
        if get("apply_transformation"):
            transformation = make_transformation(get, self.feature_columns, tuple(text))
        metadata = get("_metadata") or {}
        self._inference = replace(
            BatchPredictor.of(inputs, transformation, metadata, labels=labels_of(get)),
            collate=make_collate(get, inputs),
            keeps_nulls=self._on_nulls != "error",
            leaves_out_nulls=self._on_nulls == "skip",
        )
        self._dtypes = {name: entry.get("dtype", "object") for name, entry in metadata.items()}
        self.optional_columns = self._inference.columns[len(self.feature_columns) :]
        ddls = dict(zip(outputs, self._ddls or (), strict=False))
        self.vector_columns = frozenset(name for name in self.output_columns if not ddls.get(name))
        self.default_columns = frozenset(
            [get("predictionCol")]
            if get("predictionCol") and not saved.is_set("predictionCol")
            else []
        )
        # A transformation may take text in all columns.
        self._text = frozenset(text) if transformation is None else None
        self._shapes = output_shapes
        self._is_ready = False
        self._lock = threading.Lock()

    def __call__(self, rows: Any) -> Any:
        """Return the predictions for some rows; see `predict`."""
        return self.predict(rows)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(self.feature_columns)} -> "
            f"{', '.join(self.output_columns)})"
        )

    def predict(self, rows: Any) -> Any:
        """Return the predictions for some rows.

        Parameters
        ----------
        rows : mapping, sequence of mapping, pandas.DataFrame, pyarrow.Table or RecordBatch
            The rows, in one of two forms:

            - Columns by name: a mapping of arrays, a data frame or a table. Columns that are not
              features are ignored.
            - Single rows: a list of dicts (or of Spark's ``Row``) with names and values. A dict or
              ``Row`` alone is one row if a feature in it is a number, text, bytes or a Spark
              vector; otherwise a dict holds columns.

            Columns hold the types that `transform` takes: numbers, arrays of numbers with one shape
            in all rows, and text if the model takes text. Arrow columns may also hold Spark's
            vectors in the form of Parquet files.

        Returns
        -------
        dict, list of dict, pandas.DataFrame or pyarrow.Table
            The columns that ``transform()`` adds, and no others. For single rows, a dict of values
            for each row. None if a single row was skipped. For a data frame, a
            data frame with the same index. For a table, a table. Otherwise arrays by name, rows
            first.

            Values are doubles, or have the types of ``output_types``; arrays hold the nearest
            doubles instead of decimals. NaN becomes null if its type has no NaN.

            ``handleInvalid`` decides about rows with nulls: they get null predictions, are left
            out, or raise an error. In arrays, null predictions are NaN. In the input, nulls are
            None and the nulls of pandas and Arrow; NaN in a column of floating-point numbers is a
            number.

        Raises
        ------
        ColumnError
            If a column is missing, or if its type is not numeric.
        DataError
            If arrays of a column differ in length, or if there is a null and ``handleInvalid`` is
            ``"error"``.
        ParamError
            If the rows have another form.
        PredictionError
            If the model fails, or if a type of ``output_types`` cannot hold a prediction.
        """
        return self._predict(self._read(rows))

    def predict_columns(self, columns: Mapping[str, pa.Array]) -> tuple[pa.Table, Array | None]:
        """Return the predictions for some rows, and a mask of the rows in them (None: all)."""
        given = replace(self._read(pa.table(dict(columns))), to_result=lambda *result: result[:2])
        predicted: tuple[pa.Table, Array | None] = self._predict(given)
        return predicted

    def _read(self, rows: Any) -> InputTable:
        if self._inference.collate is not None:
            return read_rows(rows, self.feature_columns, self._dtypes, self._inference)
        with naming_transformation(self._get):
            return read_table(
                rows,
                self.feature_columns,
                self.optional_columns,
                self._text,
                labels=self._inference.labels,
                keeps_nulls=self._on_nulls != "error",
            )

    def _predict(self, given: InputTable) -> Any:
        if self._is_ready:
            return self._compute(given)
        # The first call may trace the model or find the shapes, so only one thread runs it.
        with self._lock:
            return self._compute(given)

    def _compute(self, given: InputTable) -> Any:
        inference = replace(self._inference, columns=tuple(given.columns))
        if given.count and self._shapes is None:
            # Two rows, because a model may drop the dimension of rows if it gets a single row.
            first = {name: array[:2] for name, array in given.columns.items()}
            self._shapes = [out.shape[1:] for out in inference.predict(self._predictor, first)]
        shapes = self._shapes if self._shapes is not None else [()] * self._num_outputs
        if len(shapes) != self._num_outputs:
            raise ParamError(
                f"outputCols: the model has {len(shapes)} outputs, found {self._num_outputs} "
                f"names: {list(self.output_columns[: self._num_outputs])}. Set them before saving."
            )
        # Without rows the shapes may be unknown, and then any kind of scores gives empty columns.
        outputs_are = self._outputs_are or (None if self._shapes is not None else "logits")
        names = self.output_columns[: self._num_outputs]
        kinds = [kind or DOUBLE for kind in output_types(self._ddls, names, shapes)]
        inference = replace(
            inference,
            shapes=tuple(map(tuple, shapes)),
            scores=class_scores(class_columns(self._get), outputs_are, shapes),
            batch_rows=self._batch_rows or _default_rows(given),
        )
        fields = list(inference.fields.values())
        outputs = inference(self._predictor, given.columns)
        self._is_ready = self._is_ready or given.count > 0
        kinds += [DOUBLE] * (len(fields) - len(kinds))
        made = zip(self.output_columns, outputs, fields, kinds, strict=True)
        return given.result(
            {name: (output, shape, kind) for name, output, shape, kind in made},
            keeps=self._on_nulls == "keep",
        )


class PipelinePredictor(SavedPredictor):
    """Saved pipeline that predicts without Spark, with the results of ``transform()``.

    ``load_predictor`` returns one for the path of a ``PipelineModel``. It is used like the
    predictor of a model. Its results are the columns that the stages add or replace; vectors are
    arrays. Rows that a stage leaves out (``handleInvalid="skip"``) are missing.

    Attributes
    ----------
    feature_columns : tuple of str
        Columns that the rows must have. A `StringIndexer` ignores a missing column that no later
        stage needs, such as the label.
    output_columns : tuple of str
        Columns that the stages add or replace, in order.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """Create a predictor from the stages of a pipeline."""
        self.feature_columns = pipeline.feature_columns
        self.output_columns = pipeline.output_columns
        self.optional_columns = pipeline.optional_columns
        self.vector_columns = frozenset(pipeline.output_columns)
        self.default_columns = frozenset()
        self._pipeline = pipeline

    def predict(self, rows: Any) -> Any:
        """Return the columns that the stages add or replace; see `SavedPredictor.predict`."""
        columns, to_result = read_columns(rows, self.feature_columns, self.optional_columns)
        shapes = {name: (size,) for name, size in self._pipeline.sizes.items()}
        return to_result(*self.predict_columns(columns), shapes)

    def predict_columns(
        self, columns: Mapping[str, Array | pa.Array]
    ) -> tuple[pa.Table, Array | None]:
        """Return the columns for some rows, and a mask of the rows in them (None: all)."""
        made, selected = self._pipeline(columns)
        return pa.table({name: as_lists(column, name) for name, column in made.items()}), selected


def _default_rows(given: InputTable) -> int:
    row_bytes = sum(array.nbytes for array in given.columns.values()) // max(given.count, 1)
    return max(min(_MOST_ROWS, _MOST_BYTES // max(row_bytes, 1)), 1)


def resources_of(device: Any, num_threads: Any, batch_size: Any) -> Resources:
    """Return the resources for a predictor from the user's arguments.

    Raises
    ------
    ParamError
        If an argument is invalid.
    """
    for name, value in (("num_threads", num_threads), ("batch_size", batch_size)):
        is_count = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if value is not None and not (is_count and value > 0):
            raise ParamError(f"{name}: expected a whole number, 1 or more, found {value!r}.")
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise ParamError(f"device: expected 'cpu', 'cuda' or 'cuda:<number>', found {device!r}.")
    gpu = None if match[0].lower() == "cpu" else int(match[1] or 0)
    return Resources(num_threads, gpu, device)


def load_predictor(
    path: str,
    *,
    batch_size: int | None = None,
    device: str = "cpu",
    num_threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SavedPredictor:
    """Load a saved model of any framework, or a pipeline, for predictions without Spark.

    >>> predictor = load_predictor("s3://bucket/model")
    >>> predictor.predict({"features": array})["label__output"]

    The predictor works like the model's ``transform()``, with the same columns, transformation,
    types, class columns and precision. PySpark need not be installed. Loading runs code from the
    files, so load only files that you trust.

    The path may hold a ``PipelineModel`` of such models and of stages that are plain arithmetic:
    `StringIndexer`, `IndexToString`, `OneHotEncoder`, `VectorAssembler`, `StandardScaler`,
    `MinMaxScaler`, `Imputer` and `Bucketizer`.

    A Lightning module predicts with its ``forward`` or, with ``use_predict_step``, its
    ``predict_step``. A Keras model has no optimizer, and loading sets Keras's float type as in
    training.

    Parameters
    ----------
    path : str
        The path that was passed to ``save()``: a local path, or a URL of a registered store, see
        `hvd_estimators.store.Store.create`.
    batch_size : int, optional
        Rows per forward pass. Default: the model's ``inference_batch_size``, or else 10,000 rows,
        or 32 MiB if these are fewer rows.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``.
    num_threads : int, optional
        Threads for computation, in the whole process. It has no effect after TensorFlow was
        initialized. Default: the framework's own number.
    storage_options : mapping, optional
        Passed to fsspec's filesystem: keys, tokens, endpoints.

    Returns
    -------
    SavedPredictor
        Its ``predict`` takes dicts of arrays, lists of dicts, pandas and Arrow.

    Raises
    ------
    ParamError
        If a parameter is invalid, or the path holds another kind of model or stage.
    StoreError
        If the path holds no model, or the model cannot be read.
    GpuError
        If the framework does not see the GPU.
    DependencyError
        If the model's framework is not installed.
    """
    resources = resources_of(device, num_threads, batch_size)
    saved = read_saved(path, storage_options)
    if saved.is_pipeline:
        stages = read_pipeline(saved, lambda stage: _load_model(stage, resources, batch_size))
        return PipelinePredictor(stages)
    return _load_model(saved, resources, batch_size)


def _load_model(saved: Saved, resources: Resources, batch_size: int | None) -> SavedPredictor:
    package = saved.package
    if package is None:
        raise ParamError(
            f"path: {saved.given!r} holds a {saved.class_name}. load_predictor() reads KerasModel, "
            "LightningModel and TorchModel, and pipelines with them. It does not run the methods "
            "of subclasses. Load their models with Spark."
        )
    get, _ = lazy_names(package, {"load_saved": f"{package}.predictor"})
    load: Load = get("load_saved")
    predictor, text = load(saved, resources)
    if resources.gpu is not None and not getattr(predictor, "overlaps", False):
        raise GpuError(
            f"device: found {resources.named!r}, and the framework sees no GPU. Set 'cpu'."
        )
    # fit() stores the output shapes of forward(), which predict_step may change.
    shapes = None if saved.get("use_predict_step") else saved.get("output_shapes")
    shapes = None if shapes is None else [tuple(shape) for shape in shapes]
    return SavedPredictor(saved, predictor, shapes, text, batch_size)
