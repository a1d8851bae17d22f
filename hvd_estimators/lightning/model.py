"""`LightningModel`: predicts with a trained LightningModule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyspark.sql import Column
from pyspark.sql import types as T

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.batch import DEFAULT_RESOURCES, Predictor, Resources
from hvd_estimators.inference.broadcast import Payload
from hvd_estimators.lightning.package import is_lightning
from hvd_estimators.lightning.predictor import (
    LightningPredictor,
    RowFunction,
    RowPredictor,
    floating_dtype,
    forward_inputs,
)
from hvd_estimators.params import boolean, param
from hvd_estimators.prepare.schema import quoted
from hvd_estimators.torch import model as torch_model
from hvd_estimators.torch.dry_run import torch_traceless
from hvd_estimators.torch.serialization import copied, module_payload
from hvd_estimators.torch.stored_weights import weights_place
from hvd_estimators.torch.tensors import call_with_leading, require_tensors

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

    def _output_shapes(self) -> list[tuple[int, ...]]:
        # fit() stores the output shapes of forward(), which predict_step may change.
        by_step = self.getOrDefault("use_predict_step")
        is_known = self.getOrDefault("output_shapes") is not None and not by_step
        tried = None if is_known else self._tried_shapes()
        return super()._output_shapes() if tried is None else tried

    def _tried_shapes(self) -> list[tuple[int, ...]] | None:
        """Return the output shapes for rows of zeros; None if the module cannot be tried on them.

        Only shapes are computed of a module whose weights are in files.
        """
        names, shapes = self._input_columns().names, self.getOrDefault("input_shapes")
        transformations = ("transformation_fn", "transformation_batch_fn")
        if all(self.getOrDefault(name) is None for name in transformations):
            shapes = shapes or self._trained_shapes(names)
        if shapes is None or self._collate() is not None or any(-1 in s[1:] for s in shapes):
            return None
        try:
            given = self._plain_model()
            device = torch.device("meta" if any(p.is_meta for p in given.parameters()) else "cpu")
            module: Any = copied(given).to(device).eval()
            inputs, spec = self._zeros(module, names, shapes, device), self._transform_spec()
            with torch_traceless():
                if self.getOrDefault("use_predict_step"):
                    batch = dict(zip(names, inputs, strict=True))
                    raw = call_with_leading(module.predict_step, batch, 0)
                else:
                    raw = spec.call(module, inputs)
            outputs = require_tensors(spec.select(raw), raw)
        except Exception as error:
            logger.info("The model cannot be tried on rows of zeros (%s).", error)
            return None
        return [tuple(output.shape[1:]) for output in outputs]

    def _trained_shapes(self, names: Sequence[str]) -> list[tuple[int, ...]] | None:
        """Return the shapes of the training columns, -1 first; None if they are not known."""
        metadata = self._get_metadata() or {}
        shapes = [metadata[name].get("shape") for name in names if name in metadata]
        if len(shapes) != len(names) or any(shape is None or None in shape for shape in shapes):
            return None
        return [(-1, *shape) for shape in shapes]

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

    def _feature_column(self, field: T.StructField) -> Column | str:
        if self._predicts_rows() and isinstance(field.dataType, (T.StringType, T.BinaryType)):
            return quoted(field.name)
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


TorchModel = LightningModel
