"""Predictions of a saved model without Spark. Imports no PySpark and no framework."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_estimators.exceptions import GpuError, ParamError, PredictionError, ShapeError
from hvd_estimators.inference.classification import class_columns, class_scores
from hvd_estimators.inference.failures import naming_transformation
from hvd_estimators.inference.output_columns import output_columns
from hvd_estimators.inference.output_types import DOUBLE, output_types
from hvd_estimators.inference.resources import Resources
from hvd_estimators.inference.rows import Rows, read_rows
from hvd_estimators.inference.steps import Inference, Predictor, has_nulls, known_sizes
from hvd_estimators.loading.transformation import make_transformation
from hvd_estimators.saving.saved import Saved

__all__ = ["SavedPredictor", "on_device", "resources_of"]

_DEVICE = re.compile(r"(?:cpu|(?:cuda|gpu)(?::([0-9]+))?)", re.IGNORECASE)
_MOST_ROWS = 10_000
_MOST_BYTES = 2**25


class SavedPredictor:
    """A saved model that predicts without Spark, as the model's ``transform()`` does.

    Made by ``hvd_estimators.torch.load_predictor`` and its likes. Several threads may call it at
    the same time.

    Attributes
    ----------
    feature_columns : tuple of str
        The columns that it takes, in the order of the model's inputs; with ``apply_transformation``
        as they are before the transformation.
    output_columns : tuple of str
        The columns that it gives: those that ``transform()`` adds, in their order.
    """

    def __init__(
        self,
        saved: Saved,
        predictor: Predictor,
        output_shapes: Sequence[tuple[int, ...]] | None,
        text: Sequence[str] = (),
        batch_size: int | None = None,
    ) -> None:
        """Make one of what was read.

        Parameters
        ----------
        saved : Saved
            The model's params.
        predictor : callable
            Its forward pass.
        output_shapes : sequence of tuple of int, or None
            Shape of a row of each output; None: as the first rows show.
        text : sequence of str
            The features that may be text.
        batch_size : int, optional
            Rows of one forward pass.
        """
        get = saved.get
        self.feature_columns = tuple(get("feature_columns") or ())
        outputs = tuple(output_columns(get))
        self.output_columns = (*outputs, *class_columns(get).values())
        self._get = get
        self._num_outputs = len(outputs)
        self._ddls = get("output_types")
        self._predictor = predictor
        self._batch_rows = batch_size or get("inference_batch_size")
        self._on_nulls = get("handleInvalid") or "keep"
        self._inference = self._made_inference(tuple(text))
        self._takes_text = self._inference.transformation is not None
        self._text = frozenset(text)
        known = get("_metadata") or {}
        self._dimensions = {n: len(e["shape"]) for n, e in known.items() if "shape" in e}
        self._shapes = output_shapes
        self._is_ready = False
        self._lock = threading.Lock()

    def __call__(self, rows: Any) -> Any:
        """Return what `predict` does."""
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
            Column names to columns; what is no feature is left alone. Or single rows: a list of
            dicts (or of Spark's ``Row``), each with names and values, or one of these. A dict is
            taken for one row if a feature in it is a single value, or has as many dimensions as a
            row had in training. Or the features without
            names, in their order: one array per feature, rows first, where there are several; one
            array where there is one, or where each feature is a number, rows by features. Columns
            hold what `transform` takes: numbers, arrays of them of one shape in all rows, text
            where the model takes it, and in Arrow Spark's vectors, as Parquet files have them.

        Returns
        -------
        dict, list of dict, pandas.DataFrame or pyarrow.Table
            For single rows a dict of values for each; None for a row that is left out and was
            given alone. Else the columns that ``transform()`` adds, and these alone: arrays (rows
            first) by name, or a data frame (with the index of the given one) or a table for such.
            Doubles, or what ``output_types`` says; in arrays the nearest doubles instead of
            decimals. If a type has no NaN, null takes its place. Rows with nulls have nulls, which
            in arrays are NaN, or are left out or an error, as ``handleInvalid`` says; nulls are
            None, pandas' and Arrow's; NaN in a column of floating-point numbers is a number.

        Raises
        ------
        ColumnError
            If a column is missing or of a type that is none of numbers.
        DataError
            If arrays of a column differ in length, or ``handleInvalid`` is ``"error"`` and there is
            a null.
        ParamError
            If there are not as many arrays as features.
        PredictionError
            If the model fails, or gives a number that its type of ``output_types`` cannot hold.
        """
        inference = self._inference
        with naming_transformation(self._get):
            given = read_rows(
                rows,
                self.feature_columns,
                inference.columns[len(self.feature_columns) :],
                None if self._takes_text else self._text,
                self._dimensions,
            )
        if given.null_column is not None and self._on_nulls == "error":
            raise has_nulls(given.null_column)
        try:
            if self._is_ready:
                return self._predict(given)
            # What traces a model, or finds shapes, does so once.
            with self._lock:
                return self._predict(given)
        except (PredictionError, ShapeError) as error:
            if not (isinstance(rows, (Mapping, np.ndarray)) and given.are_all_scalars):
                raise
            raise type(error)(
                f"{error} It was called with {given.count} rows, one for each entry of what "
                f"predict() was given. For a single row, give a list with a dict: "
                f"[{{{self.feature_columns[0]!r}: ...}}]."
            ) from error

    def _predict(self, given: Rows) -> Any:
        inference = replace(self._inference, columns=tuple(given.columns))
        if given.count and self._shapes is None:
            self._shapes = self._found_shapes(inference, given)
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
        if given.count:
            outputs = inference(self._predictor, given.columns)
            self._is_ready = True
        else:
            outputs = [np.zeros((0, *known_sizes(shape))) for shape in fields]
        kinds += [DOUBLE] * (len(fields) - len(kinds))
        made = zip(self.output_columns, outputs, fields, kinds, strict=True)
        return given.result(
            {name: (output, shape, kind) for name, output, shape, kind in made},
            keeps=self._on_nulls == "keep",
        )

    def _found_shapes(self, inference: Inference, given: Rows) -> list[tuple[int, ...]]:
        # Of a single row a model may drop the dimension that counts rows.
        first = {name: array[:2] for name, array in given.columns.items()}
        return [output.shape[1:] for output in inference.predict(self._predictor, first)]

    def _made_inference(self, text: tuple[str, ...]) -> Inference:
        features = self.feature_columns
        transformation = None
        if self._get("apply_transformation"):
            transformation = make_transformation(self._get, features, text)
        if transformation is None:
            return Inference(features, features)
        known = self._get("_metadata") or {}
        others = (name for name in known if name not in features)
        dtypes = {n: entry["dtype"] for n, entry in known.items() if entry["dtype"] != "object"}
        return Inference(
            (*features, *others), features, transformation=transformation, dtypes=dtypes
        )


def _default_rows(given: Rows) -> int:
    row_bytes = sum(array.nbytes for array in given.columns.values()) // max(given.count, 1)
    return max(min(_MOST_ROWS, _MOST_BYTES // max(row_bytes, 1)), 1)


def resources_of(device: Any, num_threads: Any, batch_size: Any) -> Resources:
    """Return what a predictor may use, as a user says it.

    Raises
    ------
    ParamError
        If it is not usable.
    """
    for name, value in (("num_threads", num_threads), ("batch_size", batch_size)):
        is_count = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if value is not None and not (is_count and value > 0):
            raise ParamError(f"{name}: expected a whole number, 1 or more, found {value!r}.")
    found = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise ParamError(f"device: expected 'cpu', 'cuda' or 'cuda:<number>', found {device!r}.")
    gpu = None if found[0].lower() == "cpu" else int(found[1] or 0)
    return Resources(num_threads, gpu, device)


def on_device(
    load: Callable[[Resources], Predictor], device: str, resources: Resources
) -> Predictor:
    """Return a predictor that is where it was asked to be.

    Raises
    ------
    GpuError
        If the framework does not see such a GPU.
    """
    predictor = load(resources)
    if resources.gpu is not None and not getattr(predictor, "overlaps", False):
        raise GpuError(f"device: found {device!r}, and the framework sees no GPU. Set 'cpu'.")
    return predictor
