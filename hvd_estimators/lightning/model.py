"""`LightningModel`: predicts with a trained LightningModule."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.data.arrays import Array
from hvd_estimators.data.rows import ROWS, GivenRows
from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.inference.batch import DEFAULT_RESOURCES, BatchPredictor, Predictor, Resources
from hvd_estimators.inference.broadcast import Payload
from hvd_estimators.inference.frame import known_shapes, rows_of_zeros, without_nulls
from hvd_estimators.lightning.package import is_lightning
from hvd_estimators.lightning.predictor import (
    LightningPredictor,
    RowFunction,
    RowPredictor,
    floating_dtype,
    forward_inputs,
)
from hvd_estimators.loading.transform import EditedField
from hvd_estimators.params import boolean, param
from hvd_estimators.prepare.schema import fields_by_name, quoted
from hvd_estimators.torch import model as torch_model
from hvd_estimators.torch.dry_run import torch_traceless
from hvd_estimators.torch.onnx import Call
from hvd_estimators.torch.serialization import module_payload
from hvd_estimators.torch.stored_weights import weights_place
from hvd_estimators.torch.tensors import call_with_leading

logger = logging.getLogger(__name__)


if TYPE_CHECKING:
    from hvd_estimators.lightning.signatures import LightningModelSignatures
else:
    LightningModelSignatures = torch_model.TorchModel


class LightningModel(LightningModelSignatures):
    """A fitted LightningModule as a Spark ML Transformer.

    `transform` calls the module with one tensor per feature column, rows first. With
    ``use_predict_step`` it calls the module's ``predict_step`` with a dict of these tensors.
    Floating-point columns get the dtype of the module's parameters, and other columns keep their
    stored dtype, unless ``column_dtypes`` names another. A subclass that overrides
    `get_prediction_fn` predicts row by row instead.

    `transform` runs on the driver and is lazy. The forward passes run in Arrow batches on the
    executors, on the task's cores or on the GPU that Spark assigns to the task.

    By default the columns must be in the form that the training's ``transformation_fn`` returns.
    With ``apply_transformation`` the model first transforms the columns, as in training.
    """

    use_predict_step = param(
        "Whether transform() calls the module's predict_step instead of forward. The batch is a "
        "dict of feature column to tensor.",
        default=False,
        convert=boolean,
    )

    def get_prediction_fn(self) -> RowFunction:
        """Return a function of a module and a ``pyspark.sql.Row``, for subclasses to override.

        The function returns the output for the row, or a list with one output per label. An output
        may have a first dimension of one. `transform` uses the function only if a subclass
        overrides this method.
        """
        spec = self._transform_spec()

        def predict(module: torch.nn.Module, row: Any) -> Any:
            arrays = [np.asarray(row[name])[None] for name in spec.feature_cols]
            inputs = forward_inputs(module, arrays, spec)
            with torch.no_grad():
                raw = spec.call(module, inputs)
            return raw if isinstance(raw, torch.Tensor) else spec.select(raw)

        return predict

    def _output_shapes_on(self, dataset: DataFrame | None) -> list[tuple[int, ...]]:
        if self.getOrDefault("model") is None:
            raise ParamError("model is not set. Set model.")
        shapes = self.getOrDefault("output_shapes")
        # fit() stores the output shapes of forward(), which predict_step may change.
        if shapes is not None and not self.getOrDefault("use_predict_step"):
            return self._output_shapes()
        applied = self._plain_batch_predictor(dataset)
        document, load = self._make_predictor()
        tried = None
        if applied.collate is None:
            tried = self._try_on_zeros(dataset, applied, document, load)
        if tried is not None:
            return tried
        if dataset is not None and not dataset.isStreaming:
            return self._try_on_first_row(dataset, applied, document, load)
        if shapes is not None:
            return self._output_shapes()
        raise ParamError(
            "output_shapes is not known for a model that was not fitted, or that predicts by its "
            "predict_step, and the shapes of its inputs are not known either. A stream or a UDF "
            "has no row that could show it. Set output_shapes (the shape of one row of each "
            "output), or input_shapes."
        )

    def _exported_call(self, names: Sequence[str]) -> Call:
        if not self.getOrDefault("use_predict_step"):
            return super()._exported_call(names)

        def call(module: Any, inputs: list[torch.Tensor]) -> Any:
            return call_with_leading(module.predict_step, dict(zip(names, inputs, strict=True)), 0)

        return call

    def _input_dtype(self, module: torch.nn.Module, name: str) -> torch.dtype:
        dtypes = self.getOrDefault("column_dtypes") or {}
        if name in dtypes:
            return super()._input_dtype(module, name)
        dtype = (self._get_metadata() or {}).get(name, {}).get("dtype", "float32")
        stored = torch.from_numpy(np.empty(0, dtype)).dtype
        return floating_dtype(module) if stored.is_floating_point else stored

    def _predicts_rows(self) -> bool:
        return type(self).get_prediction_fn is not LightningModel.get_prediction_fn

    def _takes_text(self) -> bool:
        return super()._takes_text() or self._predicts_rows()

    def _feature_column(self, field: T.StructField) -> Column:
        if self._predicts_rows() and isinstance(field.dataType, (T.StringType, T.BinaryType)):
            return F.col(quoted(field.name))
        return super()._feature_column(field)

    def _make_predictor(self) -> tuple[bytes | LocalFile, Callable[[Payload], Predictor]]:
        features = list(self._input_columns().names)
        module = self._plain_model()
        document, weights_in = module_payload(module), weights_place(module)
        precision = self.getOrDefault("inference_precision")
        if self._predicts_rows() and self._collate() is not None:
            raise ParamError(
                "get_prediction_fn: it predicts row by row, and the model has a collate_fn or "
                "padding. Override predict_step instead, and set use_predict_step=True."
            )
        if self._predicts_rows():
            function = self.get_prediction_fn()

            def load_by_rows(given: Payload, resources: Resources = DEFAULT_RESOURCES) -> Predictor:
                return RowPredictor(given, function, features, precision, resources, weights_in)

            return document, load_by_rows
        by_step = self.getOrDefault("use_predict_step")
        if by_step and not is_lightning(self.getOrDefault("model"), "LightningModule"):
            raise ParamError(
                "use_predict_step: the model is not a LightningModule and has no predict_step. "
                "Leave use_predict_step out."
            )
        spec = self._transform_spec()

        def load(given: Payload, resources: Resources = DEFAULT_RESOURCES) -> Predictor:
            return LightningPredictor(given, by_step, spec, precision, resources, weights_in)

        return document, load

    def _make_evaluator(self) -> tuple[bytes | LocalFile, Any, Any]:
        raise ParamError(
            "evaluate: the model is a LightningModule, whose validation_step logs its own values "
            "through a Trainer; evaluate() computes loss and metrics of plain modules. Call "
            "Trainer.validate(model.getModel(), ...), or transform() and an evaluator of "
            "pyspark.ml.evaluation."
        )

    def _try_on_zeros(
        self,
        dataset: DataFrame | None,
        applied: BatchPredictor,
        document: bytes | LocalFile,
        load: Callable[[Payload], Predictor],
    ) -> list[tuple[int, ...]] | None:
        """Return the output shapes for rows of zeros; None if the model rejects such rows."""
        metadata: dict[str, Any] = self._get_metadata() or {}
        edited: tuple[EditedField, ...] = ()
        transformation = self._make_transformation(applied.features.columns, self._text_features())
        if applied.transformation is None and transformation is not None:
            # The columns are in the form that the transformation returns, not as training read
            # them.
            metadata, edited = {}, transformation.edited
        shapes, dtypes = known_shapes(
            applied.columns, metadata, edited, dataset, allow_text=self._takes_text()
        )
        if transformation is None:
            for name, shape in zip(
                applied.features.names, self.getOrDefault("input_shapes") or (), strict=False
            ):
                if shapes.get(name) != () and -1 not in shape[1:]:
                    shapes[name] = (math.prod(shape[1:]),)
        zeros = rows_of_zeros(applied.columns, shapes, dtypes)
        if zeros is None:
            return None
        try:
            with torch_traceless():
                outputs = applied.predict(load(document), zeros)
        except Exception as error:
            logger.info("The model cannot be tried on rows of zeros (%s).", error)
            return None
        return [tuple(output.shape[1:]) for output in outputs]

    def _try_on_first_row(
        self,
        dataset: DataFrame,
        applied: BatchPredictor,
        document: bytes | LocalFile,
        load: Callable[[Payload], Predictor],
    ) -> list[tuple[int, ...]]:
        """Return the output shapes for the first row; this computes that row."""
        fields = fields_by_name(dataset)
        columns = [self._feature_column(fields[name]).alias(name) for name in applied.columns]
        usable = without_nulls(dataset, applied.columns)
        first = usable.select(*columns).limit(1).collect()
        if not first:
            raise DataError(
                "output_shapes is not known, and no row without nulls can show it. Set "
                "output_shapes: the shape of one row of each output."
            )
        arrays: dict[str, Any]
        if applied.collate is not None:
            arrays = {ROWS: GivenRows([first[0].asDict()], {})}
        else:
            values = pd.Series(list(first[0]), dtype=object)
            arrays = {n: _single(value) for n, value in zip(applied.columns, values, strict=True)}
        return [tuple(output.shape[1:]) for output in applied.predict(load(document), arrays)]


TorchModel = LightningModel


def _single(value: Any) -> Array:
    """Return a value as a column of one row."""
    if isinstance(value, (str, bytes, bytearray)):
        column = np.empty(1, dtype=object)
        column[0] = value
        return column
    return np.asarray(value)[None]
