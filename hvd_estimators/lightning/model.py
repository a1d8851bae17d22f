"""`LightningModel`: predicts with a trained LightningModule, or with a plain module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.inference.udf import Document
from hvd_estimators.lightning.flavor import is_lightning
from hvd_estimators.model import Predictor
from hvd_estimators.params import boolean, declare
from hvd_estimators.parquet.columns import Array
from hvd_estimators.prepare.column_names import quoted
from hvd_estimators.temporary import LocalFile
from hvd_estimators.torch import model as torch_model
from hvd_estimators.torch.calls import call_with_leading
from hvd_estimators.torch.outputs import as_list
from hvd_estimators.torch.serialization import load_module, module_document, plain_module
from hvd_estimators.torch.tensors import with_form

__all__ = ["LightningModel", "TorchModel", "forward_inputs"]

RowFunction = Callable[[torch.nn.Module, Any], Any]


class LightningModel(torch_model.TorchModel):
    """A fitted LightningModule as a Spark ML Transformer.

    `transform` calls the module with one tensor per feature column, rows first, or its
    ``predict_step`` with a dict of them, see ``use_predict_step``. Floating columns come in the
    dtype of the module's parameters, others as they are stored, or as ``column_dtypes`` says. A
    subclass that overrides `get_prediction_fn` predicts row by row instead. It runs on the driver
    and is lazy; the forward passes run in Arrow batches on the executors, on the CPU.

    Columns are taken as the training's ``transformation_fn`` leaves them; with
    ``apply_transformation`` they are transformed first, as in training.
    """

    use_predict_step = declare(
        "Whether transform() calls the module's predict_step, with a dict of feature column to "
        "tensor as batch, instead of forward.",
        default=False,
        convert=boolean,
    )

    def get_prediction_fn(self) -> RowFunction:
        """Return a function of a module and a row (a ``pyspark.sql.Row``); for subclasses.

        It returns the output for the row, or a list with one output per label; an output may have
        a first dimension of one. `transform` uses it where a subclass overrides it.
        """
        features = list(self.getOrDefault("feature_columns") or [])
        shapes = self.getOrDefault("input_shapes")
        dtypes = self.getOrDefault("column_dtypes")
        form = self.getOrDefault("input_form")
        labels = list(self.getOrDefault("label_columns") or [])

        def predict(module: torch.nn.Module, row: Any) -> Any:
            arrays = [np.asarray(row[name])[None] for name in features]
            inputs = forward_inputs(module, arrays, features, shapes, dtypes)
            with torch.no_grad():
                raw = with_form(module, inputs, features, form)
            return raw if isinstance(raw, torch.Tensor) else as_list(raw, labels)

        return predict

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if self.getOrDefault("model") is None:
            raise ParamError("model is not set. Set model.")
        # What fit() found out are the shapes of what forward() returns.
        if self.getOrDefault("output_shapes") is None or self.getOrDefault("use_predict_step"):
            shaped = self.copy({"output_shapes": self._probe(dataset)})
            return super(LightningModel, shaped)._transform(dataset)
        return super()._transform(dataset)

    def _predicts_rows(self) -> bool:
        return type(self).get_prediction_fn is not LightningModel.get_prediction_fn

    def _feature_column(self, dataset: DataFrame, name: str) -> Column:
        data_type = dataset.schema[name].dataType
        if self._predicts_rows() and isinstance(data_type, (T.StringType, T.BinaryType)):
            return F.col(quoted(name))
        return super()._feature_column(dataset, name)

    def _make_predictor(self) -> tuple[bytes | LocalFile, Callable[[Document], Predictor]]:
        features = list(self.getOrDefault("feature_columns") or [])
        document = module_document(plain_module(self.getOrDefault("model")))
        if self._predicts_rows():
            function = self.get_prediction_fn()
            return document, lambda given: _RowPredictor(given, function, features)
        shapes, dtypes = self.getOrDefault("input_shapes"), self.getOrDefault("column_dtypes")
        by_step = self.getOrDefault("use_predict_step")
        if by_step and not is_lightning(self.getOrDefault("model"), "LightningModule"):
            raise ParamError(
                "use_predict_step: the model is no LightningModule and has no predict_step. Leave "
                "it out."
            )
        form = self.getOrDefault("input_form")
        labels = list(self.getOrDefault("label_columns") or [])

        def load(given: Document) -> Predictor:
            return _BatchPredictor(given, by_step, features, labels, form, shapes, dtypes)

        return document, load

    def _probe(self, dataset: DataFrame) -> list[list[int]]:
        """Return the outputs' shapes as the first row shows them; it is computed for that."""
        features = list(self.getOrDefault("feature_columns") or [])
        applied = self._applied(dataset, features)
        columns = [self._feature_column(dataset, name).alias(name) for name in applied.columns]
        first = dataset.select(*columns).limit(1).collect()
        if not first:
            raise DataError(
                "output_shapes is not known, and there is no row to find it out with. Set "
                "output_shapes: the shape of one row of each output."
            )
        document, load = self._make_predictor()
        values = pd.Series(list(first[0]), dtype=object)
        arrays = {n: _single(value) for n, value in zip(applied.columns, values, strict=True)}
        return [list(output.shape[1:]) for output in applied.predict(load(document), arrays)]


TorchModel = LightningModel


def forward_inputs(
    module: torch.nn.Module,
    arrays: list[Array],
    names: list[str],
    shapes: Any = None,
    dtypes: Any = None,
) -> list[torch.Tensor]:
    """Return what a module's ``forward`` is called with.

    Parameters
    ----------
    module : torch.nn.Module
        Its floating parameters tell the dtype of floating inputs.
    arrays : list of array
        The feature columns, rows first.
    names : list of str
        Their names.
    shapes : list of list of int, optional
        Shape of each input, -1 first.
    dtypes : mapping, optional
        Column name to the name of a torch dtype.
    """
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    inputs = []
    for name, array in zip(names, arrays, strict=True):
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if name in (dtypes or {}):
            tensor = tensor.to(getattr(torch, dtypes[name]))
        elif tensor.is_floating_point():
            tensor = tensor.to(own)
        inputs.append(tensor)
    if shapes is None:
        return inputs
    return [x.reshape(len(x), *shape[1:]) for x, shape in zip(inputs, shapes, strict=True)]


class _BatchPredictor:
    """Runs a module's forward pass; lives in an executor's Python worker."""

    def __init__(
        self,
        document: Document,
        by_step: bool,
        features: list[str],
        labels: list[str],
        form: str,
        shapes: Any,
        dtypes: Any,
    ) -> None:
        self._module: Any = load_module(document, mapped=True).eval()
        self._by_step = by_step
        self._features, self._labels, self._form = features, labels, form
        self._tensors = shapes, dtypes

    def __call__(self, arrays: list[Array]) -> list[Array]:
        inputs = forward_inputs(self._module, arrays, self._features, *self._tensors)
        with torch.inference_mode():
            if self._by_step:
                batch = dict(zip(self._features, inputs, strict=True))
                raw = call_with_leading(self._module.predict_step, batch, 0)
            else:
                raw = with_form(self._module, inputs, self._features, self._form)
            outputs = as_list(raw, self._labels)
        return [output.double().numpy() for output in outputs]


class _RowPredictor:
    """Calls a prediction function row by row; lives in an executor's Python worker."""

    def __init__(self, document: Document, function: RowFunction, features: list[str]) -> None:
        self._module = load_module(document, mapped=True).eval()
        self._function = function
        self._features = features

    def __call__(self, arrays: list[Array]) -> list[Array]:
        rows = [
            Row(**dict(zip(self._features, values, strict=True)))
            for values in zip(*arrays, strict=True)
        ]
        with torch.no_grad():
            predicted = [_outputs(self._function(self._module, row)) for row in rows]
        return [np.stack(column) for column in zip(*predicted, strict=True)]


def _outputs(predicted: Any) -> list[Array]:
    """Return the outputs for one row without their dimension of rows."""
    arrays = [np.asarray(torch.as_tensor(p).double()) for p in as_list(predicted)]
    return [array[0] if array.ndim and len(array) == 1 else array for array in arrays]


def _single(value: Any) -> Array:
    """Return a value as a column of one row."""
    if isinstance(value, (str, bytes, bytearray)):
        column = np.empty(1, dtype=object)
        column[0] = value
        return column
    return np.asarray(value)[None]
