"""Predictions of a saved model without Spark. Imports no PySpark and no framework."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.exceptions import (
    ColumnError,
    DataError,
    GpuError,
    ParamError,
    PredictionError,
    ShapeError,
)
from hvd_estimators.inference.batch import (
    BatchPredictor,
    Predictor,
    Resources,
    is_scalar,
    to_arrays,
)
from hvd_estimators.inference.classification import class_columns, class_scores
from hvd_estimators.inference.errors import naming_transformation
from hvd_estimators.inference.output_columns import (
    DOUBLE,
    OutputType,
    output_columns,
    output_types,
    to_column,
)
from hvd_estimators.inference.pipeline import Pipeline, as_lists, as_numpy, read_pipeline
from hvd_estimators.loading.transform import make_transformation
from hvd_estimators.saving.saved import Saved, read_saved

Predicted = Mapping[str, tuple[Array, tuple[int, ...], OutputType]]
"""Column to its values, the shape of a row, and its type."""

Load = Callable[[Saved, Resources], tuple[Predictor, Sequence[str]]]
"""Function that loads a forward pass, and names the features that may be text."""


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
        Converts a table, or a dict of arrays, to the form that the user gets.
    as_arrow : bool
        Whether ``to_result`` takes a table.
    """

    columns: dict[str, Array]
    count: int
    valid: Array | None
    to_result: Callable[[Any, Array | None], Any]
    as_arrow: bool

    @property
    def are_all_scalars(self) -> bool:
        """True if every column has one value per row."""
        return all(column.ndim == 1 for column in self.columns.values())

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
        if not self.as_arrow:
            arrays = {n: _as_array(n, *column, valid) for n, column in predicted.items()}
            return self.to_result(arrays, selected)
        columns = {
            name: to_column(array, shape, valid, kind, name)
            for name, (array, shape, kind) in predicted.items()
        }
        return self.to_result(pa.table(columns), selected)


def read_table(
    given: Any,
    inputs: InputColumns,
    optional: Sequence[str],
    text: Collection[str] | None,
    dimensions: Mapping[str, int] | None = None,
    *,
    keeps_nulls: bool = True,
) -> InputTable:
    """Return rows as arrays.

    Parameters
    ----------
    given : array, sequence, mapping, pandas.DataFrame, pyarrow.Table or RecordBatch
        See `SavedPredictor.predict`.
    inputs : InputColumns
        The model's inputs, whose columns are required.
    optional : sequence of str
        Columns that are read if they exist.
    text : collection of str, or None
        Columns that may be text; None for all columns.
    dimensions : mapping of str to int, optional
        Column to the number of dimensions of a row, if known.
    keeps_nulls : bool
        Whether rows may hold nulls.

    Raises
    ------
    ColumnError
        If a column is missing, or if its type is not numeric.
    ParamError
        If the numbers of arrays and features differ.
    DataError
        If columns, or the arrays of a column, differ in length. Also for nulls without
        ``keeps_nulls``.
    """
    columns, to_result, as_arrow = read_columns(given, inputs, optional, dimensions or {})
    arrays, valid = to_arrays(list(columns), list(columns.values()), keeps_nulls=keeps_nulls)
    for name, array in arrays.items():
        _check_type(array, name, text is None or name in text)
    return InputTable(arrays, len(arrays[inputs.columns[0]]), valid, to_result, as_arrow)


def read_columns(
    given: Any, inputs: InputColumns, optional: Sequence[str], dimensions: Mapping[str, int]
) -> tuple[dict[str, Array | pa.Array], Callable[[Any, Array | None], Any], bool]:
    """Return the columns of rows, and the conversion of results; see `read_table`.

    Returns
    -------
    columns : dict
        Arrays of numbers without nulls, and Arrow arrays.
    to_result : callable
        See `InputTable`.
    as_arrow : bool
        See `InputTable`.
    """
    features = inputs.columns
    table, to_result, as_arrow = _columns(given, inputs, dimensions)
    missing = [name for name in features if name not in table]
    if missing:
        raise ColumnError(
            f"There is no column {', '.join(map(repr, missing))}; the model takes "
            f"{', '.join(features)}, and there are {', '.join(map(str, table)) or 'none'}."
        )
    names = [*features, *(name for name in optional if name in table)]
    columns = {name: _column(table[name], name) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"Columns differ in length: {lengths}.")
    return columns, to_result, as_arrow


def _columns(
    given: Any, inputs: InputColumns, dimensions: Mapping[str, int]
) -> tuple[Mapping[str, Any], Callable[[Any, Array | None], Any], bool]:
    if isinstance(given, (pa.Table, pa.RecordBatch)):
        names = given.schema.names
        return {n: given.column(names.index(n)) for n in names}, lambda made, selected: made, True
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(given, pandas.DataFrame):

        def to_frame(made: pa.Table, selected: Array | None) -> Any:
            index = given.index if selected is None else given.index[selected]
            columns = {name: made.column(name).to_pandas() for name in made.column_names}
            return pandas.DataFrame(columns).set_axis(index, axis=0)

        return {str(name): given[name] for name in given.columns}, to_frame, True
    records, to_records = _records(given, inputs.columns, dimensions)
    if records is not None:
        return _columns_of(records, inputs.columns), to_records, False
    if isinstance(given, Mapping):
        return given, lambda made, selected: made, False
    return _in_order(given, inputs), lambda made, selected: made, False


def _records(
    given: Any, features: Sequence[str], dimensions: Mapping[str, int]
) -> tuple[list[Mapping[str, Any]] | None, Callable[[Any, Array | None], Any]]:
    """Return rows that were given one by one, and the conversion of predictions to their form.

    The rows are None if columns were given.
    """
    if isinstance(given, (list, tuple)) and given and all(_as_record(row) for row in given):
        return [_as_record(row) or {} for row in given], _one_by_one
    record = _as_record(given)
    if record is None or not _is_one_row(record, features, dimensions):
        return None, _one_by_one
    return [record], lambda made, selected: next(iter(_one_by_one(made, selected)), None)


def _as_record(row: Any) -> Mapping[str, Any] | None:
    """Convert a dict, a Spark Row or a data frame's row to a mapping; None for other types."""
    if isinstance(row, Mapping):
        return row
    if isinstance(row, tuple) and hasattr(row, "asDict"):
        record: Mapping[str, Any] = row.asDict()
        return record
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(row, pandas.Series) and row.index.is_unique:
        record = dict(zip(row.index, row, strict=True))
        return record if record and all(isinstance(name, str) for name in record) else None
    return None


def _is_one_row(
    record: Mapping[str, Any], features: Sequence[str], dimensions: Mapping[str, int]
) -> bool:
    """Return whether a mapping holds the values of one row, instead of columns."""
    for name in features:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, (str, bytes)) or hasattr(value, "toArray"):
            return True
        if isinstance(value, (pa.Array, pa.ChunkedArray)):
            return False
        try:
            ndim = np.ndim(value)
        except ValueError:  # lists of several lengths
            return False
        if ndim == 0 or ndim == dimensions.get(name):
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
    return {name: [_dense(record.get(name)) for record in records] for name in names}


def _dense(value: Any) -> Any:
    """Convert a Spark vector to an array, and return other values unchanged."""
    return np.asarray(value.toArray(), np.float32) if hasattr(value, "toArray") else value


def _one_by_one(made: Mapping[str, Array], selected: Array | None) -> list[dict[str, Any]]:
    """Return the predictions of each row as a dict."""
    return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


def _in_order(given: Any, inputs: InputColumns) -> dict[str, Any]:
    """Return the columns of inputs that were given without names."""
    names = inputs.names
    if len(names) == 1:
        is_one = isinstance(given, (list, tuple)) and len(given) == 1
        wrapped = given[0] if is_one and isinstance(given[0], np.ndarray) else None
        if wrapped is not None and wrapped.ndim > (names[0] in inputs.matrices):
            given = wrapped
        return _columns_of_input(given, names[0], inputs)
    if isinstance(given, np.ndarray):
        if given.ndim == 2 and given.shape[1] == len(inputs.columns):
            return dict(zip(inputs.columns, given.T, strict=True))
        given_as = f"an array of shape {given.shape}"
    elif isinstance(given, (list, tuple)):
        if len(given) == len(names):
            parts = (_columns_of_input(*p, inputs) for p in zip(given, names, strict=True))
            return {name: column for part in parts for name, column in part.items()}
        given_as = f"{len(given)} arrays"
    else:
        given_as = type(given).__name__
    raise ParamError(
        f"rows: expected the {len(names)} features {', '.join(names)}: a dict or data frame "
        f"of columns, a list of dicts (one for each row), or one array for each, found {given_as}."
    )


def _columns_of_input(given: Any, name: str, inputs: InputColumns) -> dict[str, Any]:
    """Return the columns of one input that was given as an array."""
    if name not in inputs.matrices:
        return {name: given}
    columns = inputs.matrices[name]
    try:
        shape = np.shape(given)
    except ValueError:  # rows of several lengths
        shape = (len(given),)
    if len(shape) != 2 or shape[1] != len(columns):
        raise ParamError(
            f"rows: expected an array of shape (rows, {len(columns)}) for {name!r}, with the "
            f"columns {', '.join(columns)}, found the shape {shape}."
        )
    return dict(zip(columns, np.asarray(given).T, strict=True))


def _column(values: Any, name: str) -> Array | pa.Array:
    """Return a column as a NumPy array if it holds numbers, otherwise as an Arrow array."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([])
    if isinstance(values, pa.Array):
        return _decoded(values)
    numpy_type = getattr(values, "dtype", None)
    is_extension = numpy_type is not None and not isinstance(numpy_type, np.dtype)
    if not is_extension:
        try:
            array = values if isinstance(values, np.ndarray) else np.asarray(values)
        except ValueError as error:
            if all(value is not None for value in values):
                raise DataError(
                    f"Column {name!r} is ragged: its arrays differ in length. Pad or cut them to "
                    "one length."
                ) from error
            array = np.asarray(values, object)  # arrays and nulls
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
            f"Column {name!r} holds values of which the model can take none ({error})."
        ) from error
    return _decoded(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)


def _for_arrow(value: Any, is_text: bool) -> Any:
    """Convert an object to a type that Arrow accepts; missing values become None."""
    value = _dense(value)
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return value.tolist()
    # Pandas marks missing text with NaN; elsewhere NaN is a number.
    is_missing = type(value).__name__ == "NAType" or (is_text and isinstance(value, float))
    return None if is_missing else value


def _decoded(column: pa.Array) -> pa.Array:
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
        f"Column {name!r} holds {kind_name}; the model takes numbers, booleans and arrays of them. "
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


_DEVICE = re.compile(r"(?:cpu|(?:cuda|gpu)(?::([0-9]+))?)", re.IGNORECASE)


_MOST_ROWS = 10_000


_MOST_BYTES = 2**25


class SavedPredictor:
    """Saved model that predicts without Spark, with the results of ``transform()``.

    ``load_predictor`` of each framework's package, such as `hvd_estimators.torch`, returns a
    predictor. Several threads may call the predictor at the same time.

    Attributes
    ----------
    feature_columns : tuple of str
        Columns that the predictor takes, in the order of the model's inputs; those of a matrix
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
    dimensions : mapping of str to int
        Feature to the number of dimensions of a row, if known.
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
        self._inputs = InputColumns.of(get("feature_columns"))
        self.feature_columns = self._inputs.columns
        outputs = tuple(output_columns(get))
        self.output_columns = (*outputs, *class_columns(get).values())
        self._get = get
        self._num_outputs = len(outputs)
        self._ddls = get("output_types")
        self._predictor = predictor
        self._batch_rows = batch_size or get("inference_batch_size")
        self._on_nulls = get("handleInvalid") or "keep"
        transformation = None
        if get("apply_transformation"):
            transformation = make_transformation(get, self.feature_columns, tuple(text))
        metadata = get("_metadata") or {}
        self._inference = BatchPredictor.of(self._inputs, transformation, metadata)
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
        self.dimensions: Mapping[str, int] = {
            n: len(e["shape"]) for n, e in metadata.items() if "shape" in e
        }
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
        rows : array, sequence, mapping, pandas.DataFrame, pyarrow.Table or RecordBatch
            The rows, in one of three forms:

            - Columns by name: a mapping, a data frame or a table. Columns that are not features
              are ignored.
            - Single rows: a list of dicts (or of Spark's ``Row``) with names and values, or one
              dict or ``Row``. A dict is one row if a feature in it is a single value, or has as
              many dimensions as a row had in training.
            - Features without names, in order. Several features are a list with one array per
              feature, rows first. A single feature is one array. Features that are all numbers may
              be one array, rows by features. A list of columns in ``feature_cols`` is one feature,
              rows by columns.

            Columns hold the types that `transform` takes: numbers, arrays of numbers with one shape
            in all rows, and text if the model takes text. Arrow columns may also hold Spark's
            vectors in the form of Parquet files.

        Returns
        -------
        dict, list of dict, pandas.DataFrame or pyarrow.Table
            The columns that ``transform()`` adds, and no others. For single rows, a dict of values
            for each row; None for a row that was given alone and is left out. For a data frame, a
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
            If the numbers of arrays and features differ.
        PredictionError
            If the model fails, or if a type of ``output_types`` cannot hold a prediction.
        """
        given = self._read(rows)
        try:
            return self._predict(given)
        except (PredictionError, ShapeError) as error:
            if not (isinstance(rows, (Mapping, np.ndarray)) and given.are_all_scalars):
                raise
            raise type(error)(
                f"{error} It was called with {given.count} rows, one for each entry of what "
                f"predict() was given. For a single row, give a list with a dict: "
                f"[{{{self.feature_columns[0]!r}: ...}}]."
            ) from error

    def predict_columns(self, columns: Mapping[str, pa.Array]) -> tuple[pa.Table, Array | None]:
        """Return the predictions for some rows, and a mask of the rows in them (None: all)."""
        given = replace(self._read(pa.table(dict(columns))), to_result=lambda *result: result)
        predicted: tuple[pa.Table, Array | None] = self._predict(given)
        return predicted

    def _read(self, rows: Any) -> InputTable:
        with naming_transformation(self._get):
            return read_table(
                rows,
                self._inputs,
                self.optional_columns,
                self._text,
                self.dimensions,
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
        names = self.output_columns[: self._num_outputs]
        kinds = [kind or DOUBLE for kind in output_types(self._ddls, names, shapes)]
        inference = replace(
            inference,
            shapes=tuple(map(tuple, shapes)),
            scores=class_scores(self._get, list(shapes)),
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
        self.dimensions = pipeline.dimensions
        self._pipeline = pipeline

    def predict(self, rows: Any) -> Any:
        """Return the columns that the stages add or replace; see `SavedPredictor.predict`."""
        columns, to_result, as_arrow = read_columns(
            rows, InputColumns.of(self.feature_columns), self.optional_columns, self.dimensions
        )
        if as_arrow:
            return to_result(*self.predict_columns(columns))
        made, selected = self._pipeline(columns)
        sizes = self._pipeline.sizes
        arrays = {name: as_numpy(column, name, sizes.get(name)) for name, column in made.items()}
        return to_result(arrays, selected)

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


class _LoadPredictor(Protocol):
    """Signature of ``load_predictor``."""

    def __call__(
        self,
        path: str,
        *,
        batch_size: int | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SavedPredictor: ...


def predictor_loader(class_name: str, load: Load, note: str = "") -> _LoadPredictor:
    """Return the ``load_predictor`` of a framework's package.

    Parameters
    ----------
    class_name : str
        Class of the saved models.
    load : callable
        Loads the forward pass of a saved model with some resources. Returns it with the features
        that may be text.
    note : str
        What the framework adds to the docstring.
    """

    def load_predictor(
        path: str,
        *,
        batch_size: int | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SavedPredictor:
        """Load a saved `{class_name}`, or a pipeline, for predictions without Spark.

        >>> predictor = load_predictor("s3://bucket/model")
        >>> predictor.predict({"features": array})["label__output"]

        The predictor works like the model's ``transform()``, with the same columns,
        transformation, types, class columns and precision. {note}PySpark need not be installed.
        Loading runs code from the files, so load only files that you trust.

        The path may hold a ``PipelineModel`` of such models and of stages that are plain
        arithmetic: `StringIndexer`, `IndexToString`, `OneHotEncoder`, `VectorAssembler`,
        `StandardScaler`, `MinMaxScaler`, `Imputer` and `Bucketizer`.

        Parameters
        ----------
        path : str
            The path that was passed to ``save()``: a local path, or a URL of a registered store,
            see `hvd_estimators.store.Store.create`.
        batch_size : int, optional
            Rows per forward pass. Default: the model's ``inference_batch_size``, or else 10,000
            rows, or 32 MiB if these are fewer rows.
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
            Its ``predict`` takes NumPy arrays, dicts of arrays, pandas and Arrow.

        Raises
        ------
        ParamError
            If a parameter is invalid, or the path holds another kind of model or stage.
        StoreError
            If the path holds no model, or the model cannot be read.
        GpuError
            If the framework does not see the GPU.
        """
        resources = resources_of(device, num_threads, batch_size)
        saved = read_saved(path, class_name, storage_options)
        if saved.is_pipeline:

            def load_stage(stage: Saved) -> SavedPredictor:
                package: Any = importlib.import_module(str(stage.package))
                loaded: SavedPredictor = package.load_predictor(
                    stage.given,
                    batch_size=batch_size,
                    device=device,
                    num_threads=num_threads,
                    storage_options=storage_options,
                )
                return loaded

            return PipelinePredictor(read_pipeline(saved, load_stage))
        predictor, text = load(saved, resources)
        if resources.gpu is not None and not getattr(predictor, "overlaps", False):
            raise GpuError(f"device: found {device!r}, and the framework sees no GPU. Set 'cpu'.")
        # fit() stores the output shapes of forward(), which may differ from those of predict_step.
        shapes = None if saved.get("use_predict_step") else saved.get("output_shapes")
        return SavedPredictor(
            saved,
            predictor,
            None if shapes is None else [tuple(shape) for shape in shapes],
            text,
            batch_size,
        )

    document = str(load_predictor.__doc__).replace("{class_name}", class_name)
    load_predictor.__doc__ = document.replace("{note}", f"{note} " if note else "")
    load_predictor.__module__ = load.__module__
    load_predictor.__qualname__ = load_predictor.__name__
    return load_predictor
